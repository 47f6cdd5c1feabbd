"""The KV cache: keys and values of earlier tokens, kept on the device in generation.

A cache has room for several sequences, each in its own *place*, of any length up to its capacity. A
batch with a cache is either a prefill, with ordinary attention whose keys and values are stored,
or a new token of each of several sequences, which attends to the stored ones of its sequence. There
are no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import TEXEL, Storage, Tensor, matrix, vector
from qlora_wgpu.ops.quantized import PackedWeightCache


@dataclass
class KVCache:
    """The cache; its tensors are created by the first batch that is traced with it."""

    capacity: int  # maximum number of tokens per sequence
    texts: int = 1  # maximum number of sequences, whose keys are stacked
    # The packed weights that decoding reads (``ops/quantized.py``), if they are faster with the
    # profile's kernels.
    packs_weights: bool = False
    layers: list[tuple[Tensor, Tensor]] = field(
        default_factory=list
    )  # keys and values of each layer
    # States of convolutions and of linear attention.
    states: list[Tensor] = field(default_factory=list)
    # DoRA's norms by layer, written in prefill and read in decoding.
    norms: dict[str, Tensor] = field(default_factory=dict)


class CacheView:
    """A cache while a batch is traced with it, layer by layer."""

    def __init__(self, cache: KVCache) -> None:
        self.capacity = cache.capacity
        self.texts = cache.texts
        self.packed_weights: PackedWeightCache | None = None
        self.packs_weights = cache.packs_weights
        self._cache = cache
        self._next = 0
        self._stored: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._next_state = 0

    def next_layer(self, dtype: str, columns: int, most_texture: int = 0) -> tuple[Tensor, Tensor]:
        if self._next == len(self._cache.layers):
            pair = tuple(
                _kept(name, self.texts * self.capacity, columns, dtype, most_texture)
                for name in ("keys", "values")
            )
            self._cache.layers.append((pair[0], pair[1]))
        layer = self._cache.layers[self._next]
        self._next += 1
        if layer[0].columns != columns:
            raise GraphError(f"kv_cache: {layer[0]} is of another layer, not {columns} wide")
        return layer

    def stored(self, keys: Tensor) -> tuple[Tensor, Tensor] | None:
        """The keys and values of the layer that stored these new keys; None if none did."""
        return self._stored.get(keys)

    def note_stored(self, keys: Tensor, layer: tuple[Tensor, Tensor]) -> None:
        self._stored[keys] = layer

    def norm(self, name: str, length: int) -> Tensor:
        if name not in self._cache.norms:
            storage = Storage(name, "kv cache", 4 * length)
            self._cache.norms[name] = vector(name, length, "float32", storage)
        return self._cache.norms[name]

    def next_state(self, rows: int, columns: int) -> Tensor:
        """The next op's state, float32 (rows, columns) per sequence."""
        rows *= self.texts
        if self._next_state == len(self._cache.states):
            self._cache.states.append(_kept("state", rows, columns, "float32"))
        state = self._cache.states[self._next_state]
        self._next_state += 1
        if state.shape != (rows, columns):
            raise GraphError(f"kv_cache: {state} is of another layer, not {rows}x{columns}")
        return state


def copy_sequence(g: Graph, cache: KVCache) -> Tensor:
    """Copies one sequence's keys, values and states to other places.

    Returns the input that says which, written by ``encode_copies``. All layers must be traced.
    """
    count = 3 + cache.texts
    copies = vector("copies", count, "uint32", Storage("copies", "inputs", 4 * count))
    for tensor in (each for pair in cache.layers for each in pair):
        _copy(g, tensor, cache, copies, of_tokens=True)
    for tensor in cache.states:
        _copy(g, tensor, cache, copies, of_tokens=False)
    return copies


def encode_copies(source: int, tokens: int, places: Sequence[int]) -> npt.NDArray[np.uint32]:
    return np.array([source, tokens, len(places), *places], np.uint32)


def _copy(g: Graph, kept: Tensor, cache: KVCache, copies: Tensor, *, of_tokens: bool) -> None:
    # No dispatch may bind a tensor for reading and writing, so a sequence is copied twice.
    rows, stride = kept.rows // cache.texts, kept.nbytes // TEXEL // kept.rows
    x = matrix(f"{kept.name} of a sequence", rows, kept.columns, kept.dtype)
    values, constants = {"stride": stride}, {"TOKENS": of_tokens}
    for name, tensors in (
        ("read", {"kept": kept, "copies": copies, "y": x}),
        ("write", {"x": x, "copies": copies, "kept": kept}),
    ):
        g.launch(f"kv_cache/{name}_sequence.wgsl", rows * stride, tensors, values, constants)


def _kept(name: str, capacity: int, columns: int, dtype: str, most_texture: int = 0) -> Tensor:
    tensor = matrix(name, capacity, columns, dtype)
    tensor.texture = tensor.nbytes <= most_texture
    tensor.storage = Storage(name, "kv cache", tensor.nbytes, texture=tensor.texture)
    return tensor
