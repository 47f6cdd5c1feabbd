"""Fusion rules: one kernel instead of several launches that ops trace separately."""

from __future__ import annotations

from collections.abc import Mapping

from qlora_wgpu.gpu.limits import MOST_STORAGE_BUFFERS
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.rewrite import Uses
from qlora_wgpu.graph.tensor import Tensor, ceil_div, vector
from qlora_wgpu.kernels.common import row_constants
from qlora_wgpu.kernels.gemm.few_rows import narrow_rows, rows_of_workgroup

_CAST = "tensor/convert.wgsl"
_NARROW_ROWS = "few_rows/narrow_rows.wgsl"
_STRIPS, _ROPE = "few_rows/strips.wgsl", "rope/rotate_units.wgsl"
_RANKS = 8  # of a workgroup of rms_norm/down.wgsl
_MOST_RANKS = 64  # for more, products of few rows are split differently


def _tail(g: Graph, *paths: str) -> list[Launch] | None:
    last = g.launches[-len(paths) :]
    return last if [launch.path for launch in last] == [*paths] else None


def _norm_of_parts(g: Graph, uses: Uses) -> None:
    """The sum of a product's parts and its RMSNorm, forward or backward."""
    for name, path in (("x", "rms_norm/forward.wgsl"), ("dy", "rms_norm/backward.wgsl")):
        if (last := _tail(g, "tensor/sum_parts.wgsl", path)) is None:
            continue
        total, norm = last
        y, stacked = total.tensors["y"], total.tensors["x"]
        whole = stacked.columns == y.columns and not total.constants["ACCUMULATE"]
        if norm.tensors.get(name) is not y or not whole or "bias" in total.tensors:
            return
        tensors = {n: t for n, t in norm.tensors.items() if n != name} | {"parts": stacked}
        if name == "x":  # others may read it
            if norm.tensors.get("residual") is y:
                return
            tensors |= {"sum": y}
            if "residual" in total.tensors:
                tensors |= {"added": total.tensors["residual"]}
        elif not uses.single(y) or "residual" in total.tensors:
            return
        norm.tensors, norm.values = tensors, {**norm.values, "parts": int(total.values["parts"])}
        norm.specialize()
        del g.launches[-2]


def _cast_beside(g: Graph, uses: Uses) -> None:
    """A cast to the operands' type, by the launch that last wrote the float32 matrix."""
    if (last := _tail(g, _CAST)) is None:
        return
    x, y = last[0].tensors["x"], last[0].tensors["y"]
    if x.storage or y.storage or (x.dtype, y.dtype) != ("float32", g.dtype):
        return
    for launch in reversed(g.launches[:-1]):
        for name, tensor in launch.tensors.items():
            if tensor is x and launch.shader.bindings[name].writable:
                operand = f"{name}_operand"
                if operand not in launch.shader.bindings:
                    return
                if operand not in launch.tensors:
                    launch.tensors[operand] = y
                    launch.specialize()
                if uses.replace(y, launch.tensors[operand]):
                    g.launches.pop()
                return


def _norm_and_down(g: Graph, uses: Uses) -> None:
    """RMSNorm and the product of its output with LoRA's A, in decoding."""
    if len(g.launches) < 2 or g.launches[-1].label != "lora/down":
        return
    norm, down = g.launches[-2:]
    plain = norm.path == "rms_norm/forward.wgsl" and norm.tensors.keys() <= {
        "x", "weight", "y", "rstd",
    }  # fmt: skip
    if not plain or down.path.split("/")[0] != "few_rows":
        return
    x, a, u, cut = down.tensors["x"], down.tensors["w"], down.tensors["y"], row_constants(g)
    if norm.tensors["y"] is not x or cut["ONE_THREAD"] or a.rows > _MOST_RANKS:
        return
    each = rows_of_workgroup(x.rows) if cut["SUBGROUP"] else 1
    del g.launches[-2:]
    if down.path == _NARROW_ROWS:
        made = {"weight": norm.tensors["weight"], "normed": x}
        scale, eps = float(down.values["scale"]), float(norm.values["eps"])
        narrow_rows(g, norm.tensors["x"], a, u, scale, made, eps, label="rms_norm/down")
        return
    g.launch(
        "rms_norm/down.wgsl",
        (ceil_div(a.rows, _RANKS), ceil_div(x.rows, each), 1),
        {"x": norm.tensors["x"], "weight": norm.tensors["weight"], "y": x, "a": a, "u": u},
        {"ranks": a.rows, "eps": norm.values["eps"], "scale": down.values["scale"]},
        {"EACH": each, **{name: cut[name] for name in ("THREADS", "ONE_THREAD", "SUBGROUP")}},
        flops=2 * x.rows * a.rows * x.columns,
    )


def _product_and_glu(g: Graph, uses: Uses) -> None:
    """A product with packed weights for gate and up, and their gated unit."""
    if (last := _tail(g, _STRIPS, "glu/forward.wgsl")) is None:
        return
    product, glu = last
    tensors, (gate, up, y) = dict(product.tensors), (glu.tensors[n] for n in ("gate", "up", "y"))
    if {"bias", "y2"} & tensors.keys() or len({gate.dtype, up.dtype, y.dtype}) > 1:
        return
    if tensors.pop("y") is not gate or tensors.pop("y1", None) is not up:
        return
    if not uses.single(gate, up):
        return
    del g.launches[-2:]
    activation = {n: c for n, c in glu.constants.items() if n not in ("FLAT", "ELEMENTS")}
    threads, rows = int(product.constants["THREADS"]), product.workgroups[1]
    g.launch(
        "few_rows/strips_glu.wgsl",
        (ceil_div(gate.columns, 4 * threads), rows, 1),
        {**tensors, "y": y},
        product.values,
        {**product.constants, **activation, "LAYERS": 1},
        flops=product.flops,
        label=product.label,
    )


