"""Prompts and answers that are text, written as turns of a chat."""

from __future__ import annotations

import json

import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import PreprocessConfig, load_dataset, row_format
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.errors import DataError


def turns(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"messages": messages}


def encoded(rows, **how):
    how = PreprocessConfig(256, "chatml", as_chats=how.pop("as_chats", True), **how)
    return [
        (e.input_ids.tolist(), e.labels.tolist()) for e in encode_rows(rows, tiny_tokenizer(), how)
    ]


PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        (PAIR, turns("a", "b")),
        ({**PAIR, "system": "s", "input": "not read"}, turns("a", "b", system="s")),
        ({"instruction": "a", "output": "b"}, turns("a", "b")),
        ({"instruction": "a", "input": "", "output": "b"}, turns("a", "b")),
        ({"instruction": "a", "input": "c", "output": "b"}, turns("a\nc", "b")),
        ({"instruction": "", "input": "c", "output": "b"}, turns("c", "b")),
        (
            {"instruction": "e", "output": "f", "history": [["a", "b"], ["c", "d"]], "system": "s"},
            turns("a", "b", "c", "d", "e", "f", system="s"),
        ),
    ],
)
@pytest.mark.parametrize("train_on", ["auto", "last_turn", "all"])
def test_a_row_is_the_chat_that_it_stands_for(row, chat, train_on):
    assert encoded([row], train_on=train_on) == encoded([chat], train_on=train_on, as_chats=False)


def test_only_the_answer_of_a_prompt_is_trained_on():
    [(ids, labels)] = encoded([PAIR])
    assert trained_text(tiny_tokenizer(), ids, labels) == "b<|im_end|>\n"


def test_other_rows_stay_what_they_are():
    for row in (turns("a", "b"), {"text": "a"}, {"prompt": turns("a")["messages"],
                "completion": [{"role": "assistant", "content": "b"}]}):  # fmt: skip
        assert encoded([row]) == encoded([row], as_chats=False)


@pytest.mark.parametrize(
    ("objective", "row", "chat"),
    [
        (
            "dpo",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": turns("a")["messages"]},
        ),
        (
            "dpo",
            {
                "instruction": "a",
                "input": "d",
                "history": [["x", "y"]],
                "chosen": "b",
                "rejected": "c",
            },
            {"prompt": turns("x", "y", "a\nd")["messages"]},
        ),
        ("kto", {**PAIR, "label": True}, {"prompt": turns("a")["messages"]}),
        (
            "kto",
            {"instruction": "a", "completion": "b", "label": False},
            {"prompt": turns("a")["messages"]},
        ),
    ],
)
def test_answers_that_are_compared_or_judged(objective, row, chat):
    answers = {
        key: [{"role": "assistant", "content": row[key]}]
        for key in ("chosen", "rejected", "completion")
        if key in row
    }
    expected = encoded([{**row, **answers, **chat}], objective=objective, as_chats=False)
    assert encoded([row], objective=objective) == expected


def test_prompts_of_such_a_run_are_turns_of_a_chat(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PAIR) + "\n")
    how = PreprocessConfig(64, "chatml", as_chats=True)
    assert row_format(path, tiny_tokenizer(), how) == "messages"
    assert len(load_dataset(path, tiny_tokenizer(), 64, how=how)) == 1


@pytest.mark.parametrize("cell", [5, ["x"]])
def test_what_is_no_text_is_refused(cell):
    with pytest.raises(DataError, match=r"rows\[0\]"):
        encoded([{"prompt": "a", "completion": cell}])
    with pytest.raises(DataError, match=r"rows\[0\]: 'history' must be a list of pairs"):
        encoded([{"instruction": "a", "output": "b", "history": "x"}])
