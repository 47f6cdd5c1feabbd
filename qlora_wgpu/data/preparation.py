"""Settings of how rows become examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qlora_wgpu.data.formats import TrainOn

Truncation = Literal["keep_start", "keep_end", "windows", "drop", "error"]


@dataclass(frozen=True)
class Preparation:
    """Settings of how rows become examples.

    Attributes:
        max_seq_length: Longest example in tokens, at least 2.
        chat_template: ``data.chat_template``: see ``find_chat_template``.
        row_format: A key of ``FORMATS``, or "auto" to go by the first row.
        columns: The row's own name of each key of its format, where it has another.
        train_on: The tokens that are learnt; see ``RowEncoder``.
        truncation: Treatment of longer rows: cut at the end (keep_start) or at the beginning
            (keep_end), left out (drop), an error, or of texts cut into several examples (windows),
            where other rows are cut at the end.
        objective: What they are for: rows by themselves (sft), pairs of a chosen and a rejected
            answer (dpo, orpo), or answers that are good or bad (kto).
        as_chats: Whether prompts and answers that are text become turns of a chat.
    """

    max_seq_length: int
    chat_template: str | None = None
    row_format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "auto"
    truncation: Truncation = "keep_start"
    objective: str = "sft"
    as_chats: bool = False
