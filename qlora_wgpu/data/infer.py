"""What ``init`` infers from the first row of its data: the objective, and the chat template."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.data.chat_template import suitable_template
from qlora_wgpu.data.columns import CHATS, with_columns
from qlora_wgpu.data.dataset import first_row, row_format
from qlora_wgpu.data.preferences import JUDGED, PAIRS, format_of
from qlora_wgpu.data.row_stats import Preparation
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import DataError

_FOR = {PAIRS: "dpo", JUDGED: "kto"}


def chosen_objective(data_path: str, columns: Mapping[str, str] | None = None) -> str:
    """``dpo`` for pairs of answers, ``kto`` for judged ones, else ``sft``."""
    row = first_row(data_path)
    if row is None:
        return "sft"
    row = with_columns(row, columns or {})
    try:
        return _FOR[format_of(row, "kto")]
    except DataError:
        return "sft"


def chosen_template(
    data_path: str,
    tokenizer: Tokenizer,
    objective: str = "sft",
    columns: Mapping[str, str] | None = None,
) -> str | None:
    """The name of the template that a run on some data needs besides the tokenizer.

    None where the tokenizer has a template, or the rows are no chats.
    """
    if tokenizer.chat_template is not None:
        return None
    how = Preparation(max_seq_length=2, objective=objective, columns=columns or {})
    if row_format(data_path, tokenizer, how) not in CHATS:
        return None
    return suitable_template(tokenizer)
