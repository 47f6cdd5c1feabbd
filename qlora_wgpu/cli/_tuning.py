"""Tuning before a run: when it is worth it, and what is shown of it."""

from __future__ import annotations

from rich.console import Console

from qlora_wgpu.config.schema import DeviceConfig
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.tuning.cache import key_of, known_keys, tuned
from qlora_wgpu.tuning.tuner import Task

# Multiply-adds' worth of a few minutes: what tuning may gain in less does not pay for it.
_WORTH = {True: 2e13, False: 2e15}  # by Device.is_cpu


def tune_device(
    console: Console, settings: DeviceConfig, device: Device, task: Task, tokens: int
) -> None:
    """Gives the device the fastest known profile, timing kernels first if the run is long.

    Args:
        console: Where progress and the choice are shown.
        settings: Whether and on which adapter.
        device: Whose profile is set.
        task: What is to be trained.
        tokens: About how many will be computed.
    """
    if settings.tune == "never":
        return
    known = key_of(device, task) in known_keys()
    if settings.tune == "auto" and not known and _work(task, tokens) < _WORTH[device.is_cpu]:
        return

    def another() -> Device:
        return Device(settings.adapter, settings.backend)

    with console.status("timing kernels") as status:
        choice = tuned(device, task, another, status.update)
    console.print(f"kernels as timed on this adapter: {'; '.join(choice.notes)}", highlight=False)


def _work(task: Task, tokens: int) -> float:
    """Operations of the products: two each for the forward and the gradient of their inputs."""
    architecture = find_family(task.config).read(task.config)
    weights = sum(spec.out_features * spec.in_features for spec in architecture.every_linear)
    return 4.0 * tokens * (weights + architecture.vocab_size * architecture.hidden_size)
