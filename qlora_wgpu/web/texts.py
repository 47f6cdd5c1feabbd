"""What a page needs to know of tokens and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config import Config
from qlora_wgpu.data import Tokenizer, find_chat_template
from qlora_wgpu.data.masking import closing_text, end_of_turn
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import TOKENIZER_BYTES
from qlora_wgpu.web.site_files import SiteFiles


def put_texts(files: SiteFiles, folder: Path, settings: Config, longest: int) -> dict[str, Any]:
    """Copies the tokenizer, and tells how rows and prompts are written.

    Args:
        files: Where it goes.
        folder: The tokenizer's folder.
        settings: The run's.
        longest: Tokens of the longest row.

    Raises:
        TokenizerError: If there is no tokenizer, or the chat template is broken.
    """
    tokenizer = Tokenizer.from_folder(folder)
    template = find_chat_template(settings.data.chat_template, tokenizer)
    data = settings.data
    name = files.put("tokenizer.json", file_bytes(folder / "tokenizer.json", TOKENIZER_BYTES))
    return {
        "tokenizer": name,
        "special_tokens": dict(tokenizer.special_tokens),
        "eos_ids": sorted(tokenizer.eos_token_ids),
        "template": None if template is None else template.source,
        **_turn_end(template, tokenizer),
        "rows": {
            "format": data.format,
            "columns": dict(data.columns),
            "train_on": data.train_on,
            "truncation": data.truncation,
            "max_length": longest,
        },
    }


def _turn_end(template: Any, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """What ends an assistant's turn: a token, or a text where there is none."""
    if template is None:
        return {"turn_end": None, "stop_text": ""}
    end = end_of_turn(template, tokenizer)
    return {"turn_end": end, "stop_text": "" if end is not None else closing_text(template)}
