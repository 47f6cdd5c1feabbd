"""How prompts are written for what a run has trained, kept beside its adapter."""

from __future__ import annotations

from pathlib import Path

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT
from qlora_wgpu.config import Config
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data import PromptFormat, save_prompt_files
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.presence import exists
from qlora_wgpu.training.observer import Observer
from qlora_wgpu.training.result import TrainResult


def keep_prompt(
    settings: Config, source: Path, prompt: PromptFormat, result: TrainResult, observer: Observer
) -> None:
    """Writes the tokenizer, the chat template and the prompts' format beside a run's adapter.

    Those of a run that had been finished before stay as they are. What cannot be written is told,
    and does not end the run.

    Args:
        settings: The run's.
        source: The folder whose tokenizer it is.
        prompt: The format of what was trained.
        result: The run's.
        observer: Who is told.
    """
    folder = result.adapter_dir
    if result.was_finished and exists(folder / PROMPT_FORMAT):
        return
    try:
        save_prompt(settings, source, prompt, folder)
    except QLoRAError as err:
        observer.warning(f"the adapter is there, but how its prompts are written is not: {err}")


def save_prompt(settings: Config, source: Path, prompt: PromptFormat, folder: Path) -> None:
    """Writes those files into a folder.

    Args:
        settings: The run's.
        source: The folder whose tokenizer it is.
        prompt: The format.
        folder: The adapter's.

    Raises:
        CheckpointError: If a file cannot be read or written.
    """
    name = settings.data.chat_template if prompt.kind == "chat" else prompt.kind
    save_prompt_files(folder, source, prompt, name if name in BUILT_IN_CHAT_TEMPLATES else None)
