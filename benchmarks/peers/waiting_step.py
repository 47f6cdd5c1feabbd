"""Times steps of qlora-wgpu whenever it is asked to; run by benchmarks/checkouts.py.

What the model is comes as one JSON object on stdin, then a line for each measurement: ``steps N``
or ``kernels``. Every answer is one JSON object on a line of stdout.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import qlora_wgpu
from qlora_wgpu import LoraConfig, QLoRAModel
from qlora_wgpu.bench.measure import time_kernels
from qlora_wgpu.bench.timing import time_steps, total_steps
from qlora_wgpu.bench.workload import find_shape
from qlora_wgpu.config import OptimConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.training.optimizer import Optimizer

_KERNEL_ROUNDS = 3  # the best of so many counts, of each launch


def _answer(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    batch, seq = asked["batch"], asked["seq"]
    shape = find_shape(asked["shape"])
    device = Device(asked["gpu"], asked["backend"])
    model = QLoRAModel.from_folder(
        shape.folder, LoraConfig(r=asked["rank"], lora_alpha=2 * asked["rank"]), QuantConfig(),
        asked["dtype"], device, name_or_path=shape.name,
        gradient_checkpointing=asked["checkpointing"],
    )  # fmt: skip
    model.prepare(batch, seq)
    optimizer = Optimizer(model, OptimConfig(), total_steps(asked["steps"]))
    launches = model.program("train", batch, seq).plan.launches
    _answer({
        "package": qlora_wgpu.__file__, "device": device.name, "backend": device.backend.name,
        "driver": device.gpu.info["description"], "launches": len(launches),
    })  # fmt: skip
    for line in sys.stdin:
        what, *number = line.split()
        if what == "steps":
            times = time_steps(model, optimizer, batch, seq, int(number[0]))
            peak = device.memory.peak / 2**20
            seconds = times.step_seconds.median
            _answer({"seconds": seconds, "loss": times.loss, "device_mib": peak})
        else:
            rows = time_kernels(model, optimizer, batch, seq, _KERNEL_ROUNDS)
            _answer({row.label: [row.launches, row.seconds] for row in rows})


if __name__ == "__main__":
    main()
