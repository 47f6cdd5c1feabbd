"""Times the kernels of one layer of the user's model, for several ways of cutting them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qlora_wgpu.bench.random_folder import RandomFolder
from qlora_wgpu.bench.timing import DispatchTimer, best_of, has_timestamps
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.kernels.kernel import Tunable
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import ComputeDtype, QLoRAModel, device_layout
from qlora_wgpu.quant import NF4Tensor, quantize_nf4
from qlora_wgpu.tuning.candidates import bases, candidates, fields_of, tunables_of
from qlora_wgpu.tuning.one_layer import OneLayer

# Each launch is timed so often, and its best counts.
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 3, 20, 0.5
_MOST_TOKENS = 2_048  # of the micro-batch that is timed
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size")  # fmt: skip
Times = list[tuple[Launch, float]]


@dataclass(frozen=True)
class Task:
    """The training that kernels are timed for.

    Attributes:
        config: The model's config.json.
        lora: The adapter.
        quant: How the frozen layers are stored.
        compute_dtype: Type of matmul operands.
        batch: Rows of a micro-batch.
        seq: Tokens of a row.
    """

    config: Mapping[str, Any]
    lora: LoraConfig
    quant: QuantConfig
    compute_dtype: ComputeDtype
    batch: int
    seq: int

    @property
    def sizes(self) -> dict[str, Any]:
        """What config.json says of the layers' shapes, in its text part where it has one."""
        text = self.config.get("text_config")
        part = text if isinstance(text, Mapping) else self.config
        return {name: part.get(name) for name in _SIZES}

    @property
    def timed_batch(self) -> int:
        """Rows that are timed."""
        return max(1, min(self.batch, _MOST_TOKENS // self.seq))


@dataclass(frozen=True)
class Choice:
    """The profile that a tuner chose.

    Attributes:
        profile: The fastest.
        notes: For each family of kernels, what was chosen and what it saves.
    """

    profile: Profile
    notes: tuple[str, ...]


def tune(device: Device, task: Task, progress: Callable[[str], None] = lambda text: None) -> Choice:
    """Times the candidates.

    Args:
        device: One that is used for nothing else, since what is tried stays allocated on it.
        task: The training to time kernels for.
        progress: Called with what is going on.

    Raises:
        OutOfMemoryError: If the device has no room for one layer.
        DeviceError: If it refuses something else.
    """
    default = device.profile
    if not has_timestamps(device):
        return Choice(default, ("the GPU has no timestamps: defaults",))
    part = OneLayer.of(task.config, task.lora)
    folder = _Folder(part, task.quant)
    taken = 0

    def timed(profile: Profile) -> Times:
        nonlocal taken
        taken += 1
        progress(f"timing kernels: variant {taken}")
        return _time(device, task, part, folder, profile)

    whole = [(base, timed(base)) for base in bases(default)]
    base, reference = min(whole, key=lambda pair: _total(pair[1]))
    notes = [_base_note(timing, base) for timing in whole if len(whole) > 1]
    tried = [(base, reference), *((p, timed(p)) for p in candidates(base))]
    chosen: dict[str, Any] = {}
    for tunable in tunables_of(base):
        best, seconds = min(
            ((profile, _seconds(times, tunable)) for profile, times in tried),
            key=lambda pair: pair[1],
        )
        before = _seconds(reference, tunable)
        if before > 0 and seconds < 0.98 * before:  # less is the clock's own scatter
            changed = fields_of(tunable, base, best)
            chosen |= changed
            shown = ", ".join(f"{k} {v}" for k, v in changed.items())
            notes.append(f"{tunable.name}: {shown} ({seconds / before:.0%} of the default's time)")
        else:
            notes.append(f"{tunable.name}: default")
    return Choice(replace(base, **chosen), tuple(notes))


def _base_note(timed: tuple[Profile, Times], chosen: Profile) -> str:
    profile, times = timed
    kind = "textures" if profile.textures else "buffers"
    mark = ", chosen" if profile is chosen else ""
    return f"operands in {kind}: {1e3 * _total(times):.1f} ms a layer{mark}"


def _total(times: Times) -> float:
    return sum(seconds for _, seconds in times)


def _seconds(times: Times, tunable: Tunable) -> float:
    return sum(seconds for launch, seconds in times if tunable.concerns(launch))


class _Folder(RandomFolder):
    """Random weights, quantized once for all candidates."""

    def __init__(self, part: OneLayer, quant: QuantConfig) -> None:
        super().__init__(part.config, part.architecture)
        self._linears = {f"{spec.name}.weight" for spec in part.architecture.every_linear}
        self._quant = quant
        self._quantized: dict[str, NF4Tensor] = {}

    def nf4(self, name: str) -> NF4Tensor | None:
        if self._quant.scheme != "nf4" or name not in self._linears:
            return None
        if name not in self._quantized:
            self._quantized[name] = quantize_nf4(
                self.float32(name), self._quant.blocksize, self._quant.double_quant
            )
        return self._quantized[name]


def _time(
    device: Device, task: Task, part: OneLayer, folder: RandomFolder, profile: Profile
) -> Times:
    device.profile = profile
    base = Pretrained("tuning", part.config, find_family(part.config), part.architecture, folder)
    layout = device_layout(base, part.lora, task.quant, task.compute_dtype, device)
    model = QLoRAModel(layout, device)
    batch = task.timed_batch
    ids = np.random.default_rng(0).integers(0, model.architecture.vocab_size, (batch, task.seq))
    model.zero_gradient()
    model.accumulate(*model.checked(ids, ids))
    model.read_stats()
    program, timer = model.program("train", batch, task.seq), DispatchTimer(device)
    best = best_of(program.dispatches, timer, _LEAST_ROUNDS)
    rounds = min(_MOST_ROUNDS, int(_ENOUGH_SECONDS / max(sum(best), 1e-6)))
    if rounds > _LEAST_ROUNDS:
        again = best_of(program.dispatches, timer, rounds - _LEAST_ROUNDS)
        best = [min(pair) for pair in zip(best, again, strict=True)]
    return list(zip(program.plan.launches, best, strict=True))
