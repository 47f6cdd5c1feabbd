"""Folders of random weights in the shapes that are measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from qlora_wgpu.bench.workload import SHAPES, config_of
from qlora_wgpu.families.family import find_family

__all__ = ["SHAPES", "config_of", "write_random_model"]


def write_random_model(folder: Path, shape: str) -> Path:
    """Writes a Hugging Face folder of random float16 weights."""
    config = config_of(shape)
    architecture = find_family(config).read(config)
    random = np.random.default_rng(0)

    def normal(*size: int) -> np.ndarray:
        return (0.02 * random.standard_normal(size, dtype=np.float32)).astype(np.float16)

    size = architecture.vocab_size, architecture.hidden_size
    tensors = {architecture.embed_name: normal(*size)}
    if not architecture.tied:
        tensors[architecture.head_name] = normal(*size)
    for spec in architecture.every_linear:
        tensors[f"{spec.name}.weight"] = normal(spec.out_features, spec.in_features)
    for name, size in architecture.norms.items():
        tensors[name] = np.ones(size, np.float16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder
