"""Calls within answers, however these come in pieces."""

import json

import pytest

from qlora_wgpu.serving.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    QWEN3_CODER,
    Call,
    ToolCallParser,
    ToolSet,
    by_name,
    call_format,
)

TOOLS = by_name(
    [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "all": {"type": "boolean"},
        }}}}
        for name in ("weather", "add")
    ]
)  # fmt: skip
PARIS, SUM = Call("weather", '{"city": "Pärís"}'), Call("add", '{"days": 2, "all": true}')
BODY = '{"name": "weather", "arguments": {"city": "Pärís"}}'
HERMES_CALL = f"<tool_call>\n{BODY}\n</tool_call>"
XML = (
    "<tool_call>\n<function=add>\n<parameter=days>\n2\n</parameter>\n<parameter=all>\ntrue\n"
    "</parameter>\n</function>\n</tool_call>"
)


def joined(read):
    """Neighbouring texts as one."""
    found = []
    for each in read:
        if isinstance(each, str) and found and isinstance(found[-1], str):
            found[-1] += each
        else:
            found.append(each)
    return found


def read_in(form, pieces, parallel=True):
    reader = ToolCallParser(ToolSet(form, TOOLS, parallel))
    read = [each for piece in pieces for each in reader.push(piece)]
    return joined(read + reader.end())


CASES = [
    (HERMES, HERMES_CALL, [PARIS]),
    (HERMES, f"Let me see.\n\n{HERMES_CALL}\n{HERMES_CALL}\n", ["Let me see.", PARIS, PARIS]),
    (HERMES, f"{HERMES_CALL} Done.", [PARIS, " Done."]),
    (HERMES, "a < b and <tool", ["a < b and <tool"]),
    (HERMES, f"<tool_call>\n{BODY}", [PARIS]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', [Call("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
     [Call("add", '{"a": 1}')]),
    (HERMES, "  Just text.  \n", ["  Just text.  \n"]),
    (QWEN3_CODER, XML, [SUM]),
    (QWEN3_CODER, XML.replace("2", "two").replace("days", "city"),
     [Call("add", '{"city": "two", "all": true}')]),
    (QWEN3_CODER, "<tool_call><function=add></function></tool_call>", [Call("add", "{}")]),
    (MISTRAL, f'[TOOL_CALLS] [{BODY}, {{"name": "add", "arguments": {{}}, "id": "aaaaaaaaa"}}]',
     [PARIS, Call("add", "{}")]),
    (MISTRAL, 'So.[TOOL_CALLS]weather[ARGS]{"city": "Pärís"}[TOOL_CALLS]add{}',
     ["So.", PARIS, Call("add", "{}")]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Pärís"}}', [PARIS]),
    (LLAMA, '\n<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}',
     [Call("add", "{}")] * 2),
    (LLAMA, 'It is {"name": "add", "parameters": {}}', ['It is {"name": "add", "parameters": {}}']),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_and_text(form, text, expected):
    """Whole, letter by letter, and cut in two anywhere."""
    assert read_in(form, [text]) == expected
    assert read_in(form, text) == expected
    for place in range(len(text)):
        assert read_in(form, [text[:place], text[place:]]) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>{no JSON}</tool_call> and more"),
        (HERMES, HERMES_CALL.replace("weather", "launch")),  # which nobody offered
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, f"<tool_call>{BODY}{BODY}</tool_call>"),
        (HERMES, '<tool_call>{"name": "add", "arg'),
        (HERMES, "<tool_call>" + "[" * 5000 + "</tool_call>"),
        (HERMES, "<tool_call>7</tool_call>"),
        (QWEN3_CODER, XML.replace("</function>", "")),
        (QWEN3_CODER, XML.replace("</parameter>", "", 1)),
        (QWEN3_CODER, HERMES_CALL),
        (MISTRAL, f"[TOOL_CALLS] [{BODY}"),
        (MISTRAL, "[TOOL_CALLS] weather please"),
        (MISTRAL, "[TOOL_CALLS] [7]"),
        (LLAMA, '{"name": "add", "parameters": {}} is what I would call'),
        (LLAMA, "<|python_tag|>print(1)"),
        (LLAMA, "{"),
    ],
)
def test_what_is_no_whole_call_of_an_offered_function_stays_text(form, text):
    for pieces in ([text], text):
        assert "".join(read_in(form, pieces)) == text


def test_one_call_alone():
    text = f"A.{HERMES_CALL}{HERMES_CALL} B."
    assert read_in(HERMES, [text], parallel=False) == ["A.", PARIS]
    reader = ToolCallParser(ToolSet(HERMES, TOOLS, parallel=False))
    ended = [bool(reader.push(letter)) or reader.ended for letter in text]
    assert ended.index(True, 3) == text.index("</tool_call>") + len("</tool_call>") - 1
    assert read_in(MISTRAL, [f"[TOOL_CALLS][{BODY}, {BODY}]"], parallel=False) == [PARIS]


def test_nothing_is_held_back_that_cannot_begin_a_call():
    reader = ToolCallParser(ToolSet(HERMES, TOOLS))
    assert reader.push("Two is <") == ["Two is"]
    assert reader.push(" three <too") == [" < three"]
    assert reader.push("l>") == [" <tool>"]


def test_the_template_tells_the_format():
    assert call_format("... <tool_call>\n{...") is HERMES
    assert call_format("<tool_call>\n<function=example>") is QWEN3_CODER
    assert call_format("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert call_format("<|python_tag|>") is LLAMA
    assert call_format('Respond in the format {"name": function name, "parameters": x') is LLAMA
    assert call_format("{{ tools | tojson }}") is None


def test_ids_are_what_templates_take():
    assert HERMES.new_id().startswith("call_") and HERMES.new_id() != HERMES.new_id()
    assert len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum()


def test_arguments_are_json():
    for form, text, expected in CASES:
        for call in read_in(form, [text]):
            if isinstance(call, Call):
                assert isinstance(json.loads(call.arguments), dict), expected
