"""Gradients add up whatever arrives, in any order, and copy nothing that nobody else looks at."""

import pytest
from support.traced import dense, labels, stored

from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Storage, row
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.linear import linear
from qlora_wgpu.ops.norms import rms_norm
from qlora_wgpu.ops.pointwise import glu


def test_the_first_contribution_is_kept_as_it_is():
    graph = Graph("bfloat16", CPU_PROFILE)
    x, dx = stored("x", 4, 8, grad=True), graph.operand("dx", 4, 8)
    graph.add_gradient(x, dx)
    assert graph.gradient_of(x) is dx and not graph.launches


def test_contributions_of_other_types_are_added_in_float32():
    graph = Graph("bfloat16", CPU_PROFILE)
    x = stored("x", 4, 8, "bfloat16", grad=True)
    for name in ("a", "b", "c"):
        graph.add_gradient(x, graph.operand(name, 4, 8))
    assert graph.gradient_of(x).dtype == "float32"
    assert labels(graph) == ["tensor/add", "tensor/add"]
    # The second addition is in place.
    assert [sorted(launch.tensors) for launch in graph.launches] == [["a", "b", "y"], ["b", "y"]]


def test_a_gradient_of_two_tensors_is_never_written():
    graph = Graph("float32", CPU_PROFILE)
    x, skip = stored("x", 4, 8, grad=True), stored("skip", 4, 8, grad=True)
    shared, more = graph.float32("shared", 4, 8), graph.float32("more", 4, 8)
    graph.add_gradient(x, shared)
    graph.add_gradient(skip, shared)
    graph.add_gradient(x, more)
    assert graph.gradient_of(skip) is shared and graph.gradient_of(x) is not shared
    assert all(shared not in launch.written() for launch in graph.launches)


def test_what_the_caller_owns_is_never_written():
    graph = Graph("float32", CPU_PROFILE)
    x, given = stored("x", 4, 8, grad=True), stored("given", 4, 8)
    graph.add_gradient(x, given)
    graph.add_gradient(x, graph.float32("more", 4, 8))
    assert all(given not in launch.written() for launch in graph.launches)


def test_a_kernel_that_can_add_does_so_itself():
    graph = Graph("bfloat16", CPU_PROFILE)
    x = stored("x", 4, 16, grad=True)
    batch, weight = make_batch_buffers(1, 4), row("w", 16, "float32", Storage("w", "test", 64))
    y = rms_norm(graph, x, weight, 1e-5)
    outputs = [linear(graph, y, dense(graph, n, 24, 16), batch) for n in ("q", "k", "v")]
    for output in outputs:
        graph.add_gradient(output, graph.operand("dy", 4, 24))
    graph.backward()
    assert "tensor/add" not in labels(graph)
    added = [launch.constants.get("ACCUMULATE") for launch in graph.launches][-4:]
    assert added[:3] == [False, True, True]


def test_a_residual_is_added_to_by_the_norm():
    graph = Graph("float32", CPU_PROFILE)
    h = stored("h", 4, 16, grad=True)
    batch, weight = make_batch_buffers(1, 4), row("w", 16, "float32", Storage("w", "test", 64))
    x = rms_norm(graph, h, weight, 1e-5)
    y = linear(graph, x, dense(graph, "o", 16, 16), batch, h)
    dy = graph.float32("dy", 4, 16)
    graph.add_gradient(y, dy)
    graph.backward()
    assert graph.gradient_of(h) is dy  # y's alone, and y is done with it
    assert labels(graph)[-1] == "rms_norm/backward"
    assert graph.launches[-1].constants["ACCUMULATE"] is True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE])
def test_a_tensor_may_be_used_twice(dtype, profile):
    graph = Graph(dtype, profile)
    x = stored("x", 4, 16, dtype, grad=True)
    y = glu(graph, x, x)
    graph.add_gradient(y, graph.float32("dy", 4, 16))
    graph.backward()
    assert graph.gradient_of(x).shape == (4, 16)


