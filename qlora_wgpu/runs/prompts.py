"""How prompts are written for what a run has trained, found again beside its adapter."""

from __future__ import annotations

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT, tokenizer_folder
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.data import (
    PromptFormat,
    Tokenizer,
    find_chat_template,
    read_prompt_files,
    row_format,
)
from qlora_wgpu.files import is_there
from qlora_wgpu.runs.data import preparation
from qlora_wgpu.runs.opening import OpenedModel


def prompt_of_run(settings: Config, source: OpenedModel) -> PromptFormat:
    """How prompts are written for what a run learns from.

    Raises:
        ConfigError: If ``data.train`` is not set.
        DataError: If it cannot be read.
    """
    path, tokenizer = settings.require_train_path(), source.tokenizer
    rows = row_format(path, tokenizer, preparation(settings.data))
    return PromptFormat.of_rows(rows, tokenizer, settings.data.chat_template)


def tokenizer_for(source: OpenedModel, adapter: str | None) -> Tokenizer:
    """The base's tokenizer; where its folder has none, what is kept beside the adapter.

    Raises:
        TokenizerError: If there is none, or it is damaged.
    """
    has_none = not is_there(source.path / "tokenizer.json")
    kept = tokenizer_folder(adapter) if adapter is not None and has_none else None
    return source.tokenizer if kept is None else Tokenizer.from_folder(kept)


def prompt_for(source: OpenedModel, adapter: str | None) -> PromptFormat:
    """How prompts are written for a base, or for an adapter as it was trained.

    What is kept beside the adapter counts, else the chat template that its run names, else the
    base's own.

    Raises:
        TokenizerError: If a file of the tokenizer, or the chat template, is damaged.
        CheckpointError: If the prompts' format is.
        ConfigError: If the run's config.yaml is.
    """
    folder = source.path if adapter is None else tokenizer_folder(adapter)
    if folder is not None and (adapter is None or (folder / PROMPT_FORMAT).exists()):
        return read_prompt_files(folder)
    run = None if adapter is None else find_run(adapter)
    if run is None:
        return read_prompt_files(folder or source.path)
    setting = load_config(run / "config.yaml").data.chat_template
    return PromptFormat("chat", source.tokenizer, find_chat_template(setting, source.tokenizer))
