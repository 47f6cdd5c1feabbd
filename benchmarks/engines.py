"""Engines for a shape's random weights, for the benchmarks of generated text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from qlora_wgpu import LoraConfig, QuantConfig
from qlora_wgpu.bench.workload import find_shape
from qlora_wgpu.generation import Engine, QLoRAModel
from qlora_wgpu.gpu.device import Device

PROMPT = 64  # tokens


def engines_of(
    name: str, batches: Sequence[int]
) -> tuple[dict[int, Engine], list[int], dict[str, Any], Device]:
    """Engines by their number of sequences, a prompt, the shape's config.json, and the device.

    The base is quantized (NF4, doubly) and has an adapter of rank 8 on all linear layers.
    """
    shape, device = find_shape(name), Device("auto")
    model = QLoRAModel.from_folder(
        shape.folder, LoraConfig(r=8, lora_alpha=16), QuantConfig(), "bfloat16", device,
        name_or_path=name,
    )  # fmt: skip
    prompt = (np.arange(PROMPT) * 37 % shape.config["vocab_size"]).tolist()
    engines = {batch: Engine(model, batch, 2 * PROMPT) for batch in batches}
    return engines, prompt, dict(shape.config), device


def medians(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The median of each number of repeated measurements."""
    return {
        name: {key: statistics.median(each[key] for each in own) for key in own[0]}
        for name, own in runs.items()
    }
