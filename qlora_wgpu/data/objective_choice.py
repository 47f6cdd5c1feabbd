"""The objective that ``init`` proposes, by the keys of the data's first row."""

from __future__ import annotations

from qlora_wgpu.data.dataset import first_row
from qlora_wgpu.data.preferences import JUDGED, PAIRS, format_of
from qlora_wgpu.errors import DataError

_FOR = {PAIRS: "dpo", JUDGED: "kto"}


def chosen_objective(data_path: str) -> str:
    """``dpo`` for pairs of answers, ``kto`` for judged ones, else ``sft``.

    Raises:
        DataError: If the data cannot be read.
    """
    row = first_row(data_path)
    try:
        return "sft" if row is None else _FOR[format_of(row, "kto")]
    except DataError:
        return "sft"
