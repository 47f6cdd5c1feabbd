"""A benchmark's results as JSON, and as tables for a terminal."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from qlora_wgpu.bench.measure import KernelTime, Measurement
from qlora_wgpu.bench.roofline import Ceilings
from qlora_wgpu.bench.timing import Spread
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.version import __version__

NO_TIMESTAMPS = "the GPU does not support timestamp queries, so kernels are not timed"


def to_json(measurement: Measurement) -> dict[str, Any]:
    """All results, in seconds, bytes and operations without prefixes."""
    steps, kernels = measurement.steps, measurement.kernels
    return {
        "versions": versions(measurement.device),
        "device": device_figures(measurement.device),
        "workload": _workload(measurement),
        "tokens_per_second": _spread(tokens_per_second(measurement)),
        "step_seconds": _spread(steps.step_seconds),
        "flops_per_step": measurement.flops_per_step,
        "flops_per_second": _flops_per_second(measurement),
        "host_share": steps.host_share,
        "loss": steps.loss,
        "seconds": {
            "load": measurement.load_seconds,
            "prepare": measurement.prepare_seconds,
            "compile": measurement.compile_seconds,
            "first_step": steps.first_step_seconds,
            "to_first_step": measurement.seconds_to_first_step,
        },
        # Matrix units only if kernels use them
        "ceilings": {name: rate for name, rate in asdict(measurement.ceilings).items() if rate},
        "gaps": asdict(measurement.gaps),
        "memory": {
            "planned": dict(measurement.planned),
            "planned_total": sum(measurement.planned.values()),
            "peak": measurement.peak_bytes,
        },
        "timestamps": kernels is not None,
        "kernels": None
        if kernels is None
        else [row.to_json(measurement.ceilings) for row in kernels],
        "kernels_seconds": None if kernels is None else sum(row.seconds for row in kernels),
        "work_seconds": measurement.work_seconds,
    }


def tokens_per_second(measurement: Measurement) -> Spread:
    """Tokens per second of the median, slowest and fastest step."""
    seconds, tokens = measurement.steps.step_seconds, measurement.tokens_per_step
    return Spread(tokens / seconds.median, tokens / seconds.most, tokens / seconds.least)


def show(console: Console, measurement: Measurement) -> None:
    """Prints a summary and a table of kernels."""
    summary = Table(show_header=False, box=None)
    for row in _summary_rows(measurement):
        summary.add_row(*row)
    console.print(summary, highlight=False, markup=False)
    if measurement.kernels is None:
        console.print(f"note: {NO_TIMESTAMPS}", style="yellow", highlight=False)
    else:
        console.print(_table(measurement.kernels, measurement.ceilings), highlight=False)


def versions(device: Device) -> dict[str, str | None]:
    """Versions of this package, the WebGPU implementation, Python and the platform."""
    return {
        "qlora-wgpu": __version__,
        device.backend.package: _version(device.backend.package),
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


def device_figures(device: Device) -> dict[str, Any]:
    """A device's name, driver and tiling profile."""
    info = device.gpu.info
    return {
        "name": device.name,
        "type": str(info["adapter_type"]),
        "backend": device.backend.name,
        "api": str(info["backend_type"]),
        "driver": str(info["description"]),
        "profile": asdict(device.profile),
    }


def _workload(measurement: Measurement) -> dict[str, Any]:
    workload = measurement.workload
    return {
        "shape": workload.shape.name,
        "weights": workload.shape.weights,
        "batch": workload.batch,
        "seq": workload.seq,
        "rank": workload.rank,
        "compute_dtype": workload.compute_dtype,
        "gradient_checkpointing": workload.gradient_checkpointing,
        "steps": workload.steps,
        "adapter_parameters": measurement.adapter_parameters,
    }


def _flops_per_second(measurement: Measurement) -> float:
    return measurement.flops_per_step / measurement.steps.step_seconds.median


