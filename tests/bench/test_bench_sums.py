"""Clocks, sums by kernel and ceilings of ``bench``; no GPU is opened."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from bench.fakes import fake_device

from qlora_wgpu.bench import roofline
from qlora_wgpu.bench.measure import KernelTime, sum_up
from qlora_wgpu.bench.roofline import Ceilings
from qlora_wgpu.bench.timing import Spread, best_of, clocked_submits
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import load_shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import matrix


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)


def test_the_best_of_rounds_is_kept_for_each_launch():
    times = iter([[3.0, 5.0, 0.25], [2.0, 1.0, 0.5], [9.0, 1.0, 0.75]])
    first = iter(next(times))
    asked = []

    def seconds(dispatches, expected):
        asked.append(expected)
        return next(times)

    timer = SimpleNamespace(
        rough_seconds=lambda dispatch: next(first),
        seconds=seconds,
        load=SimpleNamespace(raise_clock=lambda: None),
    )
    launches = [["a"], ["b", "its second part"]]
    assert best_of(launches, timer, 2) == [2.0, 1.25]
    assert asked == [[3.0, 5.0, 0.25]]
    # At least two rounds, and as many as there is time for.
    first = iter([9.0, 9.0, 9.0])
    assert best_of(launches, timer, 5, least=2, enough=0.0) == [9.0, 1.75]
    first = iter([2.0, 1.0, 0.5])
    assert best_of(launches, timer, 5, least=1, enough=3.0) == [2.0, 1.5]


def test_submits_are_counted_and_left_as_they_were():
    class Queue:
        def __init__(self):
            self.got = []

        def submit(self, buffers):
            self.got.append(buffers)

    queue = Queue()
    device = SimpleNamespace(raw=SimpleNamespace(queue=queue))
    with pytest.raises(ZeroDivisionError), clocked_submits(device) as clock:
        queue.submit([1])
        assert 0 < clock.seconds < 1
        raise ZeroDivisionError
    seconds = clock.seconds
    queue.submit([2])
    assert queue.got == [[1], [2]] and clock.seconds == seconds


def launch(label, written=("y",), flops=0, table=None, code="", **tensors):
    bindings = {
        name: SimpleNamespace(writable=name in written, table=name == table) for name in tensors
    }
    shader = SimpleNamespace(label=f"{label}(A=1)", bindings=bindings, code=code)
    made = SimpleNamespace(
        shader=shader, tensors=tensors, params=b"", label=label, flops=flops,
        written=lambda: [t for n, t in tensors.items() if n in written],
    )  # fmt: skip
    made.nbytes = Launch.nbytes.fget(made)
    return made


def test_bytes_are_those_of_each_tensor_once():
    x, y = matrix("x", 3, 8, "float32"), matrix("y", 2, 8, "bfloat16")
    assert launch("cast", x=x, y=y).nbytes == 96 + 32
    assert launch("cast", a=x, b=x, y=y).nbytes == 96 + 32
    # A lookup is bound to a whole table, of which it reads as much as it writes.
    table = matrix("table", 1000, 8, "bfloat16")
    assert launch("lookup", table="x", x=table, y=y).nbytes == 64
    assert (
        load_shader("embedding/forward.wgsl", (("ELEMENTS", 1), ("FLAT", 64)))
        .bindings["weight"]
        .table
    )


def test_kernels_add_up_by_label():
    x, y = matrix("x", 1, 8, "float32"), matrix("y", 1, 8, "float32")
    launches = [
        launch("small", x=x, y=y),
        launch("gemm", x=x, y=y, flops=100),
        launch("gemm", x=x, y=y, flops=50),
    ]
    gemm, small = sum_up(launches, [0.5, 1.0, 0.5])
    assert gemm == KernelTime("gemm", 2, 1.5, 0.75, 150, 128)
    assert small == KernelTime("small", 1, 0.5, 0.25, 0, 64)
    assert (gemm.flops_per_second, gemm.bytes_per_second) == (100.0, 128 / 1.5)
    assert (small.flops_per_second, small.bytes_per_second) == (0.0, 128.0)
    with pytest.raises(ValueError, match="zip"):
        sum_up(launches, [1.0, 1.0])


def test_a_kernel_is_on_matrix_units_if_a_launch_of_it_is():
    x = matrix("x", 1, 8, "float32")
    launches = [launch("a", y=x, code="subgroup_matrix_left"), launch("a", y=x), launch("b", y=x)]
    both, plain = sum_up(launches, [1.0, 1.0, 1.0])
    assert (both.on_matrix_units, plain.on_matrix_units) == (True, False)


def test_a_clock_that_stands_still_divides_by_nothing():
    y = matrix("y", 1, 8, "float32")
    (row,) = sum_up([launch("gemm", y=y, flops=7)], [0.0])
    figures = row.to_json(Ceilings(4e9, 2e9))
    assert (figures["share"], figures["flops_per_second"], figures["bytes_per_second"]) == (0, 0, 0)
    assert sum_up([], []) == []


def test_the_ceiling_counts_the_multiply_adds_that_its_shader_has():
    shader = load_shader("bench/fma.wgsl")
    assert shader.code.count("= fma(") == roofline._FMA_PER_TURN
    assert shader.workgroup_size == (roofline._FMA_GROUP, 1, 1)


def test_the_ceiling_of_matrix_units_counts_what_its_shader_multiplies():
    constants = (("GROUP", 128), ("HALF", True), ("K", 8), ("M", 16), ("N", 16), ("SUBGROUPS", 4))
    shader = load_shader("bench/matrix.wgsl", constants)
    assert shader.code.count("= subgroupMatrixMultiplyAccumulate(") == roofline._MATRICES_PER_TURN
    assert shader.workgroup_size == (128, 1, 1)
    assert roofline._matrix_rate(fake_device()) == 0.0  # kernels use none here


def test_the_higher_ceilings_are_kept():
    first, second = Ceilings(3.0, 1.0), Ceilings(2.0, 4.0, 7.0)
    assert first.higher(second) == second.higher(first) == Ceilings(3.0, 4.0, 7.0)


def test_a_kernel_is_held_against_the_nearest_ceiling():
    most = Ceilings(4e9, 2e9, 16e9)
    products = KernelTime("gemm", 1, 1.0, 1.0, 10**9, 10**9)
    assert products.of_nearest(most) == ("bytes", 0.5)
    on_units = replace(products, nbytes=0, flops=8 * 10**9, on_matrix_units=True)
    assert on_units.of_nearest(most) == ("operations", 0.5)
    assert replace(on_units, on_matrix_units=False).of_nearest(most) == ("operations", 2.0)
    assert on_units.of_nearest(Ceilings(4e9, 2e9)) == ("operations", 2.0)  # theirs is not known
    y = matrix("y", 1, 8, "float32")
    (row,) = sum_up([launch("gemm", y=y, code="subgroup_matrix_left<f16>")], [1.0])
    assert row.on_matrix_units


def test_copies_are_cut_for_each_kind_of_memory():
    constants = (("ELEMENTS", 1), ("FLAT", 64))
    for texture in (False, True):
        memory = Bound("float32", texture)
        bindings = load_shader(
            "tensor/copy.wgsl", constants, (("x", memory), ("y", memory))
        ).bindings
        assert {n: (b.texture, b.writable) for n, b in bindings.items()} == {
            "x": (texture, False),
            "y": (texture, True),
        }
