"""Rows to labels: every format, its errors, and no second beginning-of-sequence token."""

from __future__ import annotations

import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import ChatTemplate, PreprocessConfig, row_format
from qlora_wgpu.data.columns import FORMATS, detect_format
from qlora_wgpu.data.messages import alpaca_prompt, from_sharegpt
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.errors import DataError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def encode(row, tokenizer=None, template=TEMPLATE):
    tokenizer = tokenizer or tiny_tokenizer()
    chat = ChatTemplate(template, tokenizer.special_tokens) if template else None
    encoded = RowEncoder(tokenizer, chat).encode(row, detect_format(row))
    ids, labels = encoded.ids, encoded.labels
    return tokenizer.decode(ids, skip_special_tokens=False), trained_text(tokenizer, ids, labels)


MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
    {"role": "assistant", "content": "B"},
]
RENDERED = (
    "<s>[system]S<|im_end|>[user]Q<|im_end|>[assistant]A<|im_end|>[user]R<|im_end|>"
    "[assistant]B<|im_end|>"
)


def test_messages_teach_the_assistant_with_its_end_of_turn() -> None:
    assert encode({"messages": MESSAGES}) == (RENDERED, "A<|im_end|>B<|im_end|>")


def test_chats_get_no_special_tokens_from_the_tokenizer() -> None:
    text, _ = encode({"messages": MESSAGES}, template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert text == RENDERED.removeprefix("<s>")


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "assistant"), ("Human", "chatgpt")])
def test_sharegpt(names) -> None:
    human, gpt = names
    turns = [
        {"from": "system", "value": "S"},
        {"from": human, "value": "Q"},
        {"from": gpt, "value": "A"},
        {"from": human, "value": "R"},
        {"from": gpt, "value": "B"},
    ]
    assert encode({"conversations": turns}) == (RENDERED, "A<|im_end|>B<|im_end|>")
    assert encode({"conversations": turns[1:], "system": "S"})[0] == RENDERED


CALL = '{"name": "add", "arguments": {"x": 1}}'


@pytest.mark.parametrize("value", [CALL, f"[{CALL}]"])
def test_function_calls_of_sharegpt_are_the_assistants(value) -> None:
    messages = from_sharegpt([{"from": "function_call", "value": value}])
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    assert messages == [{"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("value", ["add(1)", "[]", "{}", "3"])
def test_function_calls_of_sharegpt_must_be_json(value) -> None:
    with pytest.raises(DataError, match="turn 1 is from 'function_call'"):
        from_sharegpt([{"from": "function_call", "value": value}])


def test_messages_may_hold_sharegpts_turns() -> None:
    turns = [{"from": m["role"], "value": m["content"]} for m in MESSAGES]
    assert encode({"messages": turns}) == (RENDERED, "A<|im_end|>B<|im_end|>")


def test_conversations_may_hold_messages() -> None:
    assert encode({"conversations": MESSAGES})[0] == RENDERED


def test_prompt_and_completion() -> None:
    assert encode({"prompt": "2+2=", "completion": "4"}) == ("<s>2+2=4</s>", "4</s>")


def test_a_token_across_prompt_and_completion_is_trained_on() -> None:
    tokenizer = tiny_tokenizer(merges=(("b", "c"),))
    assert encode({"prompt": "ab", "completion": "cd"}, tokenizer)[1] == "bcd</s>"


def test_text() -> None:
    assert encode({"text": "abc"}) == ("<s>abc</s>", "<s>abc</s>")


@pytest.mark.parametrize(
    "row", [{"text": "<s>abc"}, {"prompt": "<s>ab", "completion": "c"}], ids=["text", "prompt"]
)
def test_no_second_bos(row) -> None:
    assert encode(row)[0] == "<s>abc</s>"


def test_no_second_eos() -> None:
    assert encode({"text": "abc</s>"})[0] == "<s>abc</s>"
    assert encode({"prompt": "a", "completion": "b</s>"}) == ("<s>ab</s>", "b</s>")
    assert encode({"prompt": "a</s>", "completion": ""}) == ("<s>a</s>", "</s>")


def test_tokenizers_without_bos_or_eos() -> None:
    assert encode({"text": "abc"}, tiny_tokenizer(bos=False))[0] == "abc</s>"
    assert encode({"text": "abc"}, tiny_tokenizer(eos=False))[0] == "<s>abc"


@pytest.mark.parametrize("extra", [{}, {"input": ""}, {"input": None}, {"input": " "}])
def test_instruction(extra) -> None:
    text, answer = encode({"instruction": "Add.", "output": "4", **extra})
    assert text == f"<s>{alpaca_prompt('Add.')}4</s>"
    assert answer == "4</s>"
    assert "### Input" not in text


def test_instruction_with_input() -> None:
    text, answer = encode({"instruction": "Add.", "input": "2 2", "output": "4"})
    assert text == (
        "<s>Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n4</s>"
    )
    assert answer == "4</s>"


def test_characters_of_many_bytes_are_trained_on_whole() -> None:
    assert encode({"prompt": "é🙂", "completion": "你🙂"})[1] == "你🙂</s>"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("messages", "prompt", "completion"), "messages"),
        (("text", "output", "instruction", "input"), "instruction/output"),
        (("id", "text"), "text"),
        (("completion", "prompt", "text"), "prompt/completion"),
    ],
)
def test_detection(keys, expected) -> None:
    assert detect_format(dict.fromkeys(keys, "x")) == expected


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": "story"}, "text"),
        ({"prompt": "q", "completion": "a"}, "prompt/completion"),
        ({"input": "context", "system": "rules"}, "messages"),
        ({"output": "a"}, "messages"),  # an instruction is not there
    ],
)
def test_named_columns_go_before_what_other_keys_make(columns, expected) -> None:
    row = {"messages": MESSAGES, **dict.fromkeys(columns, "x")}
    assert detect_format(row, columns=columns) == expected
    given = {"messages": MESSAGES, **dict.fromkeys(columns.values(), "x")}
    assert row_format([given], tiny_tokenizer(), PreprocessConfig(64, columns=columns)) == expected
    assert expected in FORMATS


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("message",), "'message' looks like 'messages'"),
        (("prompt", "response"), "its keys are 'prompt', 'response'"),
        ((), "its keys are none"),
    ],
)
def test_rows_of_no_format(keys, expected) -> None:
    with pytest.raises(DataError, match="a row must have 'messages'; or") as caught:
        detect_format(dict.fromkeys(keys, "x"))
    assert expected in str(caught.value)