def _summary_rows(measurement: Measurement) -> list[tuple[str, str]]:
    workload, steps, device = measurement.workload, measurement.steps, measurement.device
    ceilings, planned = measurement.ceilings, measurement.planned
    rate, flops = tokens_per_second(measurement), _flops_per_second(measurement)
    checkpointed = ", gradient checkpointing" if workload.gradient_checkpointing else ""
    return [
        ("device", f"{device.name} ({device.gpu.info['description']})"),
        (
            "workload",
            f"{workload.shape.name}, batch {workload.batch}, sequence {workload.seq}, "
            f"rank {workload.rank}, {workload.compute_dtype}{checkpointed}",
        ),
        ("weights", workload.shape.weights),
        (
            "tokens/s",
            f"{rate.median:,.1f} ({rate.least:,.1f} to {rate.most:,.1f}, {workload.steps} steps)",
        ),
        (
            "operations",
            f"{flops / 1e9:,.1f} GFLOP/s of the whole step, "
            f"{_percent(flops, ceilings.flops_per_second)} of the GPU's ceiling",
        ),
        (
            "ceilings",
            f"{ceilings.flops_per_second / 1e9:,.1f} GFLOP/s multiply-adds, "
            f"{_matrix_ceiling(ceilings)}"
            f"{ceilings.bytes_per_second / 1e9:,.1f} GB/s copy",
        ),
        ("host", f"{steps.host_share:.1%} of a step"),
        *_gap_rows(measurement),
        (
            "first step",
            f"after {measurement.seconds_to_first_step:,.2f} s: "
            f"{measurement.load_seconds:,.2f} loading, "
            f"{measurement.prepare_seconds:,.2f} compiling, "
            f"{steps.first_step_seconds:,.2f} computing",
        ),
        (
            "memory",
            f"{_mib(measurement.peak_bytes)} taken, {_mib(sum(planned.values()))} planned: "
            + ", ".join(f"{kind} {_mib(n)}" for kind, n in planned.most_common() if n),
        ),
    ]


def _matrix_ceiling(ceilings: Ceilings) -> str:
    rate = ceilings.matrix_flops_per_second
    return f"{rate / 1e9:,.1f} GFLOP/s matrix units, " if rate else ""


def _gap_rows(measurement: Measurement) -> list[tuple[str, str]]:
    """The time of a step outside of kernels, if they were timed."""
    if measurement.work_seconds is None:
        return []
    step = measurement.steps.step_seconds.median
    gap = step - measurement.work_seconds
    if gap >= 0.0:
        text = f"{1e3 * gap:,.2f} ms of a step, {_percent(gap, step)}"
    else:  # in a step, launches overlap, or find data in the caches
        text = (
            f"unknown: timed alone, kernels take {1e3 * -gap:,.2f} ms ({_percent(-gap, step)}) "
            "longer than the step"
        )
    empty = 1e6 * measurement.gaps.dispatch
    return [("between kernels", f"{text}; an empty launch takes {empty:,.1f} µs")]


def _table(kernels: list[KernelTime], ceilings: Ceilings) -> Table:
    total = sum(row.seconds for row in kernels)
    table = Table(
        title="kernels of a step, each launch timed alone",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.caption = (
        "% peak, % copy: of the ceilings above. Bytes are those of the bound tensors, once per "
        "launch; caches can be faster than the copy."
    )
    table.caption_justify = "left"
    table.add_column("kernel", no_wrap=True)
    for name in ("runs", "ms", "share", "GFLOP/s", "% peak", "GB/s", "% copy"):
        table.add_column(name, justify="right")
    for row in kernels:
        table.add_row(
            row.label,
            str(row.launches),
            f"{1e3 * row.seconds:,.2f}",
            f"{row.share:.1%}",
            f"{row.flops_per_second / 1e9:,.1f}" if row.flops else "",
            _percent(row.flops_per_second, row.flops_ceiling(ceilings)) if row.flops else "",
            f"{row.bytes_per_second / 1e9:,.1f}",
            _percent(row.bytes_per_second, ceilings.bytes_per_second),
        )
    table.add_section()
    table.add_row(
        "total",
        str(sum(row.launches for row in kernels)),
        f"{1e3 * total:,.2f}",
        f"{sum(row.share for row in kernels):.1%}",
    )
    return table


def _percent(value: float, ceiling: float) -> str:
    return f"{value / ceiling:.1%}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "min": spread.least, "max": spread.most}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
