"""Conversations in whatever form: one text, trained and served, for every template."""

from __future__ import annotations

import json

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import ChatTemplate, PreprocessConfig, PromptFormat
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.errors import DataError
from qlora_wgpu.serving.requests import ChatRequest

PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
# Arguments as an object, contents as text.
OBJECTS = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m['content'].strip() + '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>{% endfor %}" + PROMPT
)
# Arguments as text alone, and contents with parts.
TEXTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
    "{% endfor %}</s>{% endfor %}" + PROMPT
)
# Nothing but parts.
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}{{ part.text }}{% endfor %}"
    "</s>{% endfor %}" + PROMPT
)
SCHEMA = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
ASKED = {"role": "user", "content": "Rome?"}
RESULT = {"role": "tool", "content": "sunny"}
ANSWER = {"role": "assistant", "content": "It is sunny."}


def called(content="", **call):
    return {"role": "assistant", "content": content, **call}


def function(arguments):
    return {"name": "weather", "arguments": arguments}


OBJECT, TEXT = {"town": "Rome"}, json.dumps({"town": "Rome"})
CALLS = {
    "an object": called(tool_calls=[{"type": "function", "function": function(OBJECT)}]),
    "text": called(tool_calls=[{"type": "function", "function": function(TEXT)}]),
    "null": called(None, tool_calls=[{"function": function({**OBJECT, "unit": None})}]),
    "bare": called(None, name=None, tool_calls=[function(OBJECT)]),
    "an older key": called(None, function_call=function(TEXT)),
    "kept as text": called(tool_calls=json.dumps([{"function": function(OBJECT)}])),
}


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


def trained(tokenizer, template, *, tools=None, **row):
    encoder = RowEncoder(tokenizer, ChatTemplate(template))
    return encoder.encode({"messages": row["messages"], "tools": tools, **row}, "messages").text


def served(tokenizer, template, messages, tools=None):
    body = {"model": "m", "messages": messages, "tools": tools}
    asked = ChatRequest.read(body)
    written = PromptFormat("chat", tokenizer, ChatTemplate(template))
    return tokenizer.decode(written.ids(asked.messages, asked.tools), False)


@pytest.mark.parametrize("template", [OBJECTS, TEXTS])
@pytest.mark.parametrize("form", CALLS)
def test_the_same_messages_are_the_same_text_trained_and_served(tokenizer, template, form):
    messages = [ASKED, CALLS[form], RESULT]
    written = f"weather{TEXT}</s>[tool]sunny</s>[assistant]"
    assert written in served(tokenizer, template, messages)
    whole = trained(tokenizer, template, messages=[*messages, ANSWER])
    assert whole == served(tokenizer, template, messages) + "It is sunny.</s>"


def test_nulls_are_absent_from_messages(tokenizer):
    plain = [ASKED, ANSWER]
    filled = [{**each, "tool_calls": None, "name": None, "weight": None} for each in plain]
    assert trained(tokenizer, OBJECTS, messages=filled) == trained(
        tokenizer, OBJECTS, messages=plain
    )


def test_contents_are_text_or_parts_as_the_template_takes_them(tokenizer):
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
             for m in (ASKED, ANSWER)]  # fmt: skip
    text = trained(tokenizer, OBJECTS, messages=[ASKED, ANSWER])
    assert trained(tokenizer, OBJECTS, messages=parts) == text
    assert trained(tokenizer, TEXTS, messages=parts) == (
        "[user]<Rome?></s>[assistant]<It is sunny.></s>"
    )
    for messages in (parts, [ASKED, ANSWER]):
        assert trained(tokenizer, PARTS, messages=messages) == (
            "[user]Rome?</s>[assistant]It is sunny.</s>"
        )


def test_a_developer_is_the_system_where_the_template_knows_none(tokenizer):
    messages = [{"role": "developer", "content": "Be brief."}, ASKED, ANSWER]
    assert trained(tokenizer, OBJECTS, messages=messages).startswith("[system]Be brief.")
    knowing = OBJECTS.replace(
        "[{{ m.role }}]", "[{{ m.role }}]{% if m.role == 'developer' %}!{% endif %}"
    )
    assert trained(tokenizer, knowing, messages=messages).startswith("[developer]!Be brief.")


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]),
                                   [{"type": "function", "function": SCHEMA}]])  # fmt: skip
