"""The chat template that ``init`` chooses."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.data.built_in_templates import suitable_template
from qlora_wgpu.data.dataset import Preparation, row_format
from qlora_wgpu.data.formats import CHATS
from qlora_wgpu.data.tokenizer import Tokenizer


def chosen_template(
    data_path: str,
    tokenizer: Tokenizer,
    objective: str = "sft",
    columns: Mapping[str, str] | None = None,
) -> str | None:
    """The name of the template that a run on some data needs besides the tokenizer.

    Args:
        data_path: Path or hub name of the data.
        tokenizer: The model's.
        objective: What its rows are for.
        columns: The rows' own names by their format's, as ``data.columns`` has them.

    Returns:
        The name; None where the tokenizer has a template, or the rows are no chats.

    Raises:
        DataError: If the data cannot be read.
    """
    if tokenizer.chat_template is not None:
        return None
    how = Preparation(max_seq_length=2, objective=objective, columns=columns or {})
    if row_format(data_path, tokenizer, how) not in CHATS:
        return None
    return suitable_template(tokenizer)
