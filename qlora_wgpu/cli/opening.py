"""What several verbs share: opening a model with a bar for its tensors."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.models.family import find_family
from qlora_wgpu.models.qlora_model import QLoRAModel


def open_model(console: Console, path: str, **options: Any) -> QLoRAModel:
    """Loads a model, showing how far its weights are; options as for ``from_pretrained``."""
    architecture = find_family(ModelFolder.open(path).config).read(ModelFolder.open(path).config)
    total = len(architecture.every_linear) + (1 if architecture.tied else 2)
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=total)
        model = QLoRAModel.from_pretrained(
            path, progress=lambda name: progress.advance(task), **options
        )
    return model
