"""Stanford Alpaca's prompt, which models and data sets have used since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qlora_wgpu.data.canonical_messages import from_json
from qlora_wgpu.errors import DataError

# The wording of Stanford Alpaca's prompts, which models and data sets have used since.
_TASK = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."


def alpaca_prompt(
    instruction: str, extra: str = "", system: str = "", history: Sequence[tuple[str, str]] = ()
) -> str:
    """The prompt of an instruction.

    Args:
        instruction: What is to be done.
        extra: An input to it, if any.
        system: What stands at the beginning instead of Alpaca's own sentence, if anything.
        history: Instructions and answers that came before.
    """
    task = f"{_TASK}, paired with an input that provides further context." if extra.strip() else ""
    task = task or f"{_TASK}."
    parts = [system if system.strip() else f"{task} {_REQUEST}"]
    for earlier, answer in history:
        parts += [f"### Instruction:\n{earlier}", f"### Response:\n{answer}"]
    parts.append(f"### Instruction:\n{instruction}")
    if extra.strip():
        parts.append(f"### Input:\n{extra}")
    return "\n\n".join([*parts, "### Response:\n"])


def history_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Instructions and answers before a row's own, as Alpaca's form keeps them.

    Raises:
        DataError: If the row has them in another form.
    """
    turns = from_json(row.get("history")) or []
    pairs = [turn for turn in turns if isinstance(turn, list) and len(turn) == 2]
    if not isinstance(turns, list) or len(pairs) < len(turns):
        raise DataError("'history' must be a list of pairs of an instruction and its answer")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise DataError("'history' must hold text alone")
    return [(instruction, answer) for instruction, answer in pairs]
