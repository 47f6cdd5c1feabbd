"""A benchmark of one workload on one device, with times by kernel."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qlora_wgpu.bench.roofline import Ceilings, Gaps, measure_ceilings, measure_gaps
from qlora_wgpu.bench.timing import (
    DispatchTimer,
    Load,
    StepTimes,
    best_of,
    clocked,
    has_timestamps,
    time_steps,
    total_steps,
)
from qlora_wgpu.bench.workload import RandomFolder, Workload
from qlora_wgpu.config import LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Launch
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.optimizer import Optimizer


@dataclass(frozen=True)
class KernelTime:
    """Time of all launches of one kernel in a step."""

    label: str
    launches: int
    seconds: float  # of all launches, each timed alone
    share: float  # of the time of all kernels; 0 if the clock is too coarse
    flops: int  # floating-point operations, of matrix products only
    nbytes: int  # bytes of the bound tensors, counted once per launch
    on_matrix_units: bool = False

    @property
    def flops_per_second(self) -> float:
        """Achieved operations per second; 0 if the clock is too coarse."""
        return self.flops / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Achieved bytes per second; 0 if the clock is too coarse."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def flops_ceiling(self, ceilings: Ceilings) -> float:
        """Peak operations per second of the units that the kernel runs on."""
        peak = ceilings.matrix_flops_per_second if self.on_matrix_units else 0.0
        return peak or ceilings.flops_per_second

    def of_nearest(self, ceilings: Ceilings) -> tuple[str, float]:
        """The ceiling it is closest to, ``"operations"`` or ``"bytes"``, and the fraction of it."""
        shares = {
            "operations": self.flops_per_second / self.flops_ceiling(ceilings),
            "bytes": self.bytes_per_second / ceilings.bytes_per_second,
        }
        return max(shares.items(), key=lambda pair: pair[1])

    def to_json(self, ceilings: Ceilings) -> dict[str, Any]:
        """All values, with rates and fractions of the GPU's ceilings."""
        row = {"bytes" if key == "nbytes" else key: value for key, value in asdict(self).items()}
        nearest, share = self.of_nearest(ceilings)
        return {
            **row,
            "flops_per_second": self.flops_per_second,
            "bytes_per_second": self.bytes_per_second,
            "nearest_ceiling": nearest,
            "of_nearest_ceiling": share,
        }


def sum_up(launches: Sequence[Launch], seconds: Sequence[float]) -> list[KernelTime]:
    """One row per kernel, the slowest first."""
    total = sum(seconds)
    rows: dict[str, list[tuple[Launch, float]]] = {}
    for launch, took in zip(launches, seconds, strict=True):
        rows.setdefault(launch.label, []).append((launch, took))
    table = []
    for label, timed in rows.items():
        took = sum(seconds for _, seconds in timed)
        table.append(
            KernelTime(
                label=label,
                launches=len(timed),
                seconds=took,
                share=took / total if total > 0 else 0.0,
                flops=sum(launch.flops for launch, _ in timed),
                nbytes=sum(launch.nbytes for launch, _ in timed),
                on_matrix_units=any("subgroup_matrix" in launch.shader.code for launch, _ in timed),
            )
        )
    return sorted(table, key=lambda row: -row.seconds)


_ROUNDS = 3  # timings of each launch, of which the best counts


@dataclass(frozen=True)
class Measurement:
    """The results of a benchmark."""

    workload: Workload  # the training steps that ran
    device: Device
    ceilings: Ceilings
    load_seconds: float  # from an open device until all weights are on it
    prepare_seconds: float  # tracing, planning, compiling and binding the step
    compile_seconds: float  # of these, the driver's compilation
    gaps: Gaps  # overhead of launches
    steps: StepTimes
    flops_per_step: int  # operations of a step's matrix products
    kernels: list[KernelTime] | None  # the slowest first; None without timestamps
    planned: Counter[str]  # planned bytes of GPU memory, by kind
    peak_bytes: int
    adapter_parameters: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a micro-batch, with padding."""
        return self.workload.batch * self.workload.seq

    @property
    def work_seconds(self) -> float | None:
        """Time of a step's launches, minus what timestamps show for empty launches."""
        if self.kernels is None:
            return None
        return sum(max(row.seconds - row.launches * self.gaps.timed, 0.0) for row in self.kernels)

    @property
    def seconds_to_first_step(self) -> float:
        """Time from an open device to the first loss."""
        return self.load_seconds + self.prepare_seconds + self.steps.first_step_seconds


