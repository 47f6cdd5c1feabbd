"""Attention of new tokens to keys and values that are kept on the device (``ops/kv_cache.py``)."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.tensor import converted


def append(
    g: Graph, pair: tuple[Tensor, Tensor], layer: tuple[Tensor, Tensor], batch: BatchBuffers
) -> None:
    """Stores keys and values of new tokens behind those of their texts that are there.

    Of one new token of each text, whose keys nobody else reads, that is a part of the launch that
    rotates them, if it was the last one.

    Raises:
        GraphError: If they are of another width, or the batch has no cache.
    """
    (k, v), (keys, values), cache = pair, layer, batch.cache
    if cache is None or not k.columns == v.columns == keys.columns == values.columns:
        raise GraphError(f"kv_cache: {k} and {v} do not fit {keys}")
    k, v = converted(g, k, keys.dtype), converted(g, v, values.dtype)
    words = k.nbytes // 16 // k.rows
    g.launch(
        "kv_cache/append.wgsl",
        k.rows * words,
        {"k": k, "v": v, **_texts(batch), "keys": keys, "values": values},
        {"rows": k.rows, "capacity": cache.capacity, "stride": words},
    )


def attend(
    g: Graph,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a new token of each text to what is stored of it, itself included.

    Args:
        g: The graph.
        q: (rows, heads · head_dim).
        keys: (texts · capacity, kv_heads · head_dim).
        values: Like keys.
        batch: Says which text each row is of, and how many of its tokens came before.
        head_dim: Elements of a head; even.
        scale: Factor of the scores.
        window: A token sees so many, itself among them; None for all.
        softcap: Scores s become softcap · tanh(s / softcap), if given.
        sinks: float32 (heads): a logit of each head that has no value, if given.

    Returns:
        (rows, heads · head_dim) operand.

    Raises:
        GraphError: If the batch is of more than one token of each text.
    """
    if batch.cache is None or not batch.decodes or q.rows != batch.rows:
        raise GraphError(f"kv_cache: {q} is not one token of each text")
    heads, capacity = q.columns // head_dim, batch.cache.capacity
    unit = 4 if head_dim % 4 == 0 else 2
    units, cut = head_dim // unit, row_constants(g)
    threads, few = int(cut["THREADS"]), g.profile.unit_by_unit == 1
    at_once = min(units, threads)
    constants: dict[str, Constant] = {
        **cut,
        "HEAD_UNIT4": unit == 4,
        "UNITS": units,
        "UNITS_AT_ONCE": at_once,
        "GROUPS": (groups := threads // at_once),
        "TURNS": ceil_div(threads, groups),
        "OWN": ceil_div(units, at_once),
        "SOFTCAP": softcap is not None,
        "LOADS_FEW": few,
        "AHEAD": next(n for n in (8, 4, 2, 1) if units % n == 0),
        "SOFTWARE": threads == 1 or g.profile.textures,
        "KEYS": 8 if threads == 1 else 1,
        "TOGETHER": 8 if threads == 1 else 1,
    }
    o = g.operand("attention", q.rows, q.columns)
    g.launch(
        "kv_cache/attend.wgsl",
        row_workgroups(g, q.rows * heads),
        {"q": q, "keys": keys, "values": values, "o": o, **_texts(batch), "sinks": sinks},
        {
            "rows": q.rows,
            "heads": heads,
            "group": q.columns // keys.columns,
            "capacity": capacity,
            "q_stride": q.units(unit),
            "kv_stride": keys.units(unit),
            "window": min(window or capacity, capacity),
            "scale": scale,
            "softcap": softcap or 1.0,
        },
        constants,
    )
    return o


def _texts(batch: BatchBuffers) -> dict[str, Tensor | None]:
    """Which text each row is of, and where in it."""
    return {"positions": batch.positions, "places": batch.places}
