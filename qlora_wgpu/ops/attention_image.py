"""Launchers of attention for software adapters: everything in images, keys broadcast."""

from __future__ import annotations

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import TEXEL, Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.image import as_image
from qlora_wgpu.ops.tensor import as_operand

# Straight-line code is kept within what software adapters compile quickly: multiply-adds a turn.
_FORWARD_BODY = 512
_BACKWARD_BODY = 768


def usable(g: Graph, head_dim: int) -> bool:
    """Whether the adapter has these kernels and heads are whole texels."""
    return g.profile.images and head_dim % 8 == 0


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
    """As ``ops.attention.attention``, which calls it."""
    heads, kv_heads = q.columns // head_dim, k.columns // head_dim
    elements = TEXEL // ITEM_SIZE[q.dtype]
    lanes = g.profile.image_lanes
    blocks = ceil_div(batch.seq, lanes)
    shared = {
        "q": as_image(g, q)[0],
        "k": as_image(g, k)[0],
        "v": as_image(g, v)[0],
        "segments": batch.segments,
    }
    params: dict[str, int | float] = {
        "seq": batch.seq,
        "heads": heads,
        "group": heads // kv_heads,
        "q_stride": q.units(elements),
        "kv_stride": k.units(elements),
        "window": min(window or batch.seq, batch.seq),
        "scale": scale,
        "softcap": softcap or 1.0,
    }
    o = g.operand("attention", q.rows, q.columns, image=True)
    lse = g.float_vector("lse", q.rows * heads)
    pairs = batch.batch * heads * batch.seq * (batch.seq + 1) // 2
    g.launch(
        "attention/forward_image.wgsl",
        (blocks, heads, batch.batch),
        {**shared, "o": o, "lse": lse},
        params,
        _cut(g, head_dim, elements, _FORWARD_BODY // (2 * head_dim), softcap),
        flops=4 * pairs * head_dim,
        label="attention/forward",
    )

    def vjp(do: Tensor) -> None:
        lse_delta = g.float_vector("lse and delta", 2 * q.rows * heads)
        known = {**shared, "dout": as_image(g, as_operand(g, do))[0], "lse_delta": lse_delta}
        g.launch(
            "attention/delta_image.wgsl",
            q.rows * heads,
            {"o": o, "dout": known["dout"], "lse": lse, "lse_delta": lse_delta},
            {"rows": q.rows, "stride": q.units(elements)},
            {"BF16": g.bf16, "HEADS": heads, "TEXELS": head_dim // elements},
            label="attention/delta",
        )
        if q.requires_grad:
            dq = g.operand("d q", q.rows, q.columns, image=True)
            g.launch(
                "attention/dq_image.wgsl",
                (blocks, heads, batch.batch),
                {**known, "dq": dq},
                params,
                _cut(g, head_dim, elements, _BACKWARD_BODY // (3 * head_dim), softcap),
                flops=6 * pairs * head_dim,
                label="attention/dq",
            )
            g.hand_over(q, dq)
        if k.requires_grad or v.requires_grad:
            dk = g.operand("d k", k.rows, k.columns, image=True)
            dv = g.operand("d v", v.rows, v.columns, image=True)
            g.launch(
                "attention/dkdv_image.wgsl",
                (blocks, kv_heads, batch.batch),
                {**known, "dk": dk, "dv": dv},
                params,
                _cut(g, head_dim, elements, _BACKWARD_BODY // (4 * head_dim), softcap),
                flops=8 * pairs * head_dim,
                label="attention/dkdv",
            )
            g.hand_over(k, dk)
            g.hand_over(v, dv)

    g.record(o, [q, k, v], vjp)
    return o


def _cut(
    g: Graph, head_dim: int, elements: int, keys: int, softcap: float | None
) -> dict[str, Constant]:
    """How many keys are loaded a turn, and how the invocations of a subgroup share them."""
    lanes = g.profile.image_lanes
    keys = next(n for n in (8, 4, 2, 1) if n <= max(keys, 1) and n <= lanes)
    texels = head_dim // elements
    pieces = next(n for n in range(lanes // keys, 0, -1) if texels % n == 0)
    return {
        "BF16": g.bf16,
        "SOFTCAP": softcap is not None,
        "LANES": lanes,
        "KEYS": keys,
        "PIECES": pieces,
        "TEXELS": texels // pieces,
    }
