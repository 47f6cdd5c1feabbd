"""Launches are fused where one kernel does what several would and nothing else reads between."""

from support.traced import dense, labels, stored

from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.rewrite import rewrite
from qlora_wgpu.graph.tensor import Storage, row
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.fusion import FUSIONS
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.tensor import cast


def test_a_residual_is_rounded_by_the_norm_that_adds_to_it():
    graph = Graph("bfloat16", GPU_PROFILE)
    h = stored("h", 4, 16, grad=True)
    batch, weight = make_batch_buffers(1, 4), row("w", 16, "float32", Storage("w", "test", 64))
    o = linear(graph, cast(graph, h), dense(graph, "o", 16, 16), batch, h)
    y = linear(graph, rms_norm(graph, o, weight, 1e-5), dense(graph, "y", 16, 16), batch, o)
    graph.add_gradient(y, graph.float32("dy", 4, 16))
    graph.backward()
    rewrite(graph, FUSIONS)
    # One for dy, which no kernel made here, and one for h, forward.
    assert labels(graph).count("tensor/convert") == 2
    norm = next(launch for launch in graph.launches if launch.label == "rms_norm/backward")
    product = graph.launches[graph.launches.index(norm) + 1]
    assert norm.constants["ACCUMULATE"] and product.label == "gemm/backward"
    assert product.tensors["x"] is norm.tensors["dx_operand"]


def long_product(graph, x, name, outer, residual=None):
    """A product that GPUs make in parts."""
    batch = make_batch_buffers(1, x.rows)
    return linear(graph, x, dense(graph, name, outer, x.columns), batch, residual, float32=True)


def test_a_norm_adds_up_the_parts_of_the_product_before_it():
    graph = Graph("bfloat16", GPU_PROFILE)
    x, skip = stored("x", 4, 2048, "bfloat16", grad=True), stored("skip", 4, 72, grad=True)
    weight = row("w", 72, "float32", Storage("w", "test", 288))
    h = long_product(graph, x, "h", 72, skip)
    assert labels(graph)[-1] == "tensor/sum_parts"
    y = rms_norm(graph, h, weight, 1e-5)
    z = long_product(graph, y, "z", 2048)
    graph.add_gradient(z, graph.operand("dz", 4, 2048))
    graph.add_gradient(h, graph.float32("dh", 4, 72))
    graph.backward()
    rewrite(graph, FUSIONS)
    assert "tensor/sum_parts" not in labels(graph)
    forward = next(launch for launch in graph.launches if launch.label == "rms_norm/forward")
    assert forward.tensors["sum"] is h and forward.tensors["added"] is skip
    norm = next(launch for launch in graph.launches if launch.label == "rms_norm/backward")
    assert "parts" in norm.tensors and "dy" not in norm.tensors
    assert norm.constants["ACCUMULATE"]  # it still adds to what is there


def test_parts_that_somebody_else_reads_are_added_up():
    graph = Graph("bfloat16", GPU_PROFILE)
    x = stored("x", 4, 2048, "bfloat16", grad=True)
    weight = row("w", 72, "float32", Storage("w", "test", 288))
    h = long_product(graph, x, "h", 72)
    rms_norm(graph, h, weight, 1e-5, residual=h)
    rewrite(graph, FUSIONS)
    assert labels(graph)[-2:] == ["tensor/sum_parts", "rms_norm/forward"]
    g = Graph("bfloat16", GPU_PROFILE)
    h, other = stored("h", 4, 72, grad=True), stored("other", 4, 72, grad=True)
    y = rms_norm(g, h, weight, 1e-5)
    passed = g.operand("passed", 4, 72)
    g.record(passed, [y, other], lambda d: (g.add_gradient(other, d), g.add_gradient(y, d)))
    z = long_product(g, passed, "z", 2048)
    g.add_gradient(z, g.operand("dz", 4, 2048))
    g.backward()
    rewrite(g, FUSIONS, [g.gradient_of(other)])
    assert "tensor/sum_parts" in labels(g)
