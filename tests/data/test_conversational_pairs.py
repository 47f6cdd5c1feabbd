"""TRL's conversational prompt and completion: the completion's answers are trained on."""

import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import ChatTemplate, PromptFormat
from qlora_wgpu.data.columns import CHAT_PAIR, EmptyRow, detect_format
from qlora_wgpu.data.dataset import encode_rows, row_format
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import DataError

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def says(*turns):
    return [{"role": role, "content": content} for role, content in turns]


PROMPT = says(("user", "Q"), ("assistant", "A"), ("user", "R"))
ONE = {"prompt": PROMPT, "completion": says(("assistant", "B"))}
MORE = {"prompt": PROMPT, "completion": says(("assistant", "B"), ("user", "S"), ("assistant", "C"))}


def encode(row, template=PLAIN, train_on="auto"):
    tokenizer = tiny_tokenizer()
    chat = ChatTemplate(template, tokenizer.special_tokens)
    encoded = RowEncoder(tokenizer, chat, train_on).encode(row, detect_format(row))
    ids, labels, text = encoded.ids, encoded.labels, encoded.text
    return text, trained_text(tokenizer, ids, labels)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("row", "train_on", "expected"),
    [
        (ONE, "auto", "B<|im_end|>"),
        (ONE, "last_turn", "B<|im_end|>"),
        (MORE, "auto", "B<|im_end|>C<|im_end|>"),
        (MORE, "assistant", "B<|im_end|>C<|im_end|>"),
        (MORE, "completion", "B<|im_end|>C<|im_end|>"),
        (MORE, "last_turn", "C<|im_end|>"),
        ({**ONE, "prompt": PROMPT[:1]}, "auto", "B<|im_end|>"),
        ({**ONE, "prompt": []}, "auto", "B<|im_end|>"),
        ({**ONE, "completion": says(("user", "x"))}, "auto", ""),
        ({**ONE, "completion": []}, "auto", ""),
    ],
)
def test_the_completions_answers_are_trained_on(template, row, train_on, expected):
    assert encode(row, template, train_on)[1] == expected


def test_everything_is_trained_on_where_that_is_asked_for():
    text, labels = encode(ONE, train_on="all")
    assert labels == text == "[user]Q<|im_end|>[assistant]A<|im_end|>[user]R<|im_end|>" \
        "[assistant]B<|im_end|>"  # fmt: skip


def test_texts_are_pairs_as_before():
    assert detect_format({"prompt": "a", "completion": "b"}) == "prompt/completion"
    assert detect_format({"prompt": "[1, 2]", "completion": "b"}) == "prompt/completion"
    assert detect_format(ONE) == detect_format(ONE, "prompt/completion") == CHAT_PAIR


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {**ONE, "completion": "B"},
            "must both be lists of messages or both be text, got text as 'completion'",
        ),
        ({**ONE, "prompt": ["Q"]}, "message 1 must be an object, got text"),
        ({**ONE, "completion": [{"role": "assistant"}]}, "message 1: 'content' is missing"),
    ],
)
def test_rows_that_are_none(row, message):
    with pytest.raises(DataError, match=message):
        encode(row)
    with pytest.raises(EmptyRow):
        encode({"prompt": [], "completion": []})


@pytest.mark.parametrize("given", ["auto", "prompt/completion"])
def test_a_data_set_of_them_is_one_of_chats(given):
    how = PreprocessConfig(64, PLAIN, given)
    rows = [ONE, {"prompt": [], "completion": []}, MORE]
    dataset = encode_rows(rows, tiny_tokenizer(), how)
    assert (len(dataset), dataset.counts.empty) == (2, 1)
    kind = row_format(rows, tiny_tokenizer(), how)
    assert PromptFormat.of_rows(kind, tiny_tokenizer(), PLAIN).kind == "chat"
    with pytest.raises(DataError, match="that of the rows before it is 'conversational prompt"):
        encode_rows([ONE, {"prompt": "a", "completion": "b"}], tiny_tokenizer(), how)


def test_tools_stand_beside_them():
    template = PLAIN.replace("{% for", "{{ tools }}{% for", 1)
    row = {**ONE, "tools": [{"name": "add"}]}
    assert "add" in encode(row, template)[0] and encode(row, template)[1] == "B<|im_end|>"
