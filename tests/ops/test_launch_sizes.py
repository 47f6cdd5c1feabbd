"""How kernels' threads and rows are chosen, and their parameters."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Storage, matrix
from qlora_wgpu.kernels import common
from qlora_wgpu.kernels.common import DropoutMask, dropout_params, held_row, row_constants

BUFFERS = GPU_PROFILE


def graph_of(profile, **changes):
    return SimpleNamespace(profile=replace(profile, **changes))


@pytest.mark.parametrize(
    ("graph", "columns", "threads"),
    [
        (graph_of(BUFFERS, threads_per_row=64), 0, 64),
        (graph_of(BUFFERS, threads_per_row=64), common._LONG_ROW - 1, 64),
        (graph_of(BUFFERS, threads_per_row=64), common._LONG_ROW, 256),
        (graph_of(BUFFERS, threads_per_row=1), common._LONG_ROW, 1),
        (graph_of(BUFFERS, threads_per_row=64, subgroup_size=8), common._LONG_ROW, 64),
    ],
)
def test_long_rows_have_as_many_threads_as_are_allowed(graph, columns, threads):
    allowed = replace(graph.profile.limits, invocations=300)
    graph.profile = replace(graph.profile, limits=allowed)
    made = row_constants(graph, columns)
    assert (made["THREADS"], made["ONE_THREAD"]) == (threads, threads == 1)
    assert made["SUBGROUP"] == graph.profile.textures
    assert made["ROWS"] == graph.profile.rows_per_group
    if columns == common._LONG_ROW and threads == 256:
        graph.profile = replace(graph.profile, limits=replace(allowed, invocations=4096))
        assert row_constants(graph, columns)["THREADS"] == 1024


def test_short_rows_are_held():
    graph = graph_of(GPU_PROFILE, subgroup_size=8, threads_per_row=32)
    most = common._MOST_HELD * 32
    assert held_row(graph, most) == {
        "HELD": True, "TURNS": common._MOST_HELD, "EACH": common._HELD_ROWS,
    }  # fmt: skip
    assert held_row(graph, most + 1) == {"HELD": False, "TURNS": common._MOST_HELD + 1, "EACH": 1}
    assert not held_row(graph_of(BUFFERS, threads_per_row=32), 1)["HELD"]


def test_what_is_kept_of_a_dropped_input_is_scaled():
    assert dropout_params(None) == {"module_key": 0, "keep_below": 0, "keep_scale": 1.0}
    assert dropout_params(DropoutMask(0.75, 7)) == {
        "module_key": 7, "keep_below": 1 << 30, "keep_scale": 4.0,
    }  # fmt: skip
    assert dropout_params(DropoutMask(1e-12, 7))["keep_below"] == 2**32 - 1


def launched(profile, turns, rows=64):
    graph = Graph("float32", profile)
    x, y = (
        matrix(name, rows, 64, "float32", Storage(name, "test", 4 * 64 * rows)) for name in "xy"
    )
    units = rows * x.units(8)
    graph.launch("tensor/convert.wgsl", units, {"x": x, "y": y}, turns=turns)
    return graph.launches[-1].constants["ELEMENTS"]


def test_loops_over_elements_count_as_turns():
    profile = replace(CPU_PROFILE, most_turns=100, elements_per_thread=16)
    assert launched(profile, 0) == 16
    assert launched(profile, 5) == 16
    assert launched(profile, 9) == 10
    assert launched(profile, 60) == launched(profile, 100) == 1
    assert launched(replace(profile, most_turns=0), 60) == 16
    with pytest.raises(OutOfMemoryError, match=r"needs 101 loop iterations .* at most 100"):
        launched(profile, 101)
