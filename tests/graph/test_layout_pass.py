"""Memory is chosen between tracing and planning: ops never speak of it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.tensor import Storage, matrix, row
from qlora_wgpu.kernels.common import sum_parts
from qlora_wgpu.kernels.gemm import GEMM, Gemm
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.modules import DenseMatrix, Linear
from qlora_wgpu.ops.pointwise import glu

TEXTURES = cpu_profile(8)


def stored(name, rows, columns, dtype, *, texture=False):
    tensor = matrix(name, rows, columns, dtype)
    tensor.storage = Storage(name, "test", tensor.nbytes, texture=texture)
    tensor.texture = texture
    return tensor


def dense(name, dtype, rows, columns, *, texture=False):
    weight = stored(name, rows, columns, dtype, texture=texture)
    return Linear(name, DenseMatrix(rows, columns, ((0, weight),)), None, None)


def mlp(profile, dtype="bfloat16", *, texture=False):
    graph, batch = Graph(dtype, profile), make_batch_buffers(1, 8)
    x = stored("x", 8, 16, dtype, texture=texture)
    gate, up = (
        linear(graph, x, dense(n, dtype, 24, 16, texture=texture), batch) for n in ("gate", "up")
    )
    y = linear(graph, glu(graph, gate, up), dense("down", dtype, 16, 24, texture=texture), batch)
    return compile_plan(graph, (y,)), y


def copies(plan):
    return [launch for launch in plan.launches if launch.path == "tensor/copy.wgsl"]


@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE])
def test_without_kernels_that_insist_nothing_lies_in_textures(profile):
    plan, _ = mlp(profile)
    assert not copies(plan) and not any(plan.textures)


def test_operands_of_products_lie_in_textures_where_kernels_insist():
    plan, y = mlp(TEXTURES, texture=True)
    assert not copies(plan)  # whoever makes an operand writes the texture itself
    (product,) = [la for la in plan.launches if la.tensors.get("y") is y]
    assert product.tensors["x"].texture and not y.texture
    (gated,) = [la for la in plan.launches if la.label == "glu/forward"]
    assert gated.tensors["y"].texture and not gated.tensors["gate"].texture


def test_what_lies_in_a_buffer_is_copied_once():
    plan, _ = mlp(TEXTURES)
    sources = [launch.tensors["x"].name for launch in copies(plan)]
    assert sorted(sources) == ["down", "gate", "up", "x"]  # x has two readers


def test_windows_share_the_copy_of_their_storage():
    graph, batch = Graph("float32", TEXTURES), make_batch_buffers(1, 8)
    flat = Storage("flat", "test", 4 * (24 * 16 + 16 * 24))
    x = stored("x", 8, 16, "float32", texture=True)
    first = matrix("first", 24, 16, "float32", flat)
    second = matrix("second", 16, 24, "float32", flat, 4 * 24 * 16)
    h = linear(graph, x, Linear("a", DenseMatrix(24, 16, ((0, first),)), None, None), batch)
    y = linear(graph, h, Linear("b", DenseMatrix(16, 24, ((0, second),)), None, None), batch)
    plan = compile_plan(graph, (y,))
    assert [la.tensors["x"].name for la in copies(plan)].count("flat") == 1
    products = [la for la in plan.launches if la.path == "gemm/nt_texture.wgsl"]
    assert [la.first_texels["w"] for la in products] == [0, 24 * 16 * 4 // 16]
    fields = [name for name, _ in products[1].shader.params]
    texel = np.frombuffer(products[1].params, np.uint32)[fields.index("first_texel_w")]
    assert texel == 24 * 16 * 4 // 16


def test_a_copy_is_made_anew_after_its_source_was_written():
    graph, batch = Graph("float32", TEXTURES), make_batch_buffers(1, 8)
    x = stored("x", 8, 16, "float32")
    layer = dense("w", "float32", 16, 16, texture=True)
    linear(graph, x, layer, batch)
    graph.launch("tensor/fill.wgsl", 1, {"y": x}, {"units": 1})
    y = linear(graph, x, layer, batch)
    z = linear(graph, x, layer, batch)
    plan = compile_plan(graph, (graph.launches[0].tensors["y"], y, z))
    assert [la.tensors["x"].name for la in copies(plan)] == ["x", "x"]


def test_a_buffer_only_writer_keeps_a_tensor_in_a_buffer():
    graph, batch = Graph("bfloat16", TEXTURES), make_batch_buffers(1, 8)
    x = stored("x", 8, 16, "bfloat16", texture=True)
    first = replace(dense("a", "bfloat16", 24, 16, texture=True), bias=row("bias", 24, "float32"))
    assert first.bias is not None  # what is added is added to four results at a time
    first.bias.storage = Storage("bias", "test", first.bias.nbytes)
    h = linear(graph, x, first, batch)
    y = linear(graph, h, dense("b", "bfloat16", 16, 24, texture=True), batch)
    plan = compile_plan(graph, (y,))
    assert not h.texture and [la.tensors["x"] for la in copies(plan)] == [h]


def test_a_product_writes_the_texture_that_the_next_one_reads():
    graph, batch = Graph("bfloat16", TEXTURES), make_batch_buffers(1, 8)
    x = stored("x", 8, 16, "bfloat16", texture=True)
    h = linear(graph, x, dense("a", "bfloat16", 24, 16, texture=True), batch)
    y = linear(graph, h, dense("b", "bfloat16", 16, 24, texture=True), batch)
    plan = compile_plan(graph, (y,))
    assert h.texture and not y.texture and not copies(plan)


def test_writing_memory_that_a_tensor_does_not_lie_in_is_an_error():
    graph = Graph("float32", CPU_PROFILE)
    y = stored("y", 8, 16, "float32", texture=True)
    x = stored("x", 16, 16, "float32")
    sum_parts(graph, x, y, 2, accumulate=True)
    with pytest.raises(GraphError, match="is no buffer"):
        compile_plan(graph)


def squared(graph, g):
    """A launch whose g must lie in a buffer."""
    graph.launch(
        "adamw/norm_partial.wgsl",
        (1, 1, 1),
        {"g": g, "squares": stored("squares", 1, 8, "float32")},
        {"units": 2, "begin": 0},
        {"SUMS": 1, "ROWS": 1, "THREADS": 8, "SUBGROUP": True, "ONE_THREAD": False},
    )


def test_a_kernel_that_insists_on_a_buffer_gets_a_copy_there():
    graph = Graph("float32", TEXTURES)
    g = stored("g", 1, 8, "float32", texture=True)
    for _ in range(2):
        squared(graph, g)
    plan = compile_plan(graph)
    assert [la.tensors["x"].name for la in copies(plan)] == ["g"]
    launches = [la for la in plan.launches if la.kernel == "adamw"]
    assert len(launches) == 2 and all(not la.tensors["g"].texture for la in launches)


def test_windows_are_copied_anew_after_their_storage_was_written():
    graph = Graph("float32", TEXTURES)
    whole = Storage("g", "test", 2 * 8 * 4, texture=True)
    first, second = (matrix(n, 1, 8, "float32", whole, o) for n, o in (("a", 0), ("b", 8 * 4)))
    squared(graph, second)
    graph.launch("tensor/fill.wgsl", 2, {"y": first}, {"units": 2})
    squared(graph, second)
    assert [la.tensors["x"].name for la in copies(compile_plan(graph))] == ["b", "b"]


def test_all_that_may_lies_in_textures_where_a_profile_wants_it():
    plan, y = mlp(replace(TEXTURES, in_textures=True), texture=True)
    assert not copies(plan) and all(plan.textures) and y.texture
    outputs = [la.tensors["y"] for la in plan.launches]
    assert len(outputs) == 4 and all(tensor.texture for tensor in outputs)


def sum_of_two(profile):
    """Two products added up, and what is made of their sum."""
    graph = Graph("float32", profile)
    x, w = (stored(name, 16, 16, "float32", texture=True) for name in "xw")
    total, result = graph.float32("sum", 16, 16), stored("y", 16, 16, "float32", texture=True)
    for accumulate in (False, True):
        GEMM.launch(graph, Gemm(x, w, total, False, accumulate=accumulate))
    GEMM.launch(graph, Gemm(total, w, result, False))
    return compile_plan(graph, (total,)), total


def test_a_sum_in_textures_is_written_to_another_one():
    plan, total = sum_of_two(replace(TEXTURES, in_textures=True))
    first, second, last = plan.launches
    before = first.tensors["y"]
    assert second.tensors["y_before"] is before and before is not total
    assert second.tensors["y"] is last.tensors["x"] is total
    assert before.texture and total.texture and plan.slot_of[before] != plan.slot_of[total]


def test_a_sum_in_place_lies_in_a_buffer():
    plan, total = sum_of_two(TEXTURES)
    first, second = plan.launches[:2]
    assert first.tensors["y"] is second.tensors["y"] is total and not total.texture
    assert "y_before" not in second.tensors and len(copies(plan)) == 1


def added(graph, x, w, total, **options):
    GEMM.launch(graph, Gemm(x, w, total, False, accumulate=True, **options))


def begun_sum():
    """A graph with all in textures, two factors, and their product, which may be added to."""
    graph = Graph("float32", replace(TEXTURES, in_textures=True))
    x, w = (stored(name, 16, 16, "float32", texture=True) for name in "xw")
    total = graph.float32("sum", 16, 16)
    GEMM.launch(graph, Gemm(x, w, total, False))
    return graph, x, w, total


def test_each_sum_is_written_to_another_one_and_read_as_it_is_then():
    graph, x, w, total = begun_sum()
    early, late = (stored(name, 16, 16, "float32", texture=True) for name in ("early", "late"))
    added(graph, x, w, total)
    GEMM.launch(graph, Gemm(total, w, early, False))
    added(graph, x, w, total)
    added(graph, x, w, total)
    GEMM.launch(graph, Gemm(total, w, late, False))
    plan = compile_plan(graph)
    first, second, reader, third, fourth, last = plan.launches
    sums = [launch.tensors["y"] for launch in (first, second, third, fourth)]
    assert len(set(sums)) == 4 and all(each.texture for each in sums)
    assert [launch.tensors["y_before"] for launch in (second, third, fourth)] == sums[:-1]
    assert reader.tensors["x"] is sums[1] and last.tensors["x"] is sums[-1] is total
    slots = [plan.slot_of[each] for each in sums]
    assert all(a != b for a, b in pairwise(slots)) and len(set(slots)) == 2


def test_what_is_added_in_place_between_sums_is_in_the_next():
    graph, x, w, total = begun_sum()
    added(graph, x, w, total)
    tensors = {"y": total, "a": None, "b": stored("b", 16, 16, "float32")}
    graph.launch("tensor/add.wgsl", 32, tensors, {"units": 32}, {"ACCUMULATE": True})
    added(graph, x, w, total)
    _, second, in_place, copy, last = compile_plan(graph, (total,)).launches
    sums = second.tensors["y"]
    assert in_place.tensors["y"] is copy.tensors["x"] is sums and not sums.texture
    assert last.tensors["y_before"] is copy.tensors["y"] and last.tensors["y"] is total


def test_a_sum_of_some_rows_stays_where_the_others_are():
    graph, x, w, total = begun_sum()
    added(graph, x, w, total, batch_info=make_batch_buffers(1, 16).info, first_row=0)
    first, second = compile_plan(graph, (total,)).launches
    assert first.tensors["y"] is second.tensors["y"] is total and not total.texture


def test_what_a_kernel_must_have_in_a_buffer_lies_there_among_textures():
    graph = Graph("float32", replace(TEXTURES, in_textures=True))
    x, w = (stored(name, 8, 8, "float32", texture=True) for name in "xw")
    g, y = graph.float32("g", 8, 8), graph.float32("y", 8, 8)
    GEMM.launch(graph, Gemm(x, w, g, False))
    squared(graph, g)
    GEMM.launch(graph, Gemm(g, w, y, False))
    plan = compile_plan(graph, (y,))
    assert not g.texture and [la.tensors["x"] for la in copies(plan)] == [g]
