"""Causal attention with grouped keys, forward and exact backward, without stored scores."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ceil_div
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops import attention_image
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.cached_attention import append, attend
from qlora_wgpu.ops.image import as_buffer
from qlora_wgpu.ops.tensor import as_operand


def attention(
    g: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: BatchBuffers,
    head_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale · q·kᵀ, causal and masked by ``batch.segments``) · v, per head.

    Args:
        g: The graph.
        q: (rows, heads · head_dim) operand.
        k: (rows, kv_heads · head_dim) operand; kv_heads divides heads.
        v: Like k.
        batch: Its shape and segments.
        head_dim: Elements of a head; even.
        scale: Of the scores.
        window: A query sees so many keys, itself among them; None for all earlier ones.
        softcap: Scores s become softcap · tanh(s / softcap), if given.

    Returns:
        (rows, heads · head_dim) operand.
    """
    heads, kv_heads = q.columns // head_dim, k.columns // head_dim
    if head_dim % 2 or heads % kv_heads or k.columns != v.columns:
        raise GraphError(f"attention: {q}, {k}, {v} with head_dim {head_dim} do not fit")
    if batch.cache is not None:
        known_k, known_v = batch.cache.next_layer(g.dtype, k.columns)
        append(g, k, known_k, batch.info)
        append(g, v, known_v, batch.info)
        if batch.rows == 1:
            return attend(g, q, known_k, known_v, batch.info, head_dim, scale, window, softcap)
    if attention_image.usable(g, head_dim):
        return attention_image.attention(g, q, k, v, batch, head_dim, scale, window, softcap)
    unit = 4 if head_dim % 4 == 0 else 2
    lanes = g.profile.attention_lanes
    constants: dict[str, Constant] = {
        "BF16": g.bf16,
        "HEAD_UNIT4": unit == 4,
        "UNITS": head_dim // unit,
        "LANES": lanes,
        "SOFTCAP": softcap is not None,
    }
    # Straight-line code is kept within what software adapters compile quickly.
    keys = g.profile.attention_keys if head_dim <= 32 * unit else 2
    blocks = ceil_div(batch.seq, lanes)

    def params(x: Tensor) -> dict[str, int | float]:
        return {
            "seq": batch.seq,
            "heads": heads,
            "group": heads // kv_heads,
            "q_stride": q.units(unit),
            "kv_stride": k.units(unit),
            "pad_units": (x.stride - x.columns) // unit,
            "window": min(window or batch.seq, batch.seq),
            "scale": scale,
            "softcap": softcap or 1.0,
        }

    o = g.operand("attention", q.rows, q.columns)
    lse = g.float_vector("lse", q.rows * heads)
    pairs = batch.batch * heads * batch.seq * (batch.seq + 1) // 2
    shared = {"q": q, "k": k, "v": v, "segments": batch.segments}
    g.launch(
        "attention/forward.wgsl",
        (blocks, heads, batch.batch),
        {**shared, "o": o, "lse": lse},
        params(q),
        {**constants, "KEYS": keys},
        flops=4 * pairs * head_dim,
    )

    def vjp(do: Tensor) -> None:
        do = as_buffer(g, as_operand(g, do, image=False))
        lse_delta = g.float_vector("lse and delta", 2 * q.rows * heads)
        g.launch(
            "attention/delta.wgsl",
            q.rows * heads,
            {"o": o, "dout": do, "lse": lse, "lse_delta": lse_delta},
            {"rows": q.rows, "heads": heads, "stride": q.units(unit)},
            {name: constants[name] for name in ("BF16", "HEAD_UNIT4", "UNITS")},
        )
        known = {**shared, "dout": do, "lse_delta": lse_delta}
        if q.requires_grad:
            dq = g.operand("d q", q.rows, q.columns)
            g.launch(
                "attention/dq.wgsl",
                (blocks, heads, batch.batch),
                {**known, "dq": dq},
                params(q),
                constants,
                flops=6 * pairs * head_dim,
            )
            g.hand_over(q, dq)
        if k.requires_grad or v.requires_grad:
            dk = g.operand("d k", k.rows, k.columns)
            dv = g.operand("d v", v.rows, v.columns)
            g.launch(
                "attention/dkdv.wgsl",
                (blocks, kv_heads, batch.batch),
                {**known, "dk": dk, "dv": dv},
                params(k),
                constants,
                flops=8 * pairs * head_dim,
            )
            g.hand_over(k, dk)
            g.hand_over(v, dv)

    g.record(o, [q, k, v], vjp)
    return o
