"""What a device means for training: how fast it is, or what fits on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.bench.measure import training_speed
from qlora_wgpu.bench.workload import config_of
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.extras import install_command
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.memory import memory_size
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.workload import Target, Workload

_SMALL = "smollm2-135m"
_SEQ = 2048
_SPARE = 0.9  # of a card's memory: drivers and screens take some
_EXAMPLE = 1000 * 200  # tokens: a thousand rows of two hundred
_LLAMA: dict[str, Any] = {**config_of("llama-3.1-8b"), "num_key_value_heads": 8}
# Dimensions alone, of the sizes that people speak of.
_SIZES: Mapping[str, dict[str, Any]] = {
    "70B": {**_LLAMA, "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64},
    "32B": {**_LLAMA, "hidden_size": 5120, "intermediate_size": 27648,
            "num_hidden_layers": 64, "num_attention_heads": 40},
    "14B": {**_LLAMA, "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 48, "num_attention_heads": 40},
    "8B": _LLAMA,
    "1B": config_of("llama-3.2-1b"),
    "0.5B": config_of("qwen2.5-0.5b"),
    "135M": config_of(_SMALL),
}  # fmt: skip


def what_it_means(device: Device) -> str:
    """One or two sentences: of a GPU what fits, of the processor how long training takes."""
    return _of_processor(device) if device.is_cpu else _of_gpu(device)


def of_several(count: int) -> str:
    """A sentence about several GPUs of one machine; empty for one."""
    if count < 2:
        return ""
    return (
        f"This machine has {count} GPUs: `qlora-wgpu train run.yaml cluster.scheduler=local` "
        "trains on all of them, each with the whole base and a share of every step's micro-batches "
        f"({install_command('cluster')})."
    )


def _of_processor(device: Device) -> str:
    speed = training_speed(config_of(_SMALL), device)
    return (
        f"You have no GPU: training runs on the processor, at about {_rounded(speed):,} tokens/s "
        "for a model of 135M parameters (QLoRA, estimated from a few of its layers). A thousand "
        f"rows of 200 tokens take it about {_duration(_EXAMPLE / speed)}."
    )


def _of_gpu(device: Device) -> str:
    size = memory_size(device)
    if size is None:
        return (
            f"You have a GPU, {device.name}, which does not tell its memory: `qlora-wgpu estimate` "
            "says what a model takes."
        )
    largest = largest_model(Target.of(device), int(_SPARE * size))
    fits = f"models of up to {largest}" if largest else "only models of less than 135M"
    return (
        f"You have a GPU, {device.name} with {size / 2**30:,.0f} GiB: QLoRA (rank 16, rows of "
        f"{_SEQ:,} tokens) of {fits} parameters fits. `qlora-wgpu estimate` says what yours takes."
    )


def largest_model(target: Target, room: int) -> str | None:
    """The largest usual size of a Llama that can be trained, checkpointed, in so many bytes."""
    for name, config in _SIZES.items():
        base = Pretrained.from_config(config)
        load = Workload(base, LoraConfig(), QuantConfig(), "bfloat16", 1, _SEQ, True)
        total = target.total(load)
        if total is not None and total <= room:
            return name
    return None


def _rounded(number: float) -> int:
    """Two digits, which is as much as is known."""
    return int(float(f"{max(number, 1.0):.1e}"))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
