"""A product for new tokens that rotates queries and keys, and keeps keys and values.

Keys and values lie in textures, which a launch cannot both write and read: so attention is another.
"""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.gpu.sizes import MOST_STORAGE_BUFFERS
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers

_PRODUCT = "few_rows/strips.wgsl"


def rotated_product(
    g: Graph, bound: Mapping[str, Tensor], rope: Mapping[str, Constant], batch: BatchBuffers
) -> bool:
    """Rotates and keeps what a product for new tokens made last, as a part of that product.

    Args:
        g: The graph, without a backward.
        bound: What ``kv_cache/append_rotated.wgsl`` would be bound to; of q, k and v nobody else
            reads any.
        rope: The constants of the rotation.
        batch: Says which text each row is of, and how many of its tokens came before.

    Returns:
        Whether it did: where whole heads lie in a strip and are rotated as a whole, in halves, and
        nothing is done to them before. Else nothing has changed.
    """
    product, cache = g.last_made(_PRODUCT, bound["k"]), batch.cache
    if product is None or cache is None or not {"q", "y"} <= bound.keys():
        return False
    raw = [product.tensors.get(name) for name in ("y", "y1", "y2")]
    if any(made is not bound[name] for made, name in zip(raw, "qkv", strict=True)):
        return False
    if {bound[name].dtype for name in ("q", "k", "v", "y")} != {bound["keys"].dtype}:
        return False
    half, threads = int(rope["HALF"]), int(product.constants["THREADS"])
    if rope["HEAD"] != 2 * half or threads % (4 * half) or half & (half - 1):
        return False
    tensors = {name: t for name, t in product.tensors.items() if name not in ("y1", "y2")}
    tensors |= {name: bound[name] for name in ("y", "table", "keys", "values")}
    tensors |= {"positions": batch.positions}
    if batch.places is not None:
        tensors["places"] = batch.places
    if "angle_rows" in bound:
        tensors["angle_rows"] = bound["angle_rows"]
    if sum(not tensor.texture for tensor in tensors.values()) > MOST_STORAGE_BUFFERS:
        return False
    g.take_back(_PRODUCT, bound["k"])
    g.launch(
        "few_rows/strips_rotated.wgsl",
        product.workgroups,
        tensors,
        {**product.values, "capacity": cache.capacity},
        {**product.constants, "HALF": half, "KEEPS": True},
        flops=product.flops,
        label=product.label,
    )
    return True