def measure(
    workload: Workload, device: Device, progress: Callable[[str], None] = lambda text: None
) -> Measurement:
    """Loads, compiles, trains, and then times every launch alone."""
    planned = workload.planned_memory(device)
    progress("measuring the GPU's ceilings")
    ceilings, gaps = measure_ceilings(device), measure_gaps(device)
    progress("loading weights")
    begin = time.perf_counter()
    model = _load(workload, device, progress)
    loaded = time.perf_counter()
    progress("compiling kernels")
    with clocked(device, "_compile") as compiling:
        model.prepare(workload.batch, workload.seq)
        optimizer = Optimizer(model, OptimConfig(), total_steps(workload.steps))
    prepared = time.perf_counter()
    done = 0

    def stepped() -> None:
        nonlocal done
        done += 1
        progress(f"training: step {done} of {total_steps(workload.steps)}")

    steps = time_steps(model, optimizer, workload.batch, workload.seq, workload.steps, stepped)
    kernels = None
    if has_timestamps(device):
        progress("timing every kernel")
        kernels = time_kernels(model, optimizer, workload.batch, workload.seq, _ROUNDS)
    peak = device.memory.peak
    progress("measuring the GPU's ceilings again")
    # Another program may have slowed the first measurement down.
    with contextlib.suppress(OutOfMemoryError):
        ceilings = ceilings.higher(measure_ceilings(device))
    return Measurement(
        workload=workload,
        device=device,
        ceilings=ceilings,
        load_seconds=loaded - begin,
        prepare_seconds=prepared - loaded,
        compile_seconds=compiling.seconds,
        gaps=gaps,
        steps=steps,
        flops_per_step=model.program("train", workload.batch, workload.seq).plan.flops,
        kernels=kernels,
        planned=planned,
        peak_bytes=peak,
        adapter_parameters=model.adapter.num_parameters,
    )


def time_kernels(
    model: QLoRAModel, optimizer: Optimizer, batch: int, seq: int, rounds: int
) -> list[KernelTime]:
    """Times each launch of a micro-batch and its update alone, which trains the adapter."""
    programs = model.program("train", batch, seq), optimizer._program
    launches = [launch for program in programs for launch in program.plan.launches]
    pieces = [piece for program in programs for piece in program.pieces]
    return sum_up(launches, best_of(pieces, DispatchTimer(model.device), rounds))


def _load(workload: Workload, device: Device, progress: Callable[[str], None]) -> QLoRAModel:
    return QLoRAModel.from_folder(
        workload.shape.folder,
        workload.lora,
        QuantConfig(),
        workload.compute_dtype,
        device,
        name_or_path=workload.shape.name,
        gradient_checkpointing=workload.gradient_checkpointing,
        progress=lambda name: progress(f"loading {name}"),
    )


_LAYERS = (1, 3)  # of two models, whose difference is the time of a layer
_VOCABULARY = 4096  # of both
_TOKENS = 256
_SPEED_ROUNDS = 2


def training_speed(config: Mapping[str, Any], device: Device) -> float:
    """Estimated training speed in tokens per second, from timing a layer and a part of the head."""
    few, more = (_step_seconds({**config, **_part(layers)}, device) for layers in _LAYERS)
    layer = max(more - few, 0.0) / (_LAYERS[1] - _LAYERS[0])
    head = max(few - layer, 0.0) * config["vocab_size"] / _VOCABULARY
    return float(_TOKENS / max(config["num_hidden_layers"] * layer + head, 1e-9))


def _part(layers: int) -> dict[str, int]:
    return {"num_hidden_layers": layers, "vocab_size": _VOCABULARY}


def _step_seconds(config: Mapping[str, Any], device: Device) -> float:
    """The best time of a step, after compilation."""
    model = QLoRAModel.from_folder(
        RandomFolder(config, quant=QuantConfig()),
        LoraConfig(),
        QuantConfig(),
        "bfloat16",
        device,
        name_or_path="a part",
    )
    optimizer = Optimizer(model, OptimConfig(), _SPEED_ROUNDS + 1)
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], (1, _TOKENS))
    checked, load = model.checked(ids, ids), Load(device)
    model.zero_gradient()
    seconds = []
    for step in range(1, _SPEED_ROUNDS + 2):
        load.raise_clock()
        begin = time.perf_counter()
        model.accumulate(*checked)
        optimizer.step(step)
        model.read_stats()  # waits
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])
