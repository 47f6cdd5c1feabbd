"""This project as a participant of benchmarks/gpu_rivals.py."""

from __future__ import annotations

from turns import Answer, Turn, Work, rows_of, serve, timed

from qlora_wgpu import LoraConfig, QLoRAModel, __version__
from qlora_wgpu.bench.workload import find_shape
from qlora_wgpu.config import OptimConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.limits import MIB
from qlora_wgpu.ops.optimizers import STATS_LOSS
from qlora_wgpu.training.optimizer import Optimizer

_STEPS = 1_000_000  # of the schedule, which is constant


def loaded(asked: Answer) -> tuple[Answer, Turn]:
    """Loads the folder that all read."""
    shape, rank = find_shape(asked["folder"]), asked["rank"]
    device = Device(backend=asked["backend"])
    model = QLoRAModel.from_folder(
        shape.folder, LoraConfig(r=rank, lora_alpha=2 * rank), QuantConfig(), "bfloat16", device,
        name_or_path=shape.name,
    )  # fmt: skip
    optimizer = Optimizer(model, OptimConfig(lr_scheduler_type="constant"), _STEPS)
    done = 0
    model.zero_gradient()

    def turn(work: Work) -> Answer:
        rows = rows_of(work, model.architecture.vocab_size)
        checked = model.checked(rows.ids, rows.labels, rows.samples)

        def step() -> float:
            nonlocal done
            done += 1
            tokens = model.accumulate(*checked)
            optimizer.step(done)
            loss = float(model.read_stats()[STATS_LOSS]) / tokens
            model.zero_stats()
            return loss

        return {**timed(step, work), "own_mib": device.memory.peak / MIB}

    about = {
        "versions": {"qlora-wgpu": __version__}, "device": device.name,
        "driver": device.gpu.info["description"],
    }  # fmt: skip
    return about, turn


if __name__ == "__main__":
    serve(loaded)
