"""Draws the pictures of the image demo, and writes questions about them.

    python demo/images/make_data.py

writes demo/images/data: pictures, train.jsonl, eval.jsonl, and the same rows with a blank picture
in blank-train.jsonl and blank-eval.jsonl. It needs Pillow (the extra ``images``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dice import Dice
from PIL import Image
from scenes import SIDE, draw_scene, paint, questions

HERE = Path(__file__).parent
SEED = 515
PICTURES = {"train": 600, "eval": 50}
QUESTIONS = 4  # of each picture


def row(picture: str, question: str, answer: str) -> dict[str, object]:
    """A chat of one question and its answer."""
    asked = [{"type": "image", "path": picture}, {"type": "text", "text": question}]
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ]
    }


def main() -> None:
    folder = HERE / "data"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (SIDE, SIDE), (55, 55, 55)).save(folder / "pictures" / "blank.png")
    dice = Dice(SEED)
    for split, count in PICTURES.items():
        rows, blank = [], []
        for number in range(count):
            scene = draw_scene(dice)
            name = f"pictures/{split}-{number:03}.png"
            paint(scene, dice).save(folder / name)
            for question, answer in dice.sample(questions(scene), QUESTIONS):
                rows.append(row(name, question, answer))
                blank.append(row("pictures/blank.png", question, answer))
        write(folder / f"{split}.jsonl", rows)
        write(folder / f"blank-{split}.jsonl", blank)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(each) + "\n" for each in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
