"""``bench``: how fast this machine trains a shape, and which kernels take the time."""

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
    ReadBy,
    any_whole_number,
    gpu_option,
    json_option,
    write_figures,
)
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import DeviceConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.opening import tune_device
from qlora_wgpu.tuning.tuner import Task

_WHOLE = ReadBy("N", any_whole_number)  # what each must be, the workload says


@click.command(epilog=f"Shapes with a name: {', '.join(SHAPES)}.")
@click.argument("shape", default="S", type=FILE_OR_FOLDER)
@click.option("--batch", default=1, type=_WHOLE, help="Rows of a step.")
@click.option("--seq", default=256, type=_WHOLE, help="Tokens of a row.")
@click.option("--rank", default=8, type=_WHOLE, help="Rank of the adapter.")
@click.option(
    "--steps", default=5, type=_WHOLE, help="How many steps are measured, after two for warming up."
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
@click.option("--tune", is_flag=True, help="Time ways of cutting kernels first, and keep the best.")
@json_option("File to write all figures to.")
def bench(
    shape: str, gpu: str, backend: str, tune: bool, json_file: Path | None, **options: Any
) -> None:
    """Time training steps of SHAPE on this machine, and every kernel of them.

    SHAPE is a name (below), a config.json or a model folder. Weights are random unless the folder
    has some; nothing is downloaded. Kernels are shown against what the GPU gives at most.
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
    # Without --tune, what is known already is used.
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
        write_figures(json_file, to_json(measurement))
        console.print(f"written to {json_file}")
