"""A run's state on disk: the adapter as PEFT reads it, AdamW's moments, and the step."""

from __future__ import annotations

import json
from pathlib import Path

from qlora_wgpu.checkpoint import atomic_folder, write_safetensors
from qlora_wgpu.models.qlora_model import QLoRAModel


def save_checkpoint(folder: Path, model: QLoRAModel, step: int, num_tokens: int) -> None:
    """Writes everything that a run needs to go on; the folder appears whole or not at all.

    Data order and dropout follow from the seed and the step, so they need no state.

    Args:
        folder: What it will be called.
        model: Between two steps.
        step: Steps done.
        num_tokens: Tokens trained on.

    Raises:
        CheckpointError: If it cannot be written.
    """
    adapter = model.adapter
    with atomic_folder(folder) as unfinished:
        model.save_adapter(unfinished)
        moments = {
            f"{label}.{name}": array
            for label, flat in (
                ("exp_avg", adapter.first_moment),
                ("exp_avg_sq", adapter.second_moment),
            )
            for name, array in adapter.split(model.read_flat(flat)).items()
        }
        write_safetensors(unfinished / "optimizer.safetensors", moments)
        state = {"step": step, "num_tokens": num_tokens}
        (unfinished / "trainer_state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
