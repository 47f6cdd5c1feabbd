"""Keys and values of earlier tokens, kept on the device while text is generated.

A cache has room for several texts, each in a *place* of its own, of any length up to its capacity.
A batch with a cache is either one text's prompt, whose attention is the ordinary one and whose keys
and values are stored, or a new token of each of some texts, which attends to what is stored of its
own. No gradient passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qlora_wgpu.graph.graph import GraphError
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector
from qlora_wgpu.ops.quantized import PackedWeightCache


@dataclass
class KVCache:
    """Room for texts; its tensors are made by the first batch that is traced with it."""

    capacity: int  # most tokens of a text
    texts: int = 1  # how many there is room for, their keys one below the other
    # Whether new tokens read packed weights (``ops/quantized.py``), where the profile's kernels
    # gain by them.
    packs_weights: bool = False
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of each
    # What convolutions keep of the last tokens, and linear attention of all.
    states: list[Tensor] = field(default_factory=list)
    # DoRA's norms by layer: prompts write them, new tokens read them.
    norms: dict[str, Tensor] = field(default_factory=dict)


class CacheView:
    """A cache as one batch is traced with it, layer after layer."""

    def __init__(self, cache: KVCache) -> None:
        """Begins at the first layer."""
        self.capacity = cache.capacity
        self.texts = cache.texts
        self.packed_weights: PackedWeightCache | None = None
        self.packs_weights = cache.packs_weights
        self._cache = cache
        self._next = 0
        self._stored: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._next_state = 0

    def next_layer(self, dtype: str, columns: int, most_texture: int = 0) -> tuple[Tensor, Tensor]:
        """The keys and values of the next layer."""
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
        """The keys and values of the layer that these new keys were stored in; None if in none."""
        return self._stored.get(keys)

    def note_stored(self, keys: Tensor, layer: tuple[Tensor, Tensor]) -> None:
        """Notes which layer new keys were stored in, for layers that share them."""
        self._stored[keys] = layer

    def norm(self, name: str, length: int) -> Tensor:
        """The float32 vector of that name."""
        if name not in self._cache.norms:
            storage = Storage(name, "kv cache", 4 * length)
            self._cache.norms[name] = vector(name, length, "float32", storage)
        return self._cache.norms[name]

    def next_state(self, rows: int, columns: int) -> Tensor:
        """What the next op keeps of a text's tokens, (rows, columns) of each, float32."""
        rows *= self.texts
        if self._next_state == len(self._cache.states):
            self._cache.states.append(_kept("state", rows, columns, "float32"))
        state = self._cache.states[self._next_state]
        self._next_state += 1
        if state.shape != (rows, columns):
            raise GraphError(f"kv_cache: {state} is of another layer, not {rows}x{columns}")
        return state


def _kept(name: str, capacity: int, columns: int, dtype: str, most_texture: int = 0) -> Tensor:
    tensor = matrix(name, capacity, columns, dtype)
    tensor.texture = tensor.nbytes <= most_texture
    tensor.storage = Storage(name, "kv cache", tensor.nbytes, texture=tensor.texture)
    return tensor