def _rope_and_append(g: Graph, uses: Uses) -> None:
    """RoPE of new tokens and the append to the KV cache, with the preceding product or norms."""
    append = g.launches[-1]
    if append.path != "kv_cache/append.wgsl" or "places" not in append.tensors:
        return
    converted = _tail(g, _ROPE, "tensor/convert.wgsl", "kv_cache/append.wgsl")
    last = converted or _tail(g, _ROPE, "kv_cache/append.wgsl")
    if last is None:
        return
    rope, k, v, keys = last[0], *(append.tensors[n] for n in ("k", "v", "keys"))
    if converted is not None:
        if last[1].tensors["y"] is not v:
            return
        v = last[1].tensors["x"]
    both = "y1" in rope.tensors
    made = rope.tensors["y1" if both else "y"]
    if made is not k or k.dtype != keys.dtype or not uses.single(k):
        return
    positions, places = append.tensors["positions"], append.tensors["places"]
    storage = positions.storage
    assert storage is not None
    tensors = {
        "inputs": vector("inputs", storage.nbytes // 4, "uint32", storage),
        "table": rope.tensors["table"], "v": v, "keys": keys, "values": append.tensors["values"],
        "k": rope.tensors["x1" if both else "x"],
    }  # fmt: skip
    if both:
        tensors |= {"q": rope.tensors["x"], "y": rope.tensors["y"]}
    if rope.tensors["positions"] is not positions:
        tensors["angle_rows"] = rope.tensors["positions"]
    if not _fits(tensors):
        return
    del g.launches[-len(last) :]
    if both and _within_product(g, tensors, rope, append):
        return
    eps = _take_norms(g, tensors) if both else 0.0
    heads, kv_heads = (int(rope.constants[name]) for name in ("HEADS", "HEADS1"))
    if not both:
        heads, kv_heads = 0, heads
    head, half = (int(rope.constants[name]) for name in ("HEAD", "HALF"))
    g.launch(
        "kv_cache/append_rotated.wgsl",
        k.rows * ((heads + kv_heads) * (head - half) + kv_heads * head),
        tensors,
        {
            "capacity": append.values["capacity"],
            "positions_at": positions.offset // 4,
            "places_at": places.offset // 4,
            "eps": eps,
        },
        {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD": head, "HALF": half},
    )


def _within_product(g: Graph, bound: Mapping[str, Tensor], rope: Launch, append: Launch) -> bool:
    """The same within the product with packed weights for q, k and v, if heads are whole."""
    last = _tail(g, _STRIPS)
    if last is None or [last[0].tensors.get(n) for n in ("y", "y1", "y2")] != [
        bound[name] for name in "qkv"
    ]:
        return False
    product = last[0]
    if {bound[name].dtype for name in ("q", "k", "v", "y")} != {bound["keys"].dtype}:
        return False
    half, threads = int(rope.constants["HALF"]), int(product.constants["THREADS"])
    if rope.constants["HEAD"] != 2 * half or threads % (4 * half) or half & (half - 1):
        return False
    tensors = {name: t for name, t in product.tensors.items() if name not in ("y1", "y2")}
    tensors |= {name: bound[name] for name in ("y", "table", "keys", "values")}
    tensors |= {name: append.tensors[name] for name in ("positions", "places")}
    if "angle_rows" in bound:
        tensors["angle_rows"] = bound["angle_rows"]
    if not _fits(tensors):
        return False
    del g.launches[-1]
    g.launch(
        "few_rows/strips_rotated.wgsl",
        product.workgroups,
        tensors,
        {**product.values, "capacity": append.values["capacity"]},
        {**product.constants, "HALF": half, "KEEPS": True},
        flops=product.flops,
        label=product.label,
    )
    return True


def _take_norms(g: Graph, tensors: dict[str, Tensor]) -> float:
    """Fuses the norms of queries and keys, if they came last; returns their epsilon."""
    last = _tail(g, "qk_norm/forward.wgsl", "qk_norm/forward.wgsl")
    if last is None or [each.tensors["y"] for each in last] != [tensors["q"], tensors["k"]]:
        return 0.0
    bound = dict(tensors)
    for name, norm in zip("qk", last, strict=True):
        bound |= {name: norm.tensors["x"], f"{name}_weight": norm.tensors["weight"]}
    if last[0].values["eps"] != last[1].values["eps"] or not _fits(bound):
        return 0.0
    del g.launches[-2:]
    tensors |= bound
    return float(last[0].values["eps"])


def _fits(tensors: Mapping[str, Tensor]) -> bool:
    return sum(not tensor.texture for tensor in tensors.values()) <= MOST_STORAGE_BUFFERS


FUSIONS = (_norm_of_parts, _norm_and_down, _product_and_glu, _rope_and_append, _cast_beside)
"""All rules, in the order in which they are tried."""
