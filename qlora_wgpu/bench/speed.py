"""How fast a device trains a model, from a part of it that is measured in seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from qlora_wgpu.bench.load import Load
from qlora_wgpu.bench.random_folder import RandomFolder
from qlora_wgpu.config import LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.optimizer import Optimizer

_LAYERS = (1, 3)  # of two models, whose difference is what a layer takes
_VOCABULARY = 4096  # of theirs
_TOKENS = 256
_ROUNDS = 2


def training_speed(config: Mapping[str, Any], device: Device) -> float:
    """Tokens per second of QLoRA with the defaults, about: layers and head alone are measured.

    Args:
        config: The config.json of the whole model.
        device: The device; what is tried stays allocated on it.

    Raises:
        DeviceError: If it refuses something, or has no room.
    """
    few, more = (_step_seconds({**config, **_part(layers)}, device) for layers in _LAYERS)
    layer = max(more - few, 0.0) / (_LAYERS[1] - _LAYERS[0])
    head = max(few - layer, 0.0) * config["vocab_size"] / _VOCABULARY
    return float(_TOKENS / max(config["num_hidden_layers"] * layer + head, 1e-9))


def _part(layers: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "vocab_size": _VOCABULARY}


def _step_seconds(config: Mapping[str, Any], device: Device) -> float:
    """The best time of a step, once everything is compiled."""
    model = QLoRAModel.from_folder(
        RandomFolder(config, quant=QuantConfig()),
        LoraConfig(),
        QuantConfig(),
        "bfloat16",
        device,
        name_or_path="a part",
    )
    optimizer = Optimizer(model, OptimConfig(), _ROUNDS + 1)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], (1, _TOKENS))
    checked, load = model.checked(ids, ids), Load(device)
    model.zero_gradient()
    seconds = []
    for step in range(1, _ROUNDS + 2):
        load.raise_clock()
        begin = time.perf_counter()
        model.accumulate(*checked)
        optimizer.step(step)
        model.read_stats()  # waits
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
