"""Attention of new tokens to keys and values that are kept on the device (``ops/kv_cache.py``)."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.kernels.rowwise import row_constants, row_workgroups
from qlora_wgpu.ops.tensor import converted


def append(g: Graph, x: Tensor, cache: Tensor, batch_info: Tensor) -> None:
    """Stores the rows of x after those that are there.

    Raises:
        GraphError: If x is of another width.
    """
    if x.columns != cache.columns:
        raise GraphError(f"kv_cache: {x} does not fit {cache}")
    x = converted(g, x, cache.dtype)
    g.launch(
        "kv_cache/append.wgsl",
        x.nbytes // 16,
        {"x": x, "batch_info": batch_info, "cache": cache},
        {"rows": x.rows, "capacity": cache.rows, "stride": x.nbytes // 16 // x.rows},
    )


def attend(
    g: Graph,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch_info: Tensor,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token to what is stored, itself included.

    Args:
        g: The graph.
        q: (1, heads · head_dim).
        keys: (capacity, kv_heads · head_dim).
        values: Like keys.
        batch_info: Says how many tokens came before.
        head_dim: Elements of a head; even.
        scale: Factor of the scores.
        window: The token sees so many, itself among them; None for all.
        softcap: Scores s become softcap · tanh(s / softcap), if given.
        sinks: float32 (heads): a logit of each head that has no value, if given.

    Returns:
        (1, heads · head_dim) operand.

    Raises:
        GraphError: If q is not one token's.
    """
    if q.rows != 1:
        raise GraphError(f"kv_cache: one token at a time is attended for, not {q}")
    heads = q.columns // head_dim
    unit = 4 if head_dim % 4 == 0 else 2
    shape: dict[str, Constant] = {"HEAD_UNIT4": unit == 4, "UNITS": head_dim // unit}
    scores = g.float32("scores", heads, keys.rows)
    common: dict[str, int | float] = {
        "heads": heads,
        "group": q.columns // keys.columns,
        "kv_stride": keys.units(unit),
        "stride": scores.stride,
    }
    g.launch(
        "kv_cache/scores.wgsl",
        heads * scores.stride,
        {"q": q, "k": keys, "batch_info": batch_info, "scores": scores},
        {
            **common,
            "window": min(window or keys.rows, keys.rows),
            "scale": scale,
            "softcap": softcap or 1.0,
        },
        {**shape, "SOFTCAP": softcap is not None},
    )
    g.launch(
        "kv_cache/softmax.wgsl",
        row_workgroups(g, heads),
        {"scores": scores, "sinks": sinks},
        {"heads": heads, "stride": scores.stride},
        row_constants(g),
    )
    o = g.operand("attention", 1, q.columns)
    g.launch(
        "kv_cache/mix.wgsl",
        o.units(unit),
        {"p": scores, "v": values, "batch_info": batch_info, "o": o},
        {**common, "units": o.units(unit)},
        shape,
    )
    return o
