"""The objective that ``init`` proposes, by the keys of the data's first row."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.data.columns import with_columns
from qlora_wgpu.data.dataset import first_row
from qlora_wgpu.data.preferences import JUDGED, PAIRS, format_of
from qlora_wgpu.errors import DataError

_FOR = {PAIRS: "dpo", JUDGED: "kto"}


def chosen_objective(data_path: str, columns: Mapping[str, str] | None = None) -> str:
    """``dpo`` for pairs of answers, ``kto`` for judged ones, else ``sft``.

    Args:
        data_path: Path or hub name of the data.
        columns: The rows' own names by their format's, as ``data.columns`` has them.

    Raises:
        DataError: If the data cannot be read, or lacks such a column.
    """
    row = first_row(data_path)
    if row is None:
        return "sft"
    row = with_columns(row, columns or {})
    try:
        return _FOR[format_of(row, "kto")]
    except DataError:
        return "sft"