def test_tools_are_wrapped(tokenizer, tools):
    text = trained(tokenizer, OBJECTS, messages=[ASKED, ANSWER], tools=tools)
    assert text.startswith("(weather)[user]")


@pytest.mark.parametrize("tools", ["", "[]", "null", None, []])
def test_no_tools_in_any_form_are_none(tokenizer, tools):
    text = trained(tokenizer, OBJECTS, messages=[ASKED, ANSWER], tools=tools)
    assert text == "[user]Rome?</s>[assistant]It is sunny.</s>"


def test_a_row_whose_answer_is_null_is_left_out_and_counted(tokenizer):
    for key, rows in (
        ("conversations", [[{"from": "human", "value": "q"}, {"from": "gpt", "value": each}]
                           for each in (None, "a")]),
        ("messages", [[ASKED, {"role": "assistant", "content": each}] for each in (None, "a")]),
    ):  # fmt: skip
        dataset = encode_rows(
            [{key: row} for row in rows], tokenizer, PreprocessConfig(64, OBJECTS)
        )
        assert (len(dataset), dataset.counts.empty) == (1, 1)


def test_a_row_gives_the_template_its_options(tokenizer):
    template = "{{ mood | default('calm') }}" + OBJECTS
    row = {"messages": [ASKED, ANSWER]}
    assert trained(tokenizer, template, **row).startswith("calm[user]")
    for options in ({"mood": "gay"}, '{"mood": "gay"}'):
        text = trained(tokenizer, template, **row, chat_template_kwargs=options)
        assert text.startswith("gay[user]")
    with pytest.raises(DataError, match="'chat_template_kwargs' must not have 'messages'"):
        trained(tokenizer, template, **row, chat_template_kwargs={"messages": []})


# As in gpt-oss's template: always said; and as in one that says only what is not usual.
SAID = "Reasoning: {{ reasoning_effort | default('medium') }}" + OBJECTS
UNUSUAL = (
    "{% set effort = reasoning_effort | default('high') %}"
    "{% if effort not in ['low', 'high'] %}{{ raise_exception('no effort ' + effort) }}{% endif %}"
    "{% if effort == 'low' %}(briefly){% endif %}" + OBJECTS
)


@pytest.mark.parametrize(
    ("template", "usual", "low"),
    [(SAID, "Reasoning: medium", "Reasoning: low"), (UNUSUAL, "", "(briefly)")],
)
def test_rows_and_prompts_set_the_effort_of_reasoning(tokenizer, template, usual, low):
    """The prompt of a trained row is what `chat` and `serve` make of the same options."""
    row, options = {"messages": [ASKED, ANSWER]}, {"reasoning_effort": "low"}
    prompts = PromptFormat("chat", tokenizer, ChatTemplate(template))
    for begin, given in ((usual, {}), (low, options)):
        whole = trained(tokenizer, template, **row, chat_template_kwargs=given)
        prompt = tokenizer.decode(prompts.encoded([ASKED], options=given)[0], False)
        assert whole.startswith(f"{begin}[user]Rome?")
        assert whole == prompt + "It is sunny.</s>"


def test_a_template_refuses_an_effort_that_it_has_not(tokenizer):
    row = {"messages": [ASKED, ANSWER], "chat_template_kwargs": {"reasoning_effort": "huge"}}
    with pytest.raises(DataError, match="no effort huge"):
        trained(tokenizer, UNUSUAL, **row)


def test_a_template_for_tools_writes_conversations_with_tools(tokenizer):
    encoder = RowEncoder(tokenizer, ChatTemplate(OBJECTS, None, "with tools: " + OBJECTS))
    row = {"messages": [ASKED, ANSWER]}
    assert encoder.encode(row, "messages").text.startswith("[user]")
    row = {"messages": [ASKED, ANSWER], "tools": [SCHEMA]}
    assert encoder.encode(row, "messages").text.startswith("with tools: (weather)")


def test_calls_that_are_no_calls_are_refused_by_their_place(tokenizer):
    for calls in (["weather"], [{"function": {"arguments": {}}}], {"name": "weather"}):
        with pytest.raises(DataError, match=r"message 2(: 'tool_calls' must| has a tool call)"):
            trained(tokenizer, OBJECTS, messages=[ASKED, called(tool_calls=calls)])
