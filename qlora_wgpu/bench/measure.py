"""The whole measurement of one workload on one device."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from qlora_wgpu.bench.ceilings import Ceilings, measure_ceilings
from qlora_wgpu.bench.gaps import Gaps, measure_gaps
from qlora_wgpu.bench.kernels import KernelTime, sum_up
from qlora_wgpu.bench.step import StepTimes, time_steps, total_steps
from qlora_wgpu.bench.timing import DispatchTimer, best_of, clocked, has_timestamps
from qlora_wgpu.bench.workload import Workload
from qlora_wgpu.config import OptimConfig, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.training.optimizer import Optimizer

_ROUNDS = 3  # the best of so many counts, of each launch


@dataclass(frozen=True)
class Measurement:
    """All that was found.

    Attributes:
        workload: The training steps that ran.
        device: The device they ran on.
        ceilings: The GPU's ceilings.
        load_seconds: From an open device to a model with all weights on it.
        prepare_seconds: Tracing, planning, compiling and binding the step.
        compile_seconds: The part of it in which the driver compiled.
        gaps: What launches cost besides their work.
        steps: Times of the steps.
        flops_per_step: Operations of a step's products.
        kernels: The step's launches by label, the slowest first; None without timestamps.
        planned: Bytes on the device by kind, as planned from config.json.
        peak_bytes: The most that was taken.
        adapter_parameters: Trained numbers.
    """

    workload: Workload
    device: Device
    ceilings: Ceilings
    load_seconds: float
    prepare_seconds: float
    compile_seconds: float
    gaps: Gaps
    steps: StepTimes
    flops_per_step: int
    kernels: list[KernelTime] | None
    planned: Counter[str]
    peak_bytes: int
    adapter_parameters: int

    @property
    def tokens_per_step(self) -> int:
        """Positions of a micro-batch."""
        return self.workload.batch * self.workload.seq

    @property
    def work_seconds(self) -> float | None:
        """Time of a step's launches, without what timestamps show of launches that do nothing."""
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
    """Loads, compiles, trains, and then times every launch by itself.

    Args:
        workload: The training steps to run.
        device: The device to run them on.
        progress: Called with what is going on.

    Raises:
        OutOfMemoryError: If the device has no room.
        DeviceError: If it refuses something else.
        TrainingError: If the loss is not finite.
    """
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
    # Another program may have taken its part of the machine the first time.
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
    """Times each launch of a micro-batch and its update by itself, which trains the adapter.

    Args:
        model: It must have run a micro-batch of this shape.
        optimizer: It must have made a step.
        batch: Rows of the micro-batch.
        seq: Tokens of a row.
        rounds: The best of so many counts, of which the first is at whatever clock the GPU has.

    Raises:
        DeviceError: If the device has no timestamps.
    """
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