def test_no_launch_reads_what_it_writes():
    graph = Graph("float32", CPU_PROFILE)
    h = stored("h", 4, 16, grad=True)
    weight = row("w", 16, "float32", Storage("w", "test", 64))
    y = rms_norm(graph, h, weight, 1e-5, residual=h)
    graph.add_gradient(y, graph.float32("dy", 4, 16))
    graph.backward()
    for launch in graph.launches:
        written = set(launch.written())
        read = [t for n, t in launch.tensors.items() if not launch.shader.bindings[n].writable]
        assert not written & set(read), launch.label


def test_a_gradient_of_another_shape_is_an_error():
    graph = Graph("float32", CPU_PROFILE)
    with pytest.raises(GraphError, match="is not a gradient of"):
        graph.add_gradient(stored("x", 4, 8, grad=True), graph.float32("dx", 4, 9))


def test_what_does_not_train_gathers_nothing():
    graph = Graph("float32", CPU_PROFILE)
    x = stored("x", 4, 8)
    graph.add_gradient(x, graph.float32("dx", 4, 8))
    with pytest.raises(KeyError):
        graph.gradient_of(x)


def test_what_a_running_vjp_was_given_is_never_written():
    """It may hand that on before it reads it, and then add more."""
    graph = Graph("float32", CPU_PROFILE)
    x, given = stored("x", 4, 8, grad=True), graph.float32("given", 4, 8)
    y = graph.float32("y", 4, 8)

    def vjp(dy):
        graph.add_gradient(x, dy)
        graph.add_gradient(x, graph.float32("more", 4, 8))

    graph.record(y, [x], vjp)
    graph.add_gradient(y, given)
    graph.backward()
    assert graph.gradient_of(x) is not given
    assert all(given not in launch.written() for launch in graph.launches)


def test_nothing_is_added_to_bfloat16():
    graph = Graph("bfloat16", CPU_PROFILE)
    y, b = graph.operand("y", 4, 8), graph.operand("b", 4, 8)
    with pytest.raises(GraphError, match=r"y = .* is not float32"):
        graph.launch("tensor/add.wgsl", 4, {"y": y, "b": b}, {"units": 4}, {"ACCUMULATE": True})


def maker_of(graph, dx):
    """A launch that makes dx and could add it to something else."""
    tensors = {"y": dx, "a": graph.float32("p", 4, 8), "b": graph.float32("q", 4, 8)}
    graph.launch("tensor/add.wgsl", 4, tensors, {"units": 4}, {"ACCUMULATE": False})
    return graph.launches[-1]


def run_vjp(graph, x, vjp):
    """Runs a VJP behind a gradient of x that is the graph's own."""
    graph.add_gradient(x, graph.float32("total", 4, 8))
    y = graph.float32("y", 4, 8)
    graph.record(y, [x], vjp)
    graph.add_gradient(y, graph.float32("dy", 4, 8))
    graph.backward()


def test_what_another_tensor_holds_is_still_made():
    graph = Graph("float32", CPU_PROFILE)
    x, other = stored("x", 4, 8, grad=True), stored("other", 4, 8, grad=True)
    dx = graph.float32("dx", 4, 8)

    def vjp(dy):
        maker_of(graph, dx)
        graph.add_gradient(other, dx)
        graph.add_gradient(x, dx)

    run_vjp(graph, x, vjp)
    assert graph.gradient_of(other) is dx
    assert graph.launches[0].tensors["y"] is dx and labels(graph)[-1] == "tensor/add"
    assert graph.gradient_of(x) is not dx


def test_a_total_that_is_read_in_between_changes_afterwards():
    graph = Graph("float32", CPU_PROFILE)
    x, dx = stored("x", 4, 8, grad=True), graph.float32("dx", 4, 8)

    def vjp(dy):
        maker_of(graph, dx)
        source, target = graph.gradient_of(x), graph.operand("seen", 4, 8)
        graph.launch("tensor/convert.wgsl", 4, {"x": source, "y": target}, {"units": 4})
        graph.add_gradient(x, dx)

    run_vjp(graph, x, vjp)
    assert labels(graph) == ["tensor/add", "tensor/convert", "tensor/add"]
    assert graph.launches[0].tensors["y"] is dx


