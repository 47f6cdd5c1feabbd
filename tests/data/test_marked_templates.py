"""Turns with flags such as train: false, in templates of many kinds, against plain readings."""

import random
import re
from itertools import pairwise

import pytest
from data.test_last_turn import TEMPLATES, TOOLS, _conversation
from support.recorded import RECORDED, needs_recordings
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import ChatTemplate
from qlora_wgpu.data.row_formats import RowEncoder

RECORDINGS = sorted(path.stem for path in RECORDED.glob("chat_templates/*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def encoded(template, messages, train_on="assistant"):
    tokenizer = tiny_tokenizer()
    encoder = RowEncoder(tokenizer, template, train_on)
    row = encoder.encode({"messages": messages}, "messages")
    return row.text, trained_text(tokenizer, row.ids, row.labels)


def marked(rng, messages):
    """Some of the assistant's turns with a mark, and which are not trained on."""
    spared = {i for i, m in enumerate(messages) if m["role"] == "assistant" and rng.random() < 0.5}
    no = [{"weight": 0}, {"train": False}, {"training": False}]
    given = [m | (rng.choice(no) if i in spared else {}) for i, m in enumerate(messages)]
    return given, spared


def read(pieces_of, messages, spared):
    """The text, and what the turns that are left learn; each message begins with its role."""
    number, kept, text = -1, "", ""
    for piece, is_own in pieces_of(messages):
        heads = {f"[{message['role']}]" for message in messages[number + 1 : number + 2]}
        number += piece in heads and not is_own
        text += piece
        kept += piece if is_own and number not in spared else ""
    return text, kept


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_of_several_passages(name):
    source, pieces_of = TEMPLATES[name]
    template, rng = ChatTemplate(source), random.Random(name)
    for _ in range(60):
        messages, spared = marked(rng, _conversation(rng, tools=name in TOOLS))
        assert encoded(template, messages) == read(pieces_of, messages, spared), messages


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize("name", RECORDINGS)
def test_templates_of_models(name):
    source = (RECORDED / "chat_templates" / f"{name}.jinja").read_text()
    template = ChatTemplate(source, SPECIAL)
    asked = [{"role": "user", "content": f"?{i}"} for i in range(4)]
    answers = [{"role": "assistant", "content": f"w{i}"} for i in range(4)]
    plain = [m for pair in zip(asked, answers, strict=True) for m in pair]
    text, whole = encoded(template, plain)
    before = rf"(<think>\s*</think>\s*|{re.escape(whole[: whole.index('w0')])})?"
    begins = [each.start() for each in re.finditer(rf"{before}w\d", whole)]
    turns = [whole[a:b] for a, b in pairwise([*begins, len(whole)])]
    assert "".join(turns) == whole and len(turns) == 4
    for kept in range(1, 16):
        marks = [{} if kept >> i & 1 else {"train": False} for i in range(4)]
        given = [m for q, a, mark in zip(asked, answers, marks, strict=True) for m in (q, a | mark)]
        expected = "".join(turn for i, turn in enumerate(turns) if kept >> i & 1)
        assert encoded(template, given) == (text, expected)
