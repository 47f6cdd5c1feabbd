"""What a card does beside plain steps: texts, answers compared, and a budget of its memory.

usage: python benchmarks/gpu_others.py OUT SHAPE [--backend NAME] [--seq N] [--steps N]
           [--texts N ...] [--only texts|dpo|budget ...]

OUT.jsonl gets a row a measurement: tokens a second of new tokens, with the bytes that their
launches read and write, several texts at a time; steps of DPO on a pair of rows, beside plain steps
of the same rows; and a step under a budget of half of what it would take, or the first of SHARES
that is enough, with what the driver gave away meanwhile (nvidia-smi) beside what was counted here.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from generate import launches_of_a_turn, measured
from gpu_rows import Rows

from qlora_wgpu import LoraConfig, QuantConfig
from qlora_wgpu.bench.timing import Load
from qlora_wgpu.bench.workload import Shape, find_shape
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.generation import Engine
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import fit_to_budget
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel, device_layout
from qlora_wgpu.model.steps import PreferenceInputs, TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.preference import Preference

KINDS = ("texts", "dpo", "budget")
_LORA = LoraConfig(r=8, lora_alpha=16)
_PROMPT, _ROOM = 64, 128
_WARM_UP = 2
SHARES = (0.5, 0.7, 0.9)


def model_of(shape: Shape, device: Device) -> QLoRAModel:
    return QLoRAModel.from_folder(
        shape.folder, _LORA, QuantConfig(), "bfloat16", device, name_or_path=shape.name
    )


def texts_at_once(model: QLoRAModel, texts: int) -> dict[str, Any]:
    """New tokens a second of so many texts, and the bytes a second of their launches."""
    engine = Engine(model, texts, _ROOM)
    prompt = (np.arange(_PROMPT) * 37 % model.architecture.vocab_size).tolist()
    load, runs = Load(model.device), []
    for _ in range(3):
        load.raise_clock()
        runs.append(measured(engine, prompt))
    rate = max(run["tokens_per_second"] for run in runs)
    launches = launches_of_a_turn(engine)
    nbytes = sum(launch.nbytes for launch in launches)
    return {
        "tokens_per_second": rate,
        "launches": len(launches),
        "mib_a_turn": nbytes / MIB,
        "bytes_per_second": nbytes * rate / texts,
    }


def seconds_of(work: Callable[[], None], model: QLoRAModel, steps: int) -> float:
    """The median of some micro-batches' times."""
    times, load = [], Load(model.device)
    for step in range(steps + _WARM_UP):
        if step == _WARM_UP:
            load.raise_clock()
        begin = time.perf_counter()
        work()
        model.read_stats()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_WARM_UP:])


def pair(model: QLoRAModel, seq: int, steps: int, *, compared: bool) -> dict[str, Any]:
    """A micro-batch of two rows whose second halves are answers."""
    ids = np.random.default_rng(1).integers(0, model.architecture.vocab_size, (2, seq))
    targets = ids.copy()
    targets[:, : seq // 2] = IGNORE_INDEX
    objective = Objective(preference=Preference("dpo", "sigmoid")) if compared else Objective()
    samples = PreferenceInputs.plain(2) if compared else None
    model.options = TrainingOptions(objective=objective)
    checked = model.checked(ids, targets)
    model.zero_gradient()
    seconds = seconds_of(lambda: model.accumulate(*checked, samples=samples), model, steps)
    return {"seconds": seconds, "tokens_per_second": 2 * seq / seconds}


def under_a_budget(shape: Shape, backend: str, seq: int) -> dict[str, Any]:
    """A checkpointed step with half of the memory that it would take."""
    options, before = TrainingOptions(checkpointing=True), driver_mib()
    pretrained = Pretrained.from_folder(shape.folder, shape.name)
    device = Device(backend=backend)
    layout = device_layout(pretrained, _LORA, QuantConfig(), "bfloat16", device)
    whole = sum(layout.memory(options.step("train", 1, seq)).values())
    for share in SHARES:
        budget = int(share * whole)
        device = Device(backend=backend, memory=budget)
        layout = device_layout(pretrained, _LORA, QuantConfig(), "bfloat16", device, keep=True)
        try:
            fitted = fit_to_budget(layout, options.step("train", 1, seq), budget)
        except OutOfMemoryError:
            if share == SHARES[-1]:
                raise
        else:
            break
    model = QLoRAModel(fitted.layout, device, options=options)
    model.prepare(1, seq)
    checked = model.checked(*2 * [np.arange(seq)[None] % model.architecture.vocab_size])
    model.zero_gradient()
    seconds = seconds_of(lambda: model.accumulate(*checked), model, 3)
    after = driver_mib()
    return {
        "seconds": seconds,
        "whole_mib": whole / MIB,
        "budget_mib": budget / MIB,
        "planned_mib": fitted.total / MIB,
        "peak_mib": device.memory.peak / MIB,
        "driver_mib": None if before is None or after is None else after - before,
        "streamed_layers": fitted.offload.streamed_layers,
    }


def driver_mib() -> float | None:
    """What the driver has given away on the card, where nvidia-smi tells it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(
            subprocess.run(query, capture_output=True, timeout=20, encoding="utf-8").stdout
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("shape")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--texts", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    shape, rows = find_shape(args.shape), Rows(Path(f"{args.out}.jsonl"))
    if "budget" in args.only:  # before anything else takes memory
        rows.measure("budget", lambda: under_a_budget(shape, args.backend, args.seq))
    if {"texts", "dpo"} & set(args.only):
        model = model_of(shape, Device(backend=args.backend))
    if "texts" in args.only:
        for texts in args.texts:
            rows.measure(f"texts {texts}", lambda texts=texts: texts_at_once(model, texts))
    if "dpo" in args.only:
        for name, compared in (("plain pair", False), ("dpo pair", True)):
            rows.measure(
                name, lambda compared=compared: pair(model, args.seq, args.steps, compared=compared)
            )


if __name__ == "__main__":
    main()