def test_an_op_of_two_outputs_is_given_both_gradients_at_once():
    graph = Graph("float32", CPU_PROFILE)
    x = stored("x", 4, 8, grad=True)
    y, z = graph.float32("y", 4, 8), graph.float32("z", 4, 8)
    dy, given = graph.float32("dy", 4, 8), []
    graph.record_jointly([y, z], [x], given.append)
    assert y.requires_grad and z.requires_grad
    graph.add_gradient(z, dy)
    graph.backward()
    assert given == [[None, dy]]


def test_a_gradient_with_one_source_has_the_type_that_is_wanted():
    graph = Graph("bfloat16", CPU_PROFILE)
    x = stored("x", 4, 16, "bfloat16", grad=True)
    batch, weight = make_batch_buffers(1, 4), row("w", 16, "float32", Storage("w", "test", 64))
    y = linear(graph, x, dense(graph, "y", 16, 16), batch, float32=True)
    z = rms_norm(graph, y, weight, 1e-5)
    assert graph.new_gradient(x).dtype == "bfloat16"  # the product's alone
    assert graph.new_gradient(y).dtype == "bfloat16"  # float32, but its product reads operands
    linear(graph, z, dense(graph, "first", 24, 16), batch)
    assert graph.new_gradient(z).dtype == "bfloat16"
    linear(graph, z, dense(graph, "second", 24, 16), batch)
    assert graph.new_gradient(z).dtype == "float32"  # a sum


def test_what_is_recomputed_may_take_and_make_several():
    """Gradients pass on to what it took, also to what later functions take as well."""
    graph = Graph("float32", CPU_PROFILE)
    batch = make_batch_buffers(1, 4)
    x, side = stored("x", 4, 16, grad=True), stored("side", 4, 16, grad=True)
    wide, narrow = dense(graph, "wide", 16, 16), dense(graph, "narrow", 16, 16)
    unused = stored("unused", 4, 16)

    def first(xs):
        return [linear(graph, xs[0], wide, batch), glu(graph, xs[0], xs[1])]

    def second(xs):
        return [glu(graph, linear(graph, xs[0], narrow, batch), xs[1])]

    h, kept = graph.checkpoint(first, [x, side, unused])
    (y,) = graph.checkpoint(second, [h, kept])
    (z,) = graph.checkpoint(second, [y, kept])
    forward = len(graph.launches)
    graph.add_gradient(z, graph.float32("dz", 4, 16))
    graph.backward()
    assert graph.gradient_of(x).shape == graph.gradient_of(side).shape == (4, 16)
    again = [launch.label for launch in graph.launches[forward:] if "forward" in launch.label]
    assert again.count("glu/forward") == 3 and again.count("gemm/forward") == 3
    # What both later functions say of ``kept`` is added up before it goes on.
    assert labels(graph).count("tensor/add") == 1


def test_what_another_launch_has_read_is_still_made():
    """A launch of its own that cannot add to the total leaves the gradient where it is."""
    graph = Graph("float32", CPU_PROFILE)
    x, dx = stored("x", 4, 8, grad=True), graph.float32("dx", 4, 8)

    def vjp(dy):
        maker_of(graph, dx)
        seen = graph.operand("seen", 4, 8)
        graph.launch("tensor/convert.wgsl", 4, {"x": dx, "y": seen}, {"units": 4})
        graph.add_gradient(x, dx)

    run_vjp(graph, x, vjp)
    assert labels(graph) == ["tensor/add", "tensor/convert", "tensor/add"]
    assert graph.launches[0].tensors["y"] is graph.launches[1].tensors["x"] is dx
