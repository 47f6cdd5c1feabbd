"""RoPE of new tokens' queries and keys, and what is kept of their keys and values, by one launch.

Where queries and keys are normalized before they are rotated, that is a part of it, too, if its
storage buffers are not too many.
"""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.gpu.sizes import MOST_STORAGE_BUFFERS
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import Tensor, vector
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.rotated_product import rotated_product

_ROPE = "rope/rotate_units.wgsl"
_NORM = "qk_norm/forward.wgsl"


def append_rotated(
    g: Graph, pair: tuple[Tensor, Tensor], layer: tuple[Tensor, Tensor], batch: BatchBuffers
) -> bool:
    """Stores new tokens' keys and values behind those of their texts, where they were rotated last.

    Args:
        g: The graph, without a backward.
        pair: Keys and values, (rows, ·) each; nobody else reads the keys.
        layer: All keys and values, of the type of operands.
        batch: Says which text each row is of, and how many of its tokens came before.

    Returns:
        Whether it did; else nothing has changed.
    """
    (k, v), (keys, values), cache = pair, layer, batch.cache
    rope = g.last_made(_ROPE, k)
    if cache is None or rope is None or k.dtype != keys.dtype:
        return False
    of, constants = rope.tensors, rope.constants
    both = "y1" in of
    if of["y1" if both else "y"] is not k:
        return False
    inputs = vector("inputs", batch.storage.nbytes // 4, "uint32", batch.storage)
    tensors = {"inputs": inputs, "table": of["table"], "v": v, "keys": keys, "values": values}
    tensors["k"] = of["x1" if both else "x"]
    if both:
        tensors |= {"q": of["x"], "y": of["y"]}
    if of["positions"] is not batch.positions:
        tensors["angle_rows"] = of["positions"]
    if not _fits(tensors):
        return False
    g.take_back(_ROPE, k)
    if rotated_product(g, tensors, constants, batch):
        return True
    eps = _take_norms(g, tensors) if both else 0.0
    heads, kv_heads = (int(constants[name]) for name in ("HEADS", "HEADS1"))
    if not both:
        heads, kv_heads = 0, heads
    head, half = (int(constants[name]) for name in ("HEAD", "HALF"))
    g.launch(
        "kv_cache/append_rotated.wgsl",
        k.rows * ((heads + kv_heads) * (head - half) + kv_heads * head),
        tensors,
        {
            "rows": k.rows,
            "capacity": cache.capacity,
            "positions_at": batch.positions.offset // 4,
            "places_at": batch.places.offset // 4 if batch.places is not None else 0,
            "eps": eps,
        },
        {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head, "HALF": half},
    )
    return True


def _take_norms(g: Graph, tensors: dict[str, Tensor]) -> float:
    """Takes back the norms of queries and keys, if they came last; what they add under the root."""
    launches = g.launches[-2:]
    if [launch.path for launch in launches] != [_NORM, _NORM]:
        return 0.0
    of_q, of_k = launches
    made = of_q.tensors["y"] is tensors["q"] and of_k.tensors["y"] is tensors["k"]
    bound = tensors | _normed("q", of_q) | _normed("k", of_k)
    if not made or of_q.values["eps"] != of_k.values["eps"] or not _fits(bound):
        return 0.0
    for name in ("k", "q"):
        g.take_back(_NORM, tensors[name])
    tensors |= bound
    return of_q.values["eps"]


def _normed(name: str, norm: Launch) -> dict[str, Tensor]:
    return {name: norm.tensors["x"], f"{name}_weight": norm.tensors["weight"]}


def _fits(tensors: Mapping[str, Tensor]) -> bool:
    return sum(not tensor.texture for tensor in tensors.values()) <= MOST_STORAGE_BUFFERS
