"""``bench``: training speed of a model shape on this machine, kernel by kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qlora_wgpu.bench.measure import measure
from qlora_wgpu.bench.report import show, to_json
from qlora_wgpu.bench.workload import SHAPES, Workload, find_shape
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._options import (
    DTYPE,
    FILE_OR_FOLDER,
    ParsedType,
    gpu_option,
    integer,
    json_option,
    write_json_file,
)
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import DeviceConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.opening import tune_device
from qlora_wgpu.tuning.tuner import Task

_INTEGER = ParsedType("N", integer)  # the workload checks ranges


@click.command(epilog=f"Named shapes: {', '.join(SHAPES)}.")
@click.argument("shape", default="S", type=FILE_OR_FOLDER)
@click.option("--batch", default=1, type=_INTEGER, help="Rows per step.")
@click.option("--seq", default=256, type=_INTEGER, help="Tokens per row.")
@click.option("--rank", default=8, type=_INTEGER, help="Rank of the adapter.")
@click.option(
    "--steps", default=5, type=_INTEGER, help="Steps to measure, after two warm-up steps."
)
@click.option(
    "--dtype", "compute_dtype", default="bfloat16", type=DTYPE, help="Type of matmul operands."
)
@click.option(
    "--checkpointing",
    "gradient_checkpointing",
    is_flag=True,
    help="Recompute layers in the backward pass.",
)
@gpu_option(
    "The GPU to measure: its index or a part of its name, as doctor lists them.",
    "--adapter",
    "--device",
)
@click.option("--backend", default="auto", help="WebGPU implementation: wgpu or dawn.")
@click.option("--tune", is_flag=True, help="Autotune kernels first.")
@json_option("File to write all results to.")
def bench(
    shape: str, gpu: str, backend: str, tune: bool, json_file: Path | None, **options: Any
) -> None:
    """Benchmark training steps of SHAPE and each of their kernels.

    SHAPE is a name (below), a config.json or a model folder. Weights are random unless the folder
    has some; nothing is downloaded. The throughput of kernels is also shown as a percentage of the
    GPU's measured peak.
    """
    console = Terminal()
    workload = Workload(find_shape(shape), **options)
    device = Device(gpu, backend)
    task = Task(
        workload.shape.config,
        workload.lora,
        QuantConfig(),
        workload.compute_dtype,
        workload.batch,
        workload.seq,
    )
    # Without --tune, cached tilings are used.
    settings = DeviceConfig.model_validate(
        {"gpu": gpu, "backend": backend, "tune": "always" if tune else "auto"}
    )
    architecture = Pretrained.from_config(workload.shape.config).architecture
    with Display(console) as display:
        tune_device(settings, device, task, architecture, 0, display)
    with console.status("") as status:
        measurement = measure(workload, device, status.update)
    show(console, measurement)
    if json_file is not None:
        write_json_file(json_file, to_json(measurement))
        console.print(f"written to {json_file}")
