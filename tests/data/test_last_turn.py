"""``train_on: last_turn``, against a plain reading of which characters the last turn has.

Each template stands beside a Python function that writes the same text, piece by piece, and says
of every piece whether the assistant is to learn it.
"""

import json
import random

import pytest
from support.recorded import RECORDED, needs_recordings
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import ChatTemplate
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.errors import DataError

G, E = "{% generation %}", "{% endgeneration %}"


def _head(message):
    return (f"[{message['role']}]", False)


def _one_block(messages):
    for m in messages:
        yield from (_head(m), ((m["content"] or "") + "<|im_end|>", m["role"] == "assistant"))


def _two_blocks(messages):
    for m in messages:
        own = m["role"] == "assistant"
        yield from (_head(m), (m["content"] or "", own), ("|", False), ("<|im_end|>", own))


def _with_thoughts(messages, upto=None):
    for i, m in enumerate(messages):
        own = m["role"] == "assistant"
        yield _head(m)
        if m.get("reasoning_content") and (upto is None or i >= upto):
            yield from (("(", False), (m["reasoning_content"], own), (")", False))
        yield (m["content"] or "", own)
        for call in m.get("tool_calls", ()):
            yield from (("{", False), (call["function"]["name"], own), ("}", False))
        yield ("<|im_end|>", own)


def _thoughts_after_the_last_question(messages):
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    return _with_thoughts(messages, last)


def _thoughts_of_the_very_last(messages):
    return _with_thoughts(messages, len(messages) - 1)


def _closed_once(messages):
    for m in messages:
        own = m["role"] == "assistant"
        yield from (_head(m), (m["content"] or "", own), ("~", own), (";", False))
    yield ("</s>", False)


THOUGHTS = (
    "{%- for m in messages -%}{%- set own = m.role == 'assistant' -%}[{{ m.role }}]"
    "{%- if m.reasoning_content and CONDITION -%}("
    f"{G}{{{{ m.reasoning_content }}}}{E})"
    "{%- endif -%}"
    f"{{%- if own -%}}{G}{{{{ m.content or '' }}}}{E}"
    f"{{%- for c in m.tool_calls or [] -%}}{{{{ '{{' }}}}{G}{{{{ c.function.name }}}}{E}}}"
    "{%- endfor -%}"
    f"{G}<|im_end|>{E}"
    "{%- else -%}{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
)
LAST_QUESTION = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
TEMPLATES = {
    "one block": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        f"{G}{{{{ m.content or '' }}}}<|im_end|>{E}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + PROMPT,
        _one_block,
    ),
    "no block": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}<|im_end|>{% endfor %}" + PROMPT,
        _one_block,
    ),
    "two blocks": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        f"{G}{{{{ m.content or '' }}}}{E}|{G}<|im_end|>{E}"
        "{% else %}{{ m.content }}|<|im_end|>{% endif %}{% endfor %}" + PROMPT,
        _two_blocks,
    ),
    "thoughts and calls": (THOUGHTS.replace("CONDITION", "true"), _with_thoughts),
    "thoughts since the question": (
        LAST_QUESTION + THOUGHTS.replace("CONDITION", "loop.index0 >= ns.last"),
        _thoughts_after_the_last_question,
    ),
    "thoughts of the last message": (
        THOUGHTS.replace("CONDITION", "loop.last"),
        _thoughts_of_the_very_last,
    ),
    "closed once": (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        f"{G}{{{{ m.content or '' }}}}{E}{G}~{E};"
        "{% else %}{{ m.content }}~;{% endif %}{% endfor %}</s>",
        _closed_once,
    ),
}
TOOLS = ("thoughts and calls", "thoughts since the question", "thoughts of the last message")


def _word(rng):
    return "".join(rng.choices("abcd ef", k=rng.randint(1, 6))).strip() or "g"


def _conversation(rng, *, tools):
    messages = [{"role": "system", "content": _word(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _word(rng)})
        for _ in range(rng.randint(0, 2) if tools else 0):
            calls = [{"function": {"name": _word(rng)}} for _ in range(rng.randint(1, 2))]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "content": _word(rng)})
        answer = {"role": "assistant", "content": _word(rng)}
        if tools and rng.random() < 0.6:
            answer["reasoning_content"] = _word(rng)
        messages.append(answer)
    return messages


def _read(pieces_of, messages):
    """The whole text, and what of it the last turn learns."""
    pieces = list(pieces_of(messages))
    begin = max(i for i, piece in enumerate(pieces) if piece == _head(messages[-1]))
    return "".join(t for t, _ in pieces), "".join(t for t, own in pieces[begin:] if own)


def _encode(source, messages, train_on="last_turn"):
    tokenizer = tiny_tokenizer()
    encoder = RowEncoder(tokenizer, ChatTemplate(source), train_on)
    row = encoder.encode({"messages": messages}, "messages")
    return row.text, trained_text(tokenizer, row.ids, row.labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("train_on", ["last_turn", "completion"])
def test_the_whole_last_turn_is_trained_on_and_nothing_else(name, train_on):
    source, pieces_of = TEMPLATES[name]
    rng = random.Random(name)
    for _ in range(40):
        messages = _conversation(rng, tools=name in TOOLS)
        assert _encode(source, messages, train_on) == _read(pieces_of, messages), messages


def test_two_messages_of_the_assistant_in_a_row():
    source, pieces_of = TEMPLATES["two blocks"]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert _encode(source, messages) == _read(pieces_of, messages)
    assert _encode(source, messages)[1] == "b<|im_end|>"


def test_a_turn_that_cannot_be_told_apart_is_refused():
    upper = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{G}{{{{ m.content | upper }}}}{{% if loop.last %}}!{{% endif %}}{E}"
        "{% elif loop.last %}{{ raise_exception('no question last') }}"
        "{% else %}{{ m.content | upper }}{% endif %}{% endfor %}"
    )
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": "x"} for role in roles]
    with pytest.raises(DataError, match="cannot locate the assistant's last turn"):
        _encode(upper, messages)


@needs_recordings
@pytest.mark.parametrize("name", ["llama3", "gemma", "gemma3", "phi3", "qwen2_5", "qwen3"])
def test_templates_with_marks_learn_what_follows_the_last_question(name):
    source = (RECORDED / "chat_templates" / f"{name}_training.jinja").read_text()
    cases = json.loads((RECORDED / "oracles" / "chat_template_cases.json").read_text())
    for conversation in ("ua", "multi"):
        messages = cases["convs"][conversation]
        text, last = _encode(source, messages)
        question = messages[-2]["content"].strip()
        turn = text[text.rindex(question) + len(question) :]
        assert last and last in turn and messages[-1]["content"].strip() in last
        assert _encode(source, messages, "assistant")[1].endswith(last)
