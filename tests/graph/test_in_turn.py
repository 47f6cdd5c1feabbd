"""Programs that run one after the other are submitted together, in order and with the same bits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from support.harness import PROFILES, Bench

from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.graph import program
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.program import BufferPool, Program, submit_batched
from qlora_wgpu.graph.submission import doubling_chunks
from qlora_wgpu.ops.tensor import add_to, cast


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, []), (2, [2]), (3, [3]), (4, [3, 1]), (30, [3, 6, 12, 9])]
)
def test_each_submit_is_twice_as_large_as_the_one_before(count, sizes):
    submits = list(doubling_chunks(range(count), 3))
    assert [len(each) for each in submits] == sizes
    assert [i for each in submits for i in each] == list(range(count))


class Recorded:
    """Stands for a device and its programs: what was submitted, and what ran by itself."""

    def __init__(self, monkeypatch, first):
        self.done = []
        self.in_turn, self.dispatches_per_submit = self, first
        monkeypatch.setattr(program, "encode", lambda device, dispatches: list(dispatches))

    def __enter__(self):
        self.done.append("begin")

    def __exit__(self, *_):
        self.done.append("end")

    def submit(self, commands):
        self.done.append(commands)

    def program(self, dispatches, alone=False):
        return SimpleNamespace(
            begin=lambda: None if alone else list(dispatches),
            run=lambda: self.done.append(dispatches.upper()),
        )


def test_programs_share_submits(monkeypatch):
    device = Recorded(monkeypatch, 2)
    a, b = device.program("abc"), device.program("d")
    submit_batched(device, [a, b] * 2)
    assert device.done == ["begin", ["a", "b"], ["c", "d", "a", "b"], ["c", "d"], "end"]


def test_one_that_must_run_by_itself_comes_in_its_turn(monkeypatch):
    device = Recorded(monkeypatch, 9)
    a, b, c = device.program("a"), device.program("b", alone=True), device.program("c")
    submit_batched(device, [a, b, c, a])
    assert device.done == ["begin", ["a"], "B", ["c", "a"], "end"]


def test_they_run_in_their_order(device, monkeypatch):
    """One program adds 3 to y, the other y to z."""
    pool, programs = BufferPool(device), []
    run = Bench(device, "float32", PROFILES["cpu"])
    three, y, z = (run.float32(np.full((3, 8), value)) for value in (3.0, 0.0, 0.0))
    for to, added in ((y, three), (z, y)):
        graph = Graph("float32", PROFILES["cpu"], device.max_binding)
        add_to(graph, to, added)
        programs.append(Program(device, compile_plan(graph), pool))
    monkeypatch.setattr(device, "dispatches_per_submit", 2)
    submit_batched(device, programs * 4)
    assert np.frombuffer(programs[1].read(z), np.float32).tolist() == [3.0 + 6 + 9 + 12] * 24
    assert pool.runs == 8


def test_programs_that_are_cut_by_time_do_not_begin_with_others(device, monkeypatch):
    run = Bench(device, "float32", PROFILES["cpu"])
    program = run._run((cast(run.graph, run.float32(np.ones((3, 8))), "bfloat16"),))
    before = program._pool.runs
    assert program.begin() == program.dispatches and program._pool.runs == before + 1
    monkeypatch.setattr(device, "pace", CostModel(1e12, 1e11, 0.1))
    assert math.isfinite(device.pace.limit) and program.begin() is None
    assert program._pool.runs == before + 1
