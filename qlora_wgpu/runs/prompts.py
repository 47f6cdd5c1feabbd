"""How prompts are written for what a run has trained: kept beside its adapter, and found again."""

from __future__ import annotations

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT, tokenizer_folder
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data import (
    PromptFormat,
    find_chat_template,
    read_prompt_files,
    row_format,
    save_prompt_files,
)
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.runs.data import preparation
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.training import Observer, TrainResult


def keep_prompt(
    settings: Config,
    source: OpenedModel,
    prompt: PromptFormat,
    result: TrainResult,
    observer: Observer,
) -> None:
    """Writes the tokenizer, the chat template and the prompts' format beside a run's adapter.

    Those of a run that had been finished before stay as they are. What cannot be written is told,
    and does not end the run.
    """
    folder = result.adapter_dir
    if result.was_finished and (folder / PROMPT_FORMAT).exists():
        return
    try:
        name = settings.data.chat_template if prompt.kind == "chat" else prompt.kind
        built_in = name if name in BUILT_IN_CHAT_TEMPLATES else None
        save_prompt_files(folder, source.path, prompt, built_in)
    except QLoRAError as err:
        observer.warning(f"the adapter is there, but how its prompts are written is not: {err}")


def prompt_of_run(settings: Config, source: OpenedModel) -> PromptFormat:
    """How prompts are written for what a run learns from.

    Raises:
        ConfigError: If ``data.train`` is not set.
        DataError: If it cannot be read.
    """
    path, tokenizer = settings.require_train_path(), source.tokenizer
    rows = row_format(path, tokenizer, preparation(settings.data))
    return PromptFormat.of_rows(rows, tokenizer, settings.data.chat_template)


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
