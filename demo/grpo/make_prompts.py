"""Writes prompts.jsonl and held_out.jsonl: the demo's questions, with the word that answers them.

usage: python demo/grpo/make_prompts.py
"""

import json
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    """Takes the last word of each answer as the fact that a completion must contain."""
    for source, target in (("train", "prompts"), ("eval", "held_out")):
        rows = []
        for line in (HERE.parent / "data" / f"{source}.jsonl").read_text().splitlines():
            question, answer = json.loads(line)["messages"]
            fact = answer["content"].rstrip(".").split()[-1]
            rows.append(json.dumps({"prompt": [question], "fact": fact}))
        (HERE / f"{target}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
