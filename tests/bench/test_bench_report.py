"""The report of ``bench``, as text and as JSON."""

import io
import json
import math
from collections import Counter
from dataclasses import replace

from bench.fakes import fake_device
from rich.console import Console

from qlora_wgpu.bench.measure import KernelTime, Measurement
from qlora_wgpu.bench.report import show, to_json
from qlora_wgpu.bench.roofline import Ceilings, Gaps
from qlora_wgpu.bench.timing import Spread, StepTimes
from qlora_wgpu.bench.workload import Workload, find_shape


def measured(kernels):
    return Measurement(
        workload=Workload(find_shape("S"), batch=2, seq=8),
        device=fake_device(name="card [red]"),
        ceilings=Ceilings(4e9, 2e9),
        load_seconds=1.0,
        prepare_seconds=2.0,
        compile_seconds=1.5,
        gaps=Gaps(dispatch=2e-6, submit=3e-5, timed=1e-2),
        steps=StepTimes(3.0, Spread(0.5, 0.25, 1.0), 0.125, 7.5),
        flops_per_step=10**9,
        kernels=kernels,
        planned=Counter({"base": 2 << 20, "inputs": 1 << 20}),
        peak_bytes=4 << 20,
        adapter_parameters=99,
    )


KERNELS = [
    KernelTime("gemm", 3, 0.3, 0.75, 6 * 10**8, 3 * 10**8),
    KernelTime("add", 1, 0.1, 0.25, 0, 10**8),
]


def shown(measurement):
    console = Console(file=io.StringIO(), width=160)
    show(console, measurement)
    return console.file.getvalue()


def test_json_holds_what_was_found():
    figures = json.loads(json.dumps(to_json(measured(KERNELS)), allow_nan=False))
    assert figures["tokens_per_second"] == {"median": 32.0, "min": 16.0, "max": 64.0}
    assert figures["step_seconds"] == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert figures["flops_per_second"] == 2e9
    assert figures["seconds"] == {
        "load": 1, "prepare": 2, "compile": 1.5, "first_step": 3, "to_first_step": 6,
    }  # fmt: skip
    # Each of four launches less the hundredth of a second that one of nothing takes.
    assert math.isclose(figures["work_seconds"], 0.36)
    assert figures["gaps"]["dispatch"] == 2e-6
    assert figures["kernels"][0]["of_nearest_ceiling"] == 0.5
    assert figures["memory"]["planned_total"] == 3 << 20 == sum(
        figures["memory"]["planned"].values()
    )  # fmt: skip
    assert figures["timestamps"] is True
    assert math.isclose(figures["kernels_seconds"], 0.4)
    assert figures["kernels"][0]["flops_per_second"] == 2e9
    assert figures["kernels"][0]["bytes"] == 3 * 10**8
    assert figures["device"]["name"] == "card [red]"


def test_the_text_tells_the_same():
    text = shown(measured(KERNELS))
    for expected in (
        "card [red] (driver 1)", "S, batch 2, sequence 8, rank 8, bfloat16", "random",
        "32.0 (16.0 to 64.0, 5 steps)", "2.0 GFLOP/s of the whole step, 50.0%",
        "4.0 GFLOP/s multiply-adds, 2.0 GB/s copy", "12.5% of a step",
        "140.00 ms of a step, 28.0%; an empty launch takes 2.0 µs",
        "after 6.00 s: 1.00 loading, 2.00 compiling, 3.00 computing",
        "4.0 MiB taken, 3.0 MiB planned: base 2.0 MiB, inputs 1.0 MiB",
    ):  # fmt: skip
        assert expected in text, expected
    gemm = next(line for line in text.splitlines() if "gemm" in line)
    assert gemm.split() == ["gemm", "3", "300.00", "75.0%", "2.0", "50.0%", "1.0", "50.0%"]


def test_kernels_that_take_longer_by_themselves_than_the_step_leave_no_gap():
    text = shown(measured([replace(KERNELS[0], seconds=0.59), KERNELS[1]]))
    assert (
        "between kernels  unknown: timed alone, kernels take 150.00 ms (30.0%) longer than "
        "the step; an empty launch takes 2.0 µs"
    ) in text


def test_kernels_that_take_as_long_as_the_step_leave_a_gap_of_nothing():
    text = shown(measured([replace(KERNELS[0], seconds=0.44), KERNELS[1]]))
    assert "between kernels  0.00 ms of a step, 0.0%" in text


def test_without_timestamps_it_says_so_and_leaves_the_table_out():
    measurement = measured(None)
    figures = to_json(measurement)
    assert figures["timestamps"] is False
    assert figures["kernels"] is None and figures["kernels_seconds"] is None
    assert figures["work_seconds"] is None
    text = shown(measurement)
    assert "does not support timestamp queries" in text and "launches" not in text
