"""``bench``: how fast this machine trains a shape, and which kernels take the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import click

from qlora_wgpu.bench.measure import measure
from qlora_wgpu.bench.report import show, to_json
from qlora_wgpu.bench.workload import SHAPES, Workload, find_shape
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._model import gpu_option, target_file, write_figures
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.opening import tune_device
from qlora_wgpu.tuning.tuner import Task

_DTYPES = ("bfloat16", "float32")


def _whole(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--{parameter.name} must be a whole number, got {value!r}") from None


def _dtype(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if value not in _DTYPES:
        raise ConfigError(f"--dtype must be {' or '.join(_DTYPES)}, got {value!r}")
    return value


def _number(name: str, default: int, text: str) -> Callable[[Any], Any]:
    # Text at first, so that a wrong one is a sentence and not a usage text.
    return click.option(
        f"--{name}",
        default=str(default),
        show_default=True,
        metavar="N",
        callback=_whole,
        help=text,
    )


@click.command(epilog=f"Shapes with a name: {', '.join(SHAPES)}.")
@click.argument("shape", default="S")
@_number("batch", 1, "Rows of a step.")
@_number("seq", 256, "Tokens of a row.")
@_number("rank", 8, "Rank of the adapter.")
@_number("steps", 5, "How many steps are measured, after two for warming up.")
@click.option(
    "--dtype",
    default=_DTYPES[0],
    show_default=True,
    metavar="|".join(_DTYPES),
    callback=_dtype,
    help="Type of matmul operands.",
)
@click.option("--checkpointing", is_flag=True, help="Recompute layers in the backward pass.")
@gpu_option(
    "The GPU to measure: its index or a part of its name, as doctor lists them.",
    "--adapter",
    "--device",
)
@click.option(
    "--backend", default="auto", show_default=True, help="WebGPU implementation: wgpu or dawn."
)
@click.option("--tune", is_flag=True, help="Time ways of cutting kernels first, and keep the best.")
@click.option("--json", "json_file", metavar="FILE", help="File to write all figures to.")
def bench(
    shape: str,
    batch: int,
    seq: int,
    rank: int,
    steps: int,
    dtype: Literal["bfloat16", "float32"],
    checkpointing: bool,
    gpu: str,
    backend: str,
    tune: bool,
    json_file: str | None,
) -> None:
    """Time training steps of SHAPE on this machine, and every kernel of them.

    SHAPE is a name (below), a config.json or a model folder. Weights are random unless the folder
    has some; nothing is downloaded. Kernels are shown against what the GPU gives at most.
    """
    console = Terminal()
    target = None if json_file is None else target_file("--json", json_file)
    workload = Workload(
        find_shape(shape),
        batch=batch,
        seq=seq,
        rank=rank,
        compute_dtype=dtype,
        gradient_checkpointing=checkpointing,
        steps=steps,
    )
    device = Device(gpu, backend)
    task = Task(
        workload.shape.config, workload.lora, QuantConfig(), workload.compute_dtype, batch, seq
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
    if target is not None:
        write_figures(target, to_json(measurement))
        console.print(f"written to {target}", highlight=False, markup=False)