USER = {"role": "user", "content": "Q"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": []}, "must be a non-empty list of messages"),
        ({"messages": "x"}, "must be a non-empty list of messages"),
        ({"messages": None}, "must be a list of messages or text, got"),
        ({"messages": ["x"]}, "message 1 must be an object, got text"),
        ({"messages": [USER, {"content": "x"}]}, "message 2 must have a 'role'"),
        ({"messages": [USER, {"role": 3, "content": "x"}]}, "message 2 must have a 'role'"),
        ({"messages": [{"role": "user"}]}, "message 1: 'content' is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "got a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "has a part of type 'image'",
        ),
        ({"messages": MESSAGES, "tools": "x"}, "'tools' must be a list"),
        ({"conversations": []}, "must be a non-empty list of turns"),
        ({"conversations": [{"from": "human"}]}, "turn 1 must have 'from' and 'value'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "turn 1: unknown 'from' 'alien'"),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1: 'value' must be text"),
        ({"prompt": 3, "completion": "x"}, "'prompt' must be text, got a number"),
        ({"prompt": b"x", "completion": "x"}, "'prompt' must be text, got bytes"),
        ({"prompt": "x", "completion": None}, "'completion' must be text, got nothing"),
        ({"prompt": "", "completion": ""}, "has no text"),
        ({"instruction": "x", "input": [], "output": "x"}, "'input' must be text, got a list"),
        ({"text": True}, "'text' must be text, got a boolean"),
        ({"text": {}}, "'text' must be text, got an object"),
        ({"text": ""}, "has no text"),
    ],
)
def test_wrong_rows(row, expected) -> None:
    with pytest.raises(DataError) as caught:
        encode(row)
    assert expected in str(caught.value)


def test_chats_need_a_template() -> None:
    with pytest.raises(DataError, match=r"set data\.chat_template"):
        encode({"messages": MESSAGES}, template=None)


def test_tool_calls_need_no_content() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [USER, call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "A"}]
    answer = encode({"messages": messages}, template=template)[1]
    call = '{"type": "function", "function": {"name": "f", "arguments": {}}}'
    assert answer == f"[{call}]<|im_end|>A<|im_end|>"


def test_dropped_system_messages_are_counted() -> None:
    tokenizer = tiny_tokenizer()
    source = TEMPLATE.replace("messages %}", "messages if m.role != 'system' %}")
    encoder = RowEncoder(tokenizer, ChatTemplate(source, tokenizer.special_tokens))
    assert encoder.encode({"messages": MESSAGES}, "messages").left_out == ["the system message"]
    assert not encoder.encode({"messages": MESSAGES[1:]}, "messages").left_out
