"""Writes the demo's fine-tuning data: data/train.jsonl and data/eval.jsonl.

Run it with ``python demo/make_data.py``; it takes a second and needs only Python. The rows depend
on the seeds below and on nothing else.

A row is a short story with a question about it, and the answer in one sentence. Every story is
told anew for its row, and a story of the evaluation rows is in no training row.
"""

from __future__ import annotations

import json
from pathlib import Path

from dice import Dice
from stories import make_facts, tell_beginning

DATA_FOLDER = Path(__file__).parent / "data"
TRAIN_ROWS, TRAIN_SEED = 640, 20_001
EVAL_ROWS, EVAL_SEED = 60, 20_002

# Longer messages are left out. So every row has at most 48 tokens and a training step is quick.
LONGEST_MESSAGE_WORDS = 30

Row = dict[str, list[dict[str, str]]]


def make_rows(count: int, seed: int, taken: frozenset[str] = frozenset()) -> list[Row]:
    """Returns `count` rows about different stories, none of whose stories is in `taken`."""
    dice = Dice(seed)
    rows: list[Row] = []
    seen = set(taken)
    while len(rows) < count:
        facts = make_facts(dice, 3)
        story = tell_beginning(dice, facts)
        question, answer = dice.pick(dice.pick(facts).questions())
        message = f"{story} {question}"
        if story in seen or len(message.split()) > LONGEST_MESSAGE_WORDS:
            continue
        seen.add(story)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": message},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    return rows


def story_of(row: Row) -> str:
    """Returns the story of a row, without its question."""
    return row["messages"][0]["content"].rpartition(". ")[0]


def make_data() -> dict[str, str]:
    """Returns the text of every data file by its name."""
    train = make_rows(TRAIN_ROWS, TRAIN_SEED)
    evaluation = make_rows(EVAL_ROWS, EVAL_SEED, frozenset(story_of(row) for row in train))
    return {
        name: "".join(json.dumps(row) + "\n" for row in rows)
        for name, rows in (("train.jsonl", train), ("eval.jsonl", evaluation))
    }


def main() -> None:
    DATA_FOLDER.mkdir(exist_ok=True)
    for name, text in make_data().items():
        path = DATA_FOLDER / name
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{path}: {text.count(chr(10))} rows")


if __name__ == "__main__":
    main()
