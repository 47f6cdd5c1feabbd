"""Forward and backward under a budget of device memory: what was planned, and what it took.

On a software GPU the device's memory is the process's own; what a step takes of the host is the
rest. The first figures are those of the plan, the others measured while it went on.

Usage: python benchmarks/budget.py MODEL --memory 4GiB [--seq 128] [--steps 1] [--no-cache]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import numpy as np

from qlora_wgpu import LoraConfig, QuantConfig
from qlora_wgpu.config.values import parse_bytes
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import fit_to_budget
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel, device_layout
from qlora_wgpu.model.steps import TrainingOptions


def resident() -> dict[str, int]:
    """Bytes of this process's memory by kind, as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    rows = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(rows[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssFile")}


class Watch(threading.Thread):
    """The most that the process takes beside its device."""

    def __init__(self, device: Device) -> None:
        """Begins at once."""
        super().__init__(daemon=True)
        self._device = device
        self.most, self.most_file, self.phase = 0, 0, "loading"
        self.by_phase: dict[str, int] = {}
        self.start()

    def run(self) -> None:
        """Looks fifty times a second."""
        while True:
            taken, there = resident(), self._device.memory.total
            beside = taken["VmRSS"] - there
            self.by_phase[self.phase] = max(self.by_phase.get(self.phase, 0), beside)
            self.most_file = max(self.most_file, taken["RssFile"])
            time.sleep(0.02)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--no-cache", action="store_true")
    options = parser.parse_args()
    budget = parse_bytes(options.memory)
    assert budget is not None
    device = Device(memory=budget)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, lora_dropout=0.0)
    pretrained = Pretrained.open(options.model)
    layout = device_layout(
        pretrained, lora, QuantConfig(), "bfloat16", device, keep=not options.no_cache
    )
    step = TrainingOptions(checkpointing=True).step("train", 1, options.seq)
    fitted = fit_to_budget(layout, step, budget)
    print(fitted.in_words(), flush=True)
    before = resident()["VmRSS"] - device.memory.total
    watch, began = Watch(device), time.process_time()
    model = QLoRAModel(fitted.layout, device, options=TrainingOptions(checkpointing=True))
    loaded = time.process_time() - began
    watch.phase = "compiling"
    model.prepare(1, options.seq)
    ids = np.random.default_rng(0).integers(0, pretrained.architecture.vocab_size, (1, options.seq))
    seconds, losses = [], []
    for index in range(options.steps):
        watch.phase = f"step {index + 1}"
        clock = time.perf_counter()
        model.zero_gradient()
        model.accumulate(*model.checked(ids, ids))
        losses.append(float(model.read_stats()[0]))
        seconds.append(time.perf_counter() - clock)
    gradient = model.read_flat(model.adapter.gradient)
    figures = {
        "layers that come and go": fitted.offload.streamed_layers,
        "device planned MiB": fitted.total / MIB,
        "device peak MiB": device.memory.peak / MIB,
        "host planned MiB": {k: v / MIB for k, v in fitted.host_memory.items()},
        "host planned in all MiB": sum(fitted.host_memory.values()) / MIB,
        "host before MiB": before / MIB,
        "host growth by phase MiB": {k: (v - before) / MIB for k, v in watch.by_phase.items()},
        "files in memory at most MiB": watch.most_file / MIB,
        "loading, CPU s": loaded,
        "steps, s": seconds,
        "loss": [each / (options.seq - 1) for each in losses],
        "gradient's norm": float(np.linalg.norm(gradient)),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
