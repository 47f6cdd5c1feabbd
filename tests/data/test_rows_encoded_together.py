"""Rows that become tokens together."""

from __future__ import annotations

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import Tokenizer, row_formats
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import TokenizerError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
ROWS = {
    "messages": lambda i: {"messages": turns(i, "role", "content", "user", "assistant")},
    "conversations": lambda i: {"conversations": turns(i, "from", "value", "human", "gpt")},
    "pair": lambda i: {"prompt": f"{i} + {i}", "completion": f" = {2 * i}é"},
    "alpaca": lambda i: {"instruction": f"Say {i}", "output": "x" * i or "none"},
    "text": lambda i: {"text": f"{i} 🙂" * (i + 1)},
}
ANSWERS = {
    "dpo": lambda i: {"prompt": f"Q{i}", "chosen": f" A{i}", "rejected": f" B{i}" * (i % 3 + 1)},
    "kto": lambda i: {"prompt": f"Q{i}", "completion": f" A{i}", "label": i % 2 == 0},
}


def turns(i: int, role: str, content: str, asks: str, answers: str) -> list[dict]:
    exchange = [{role: asks, content: f"Q{i}"}, {role: answers, content: f"A é{i}"}]
    return exchange * (i % 3 + 1)


def encoded(rows: list[dict], **options) -> list[tuple[list[int], list[int]]]:
    data = encode_rows(
        rows, tiny_tokenizer(chat_template=TEMPLATE), PreprocessConfig(256, **options), name="rows"
    )
    return [(e.input_ids.tolist(), e.labels.tolist()) for e in data]


@pytest.fixture
def one_by_one(monkeypatch):
    """How often a text became tokens by itself."""
    texts = []
    encode = Tokenizer.encode_with_offsets

    def noted(self, text, *how):
        texts.append(text)
        return encode(self, text, *how)

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", noted)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"train_on": train_on}) for kind in ROWS for train_on in ("auto", "all")),
        *((kind, {"objective": kind}) for kind in ANSWERS),
    ],
)
def test_they_are_what_they_are_alone(kind, options, one_by_one, monkeypatch) -> None:
    rows = [(ROWS | ANSWERS)[kind](i) for i in range(130)]
    together = encoded(rows, **options)
    assert len(one_by_one) < 10
    monkeypatch.setattr(row_formats, "_TOKENIZED", 0)
    assert encoded(rows, **options) == together
    assert len(one_by_one) >= 130


def test_the_rows_before_a_wrong_one_come_first() -> None:
    rows = [ROWS["pair"](i) for i in range(30)]
    rows[7] = {"prompt": "a", "completion": "\ud800"}
    rows[9] = {"prompt": "a", "completion": 5}
    with pytest.raises(TokenizerError, match=r"rows\[7\]: cannot encode .* lone surrogate"):
        encoded(rows)


def test_what_the_library_cannot_do_at_once_is_done_one_by_one(monkeypatch) -> None:
    rows = [ROWS["messages"](i) for i in range(30)]
    together = encoded(rows)

    def refused(*args):
        raise TokenizerError("no")

    monkeypatch.setattr(Tokenizer, "encode_batch", refused)
    assert encoded(rows) == together


def test_a_long_text_has_its_own_turn(one_by_one, monkeypatch) -> None:
    rows = [ROWS["text"](i) for i in range(30)]
    together = encoded(rows)
    assert not one_by_one
    monkeypatch.setattr(row_formats, "_TOKENIZED", 3)  # less than any has
    assert encoded(rows) == together
    assert len(one_by_one) == len(rows)
