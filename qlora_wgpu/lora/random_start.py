"""PEFT's ordinary starts of A and B, drawn from a seed; ``starts`` finds others in the base."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.flat_vector import FlatVector
from qlora_wgpu.lora.names import EMBEDDING_B, LORA_A, Float32Array, tensor_name


def draw_start(
    flat: FlatVector,
    values: Float32Array,
    targets: Sequence[LinearSpec],
    embedding: LinearSpec | None,
    seed: int,
    *,
    gaussian: bool,
) -> None:
    """Draws PEFT's starts: A uniform in ±1/√in_features (Kaiming, a = √5) or normal, B zero.

    Of an embedding A is zero and B standard normal. Each matrix has its own stream, so the start
    does not depend on what else is adapted.

    Args:
        flat: The places of all tensors.
        values: A flat vector of zeros, which gets what is drawn.
        targets: The adapted layers, but the embedding.
        embedding: The embedding, if it is adapted.
        seed: Of the streams.
        gaussian: Whether A is normal with a standard deviation of 1/r.
    """
    for spec in targets:
        name = tensor_name(spec.name, LORA_A)
        place, stream = flat[name], _stream(seed, name)
        if gaussian:
            place.view(values)[:] = stream.normal(0.0, 1 / place.rows, place.shape)
        else:
            bound = 1 / np.sqrt(place.columns)
            place.view(values)[:] = stream.uniform(-bound, bound, place.shape)
    if embedding is not None:
        name = tensor_name(embedding.name, EMBEDDING_B)
        flat[name].view(values)[:] = _stream(seed, name).standard_normal(flat[name].shape)


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
