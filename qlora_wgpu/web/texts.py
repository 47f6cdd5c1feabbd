"""What a page needs to know of tokens and prompts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from qlora_wgpu.config import Config
from qlora_wgpu.data import PromptFormat, Tokenizer, find_chat_template
from qlora_wgpu.data.built_in_templates import BUILT_IN_TEMPLATES
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import TOKENIZER_BYTES
from qlora_wgpu.presence import is_file
from qlora_wgpu.training.prompts import save_prompt
from qlora_wgpu.web.site_files import SiteFiles

_TOKENIZER = "tokenizer.json"


def put_texts(files: SiteFiles, folder: Path, settings: Config, longest: int) -> dict[str, Any]:
    """Copies the tokenizer, and tells how rows and prompts are written.

    Args:
        files: Where it goes.
        folder: The tokenizer's folder.
        settings: The run's.
        longest: Tokens of the longest row.

    Raises:
        TokenizerError: If there is no tokenizer, or the chat template is broken.
        CheckpointError: If a file beside it is damaged.
    """
    tokenizer = Tokenizer.from_folder(folder)
    template = find_chat_template(settings.data.chat_template, tokenizer)
    data = settings.data
    name = files.put(_TOKENIZER, file_bytes(folder / _TOKENIZER, TOKENIZER_BYTES))
    prompts = [
        PromptFormat("chat", tokenizer, template),
        PromptFormat.alpaca(tokenizer),
        PromptFormat.text(tokenizer),
    ]
    told = {prompt.kind: _prompt_json(prompt, folder, settings) for prompt in prompts}
    return {
        "tokenizer": name,
        "special_tokens": dict(tokenizer.special_tokens),
        "eos_ids": sorted(tokenizer.eos_token_ids),
        "template": None if template is None else template.source,
        "tool_template": None if template is None else template.tool_source,
        "alpaca": BUILT_IN_TEMPLATES["alpaca"],
        "prompts": files.put_json("prompts.plan", told),
        "rows": {
            "format": data.format,
            "columns": dict(data.columns),
            "train_on": data.train_on,
            "truncation": data.truncation,
            "max_length": longest,
        },
    }


def _prompt_json(prompt: PromptFormat, base: Path, settings: Config) -> dict[str, Any]:
    """Where answers end, and what is kept beside an adapter that has learnt from such prompts."""
    with tempfile.TemporaryDirectory() as made:
        save_prompt(settings, base, prompt, Path(made))
        kept = {
            path.relative_to(made).as_posix(): file_bytes(path, TOKENIZER_BYTES).decode()
            for path in sorted(Path(made).rglob("*"))
            if is_file(path) and path.name != _TOKENIZER  # a page has it already
        }
    return {"turn_end": prompt.turn_end, "stop_text": prompt.stop_text, "files": kept}
