"""Times the kernels of one layer of the user's model, with several tilings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.bench.timing import DispatchTimer, best_of, has_timestamps
from qlora_wgpu.bench.workload import RandomFolder, RandomWeight
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import DeviceError, DeviceLostError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, Profile, plainest
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.kernels import tunables
from qlora_wgpu.kernels.common import Tunable
from qlora_wgpu.kernels.gemm import size_class
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import ComputeDtype, QLoRAModel, device_layout
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4
from qlora_wgpu.tuning.proxy_model import OneLayer


def bases(profile: Profile) -> list[Profile]:
    """Base profiles: the default, and one without textures."""
    return [profile, CPU_PROFILE] if profile.textures else [profile]


def tunables_of(profile: Profile) -> list[Tunable]:
    """The tunables that apply to a profile."""
    return [tunable for tunable in tunables() if tunable.changes(profile)]


def candidates(profile: Profile) -> list[Profile]:
    """Profiles to time: each has one change for every family of kernels.

    Families do not share launches, so one run times a change of each.
    """
    changes = [tunable.changes(profile) for tunable in tunables_of(profile)]
    profiles = []
    for index in range(max(map(len, changes), default=0)):
        merged: dict[str, Any] = {}
        for tried in changes:
            if index < len(tried):
                merged |= tried[index]
        profiles.append(replace(profile, **merged))
    return profiles


def fields_of(tunable: Tunable, base: Profile, profile: Profile) -> dict[str, Any]:
    """A profile's values of the fields that a tunable can change."""
    names = {name for change in tunable.changes(base) for name in change}
    return {name: getattr(profile, name) for name in sorted(names)}


# Each launch is timed this often, and its minimum time counts
_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_SECONDS = 3, 20, 0.5
_MAX_TOKENS = 2_048  # of the micro-batch that is timed
_REPORTED = (
    "gemm_kind", "matrix_tile", "matrix_deep", "tile_group", "gemm_tile", "gemm_group",
    "attention_kind", "attention_strips",
)  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size")  # fmt: skip
_NUDGE = 0.02
# Due to rounding in another order, relative to a gradient's norm
_LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
_NOISE = 0.98  # savings below 2 % are noise


@dataclass(frozen=True)
class Times:
    """The times of a profile for a layer, forward and backward."""

    total: float  # seconds of all launches
    families: Mapping[str, float]  # of families of kernels, by name of the tunable
    products: Mapping[str, float]  # of products, by size class

    def at_pace(self, now: Times, then: Times) -> Times:
        """These times at the clock of ``then``, scaled by the base's times ``now`` and ``then``.

        Each family is scaled separately, since the core clock may change without the memory clock.
        """
        return Times(
            self.total * _pace(now.total, then.total),
            _scaled(self.families, now.families, then.families),
            _scaled(self.products, now.products, then.products),
        )


def _scaled(
    seconds: Mapping[str, float], now: Mapping[str, float], then: Mapping[str, float]
) -> dict[str, float]:
    return {
        name: took * _pace(now.get(name, 0.0), then.get(name, 0.0))
        for name, took in seconds.items()
    }


def _pace(now: float, then: float) -> float:
    return then / now if now > 0.0 and then > 0.0 else 1.0


@dataclass(frozen=True)
class Trial:
    """A profile with its times and gradients, on the host."""

    profile: Profile
    times: Times
    gradients: Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Task:
    """The training step that kernels are timed for."""

    config: Mapping[str, Any]  # the model's config.json
    lora: LoraConfig
    quant: QuantConfig
    compute_dtype: ComputeDtype
    batch: int  # rows of a micro-batch
    seq: int  # tokens of a row

    @property
    def sizes(self) -> dict[str, Any]:
        """The layers' sizes in config.json, or in its text_config."""
        text = self.config.get("text_config")
        part = text if isinstance(text, Mapping) else self.config
        return {name: part.get(name) for name in _SIZES}


@dataclass(frozen=True)
class Choice:
    """The profile that a tuner chose."""

    profile: Profile  # the fastest
    notes: tuple[str, ...]  # the choice for each family of kernels, and its speedup


def tune(device: Device, task: Task, progress: Callable[[str], None] = lambda text: None) -> Choice:
    """Chooses the fastest profile among those whose gradients match the simplest kernels'.

    Candidates that fail to compile, run out of memory or differ are skipped.
    """
    default = device.profile
    if not has_timestamps(device):
        return Choice(default, ("the GPU does not support timestamps: using the defaults",))
    tuning = _Tuning(device, task, progress)
    whole = tuning.tried(dict.fromkeys([*bases(default), plainest(default)]))
    base = whole[0]
    if default.textures:
        base = min(whole, key=lambda trial: trial.times.total)
        tuning.notes += [_base_note(trial, base) for trial in whole if len(whole) > 1]
    trials = [base, *tuning.compared(base, candidates(base.profile))]
    return _chosen(base, trials, tuning.notes)


class _Tuning:
    """Tries profiles on one device, one after another, each freed before the next."""

    def __init__(self, device: Device, task: Task, progress: Callable[[str], None]) -> None:
        self.notes: list[str] = []
        self._device = device
        self._task = task
        self._progress = progress
        self._part = OneLayer.of(task.config, task.lora)
        self._folder = _Folder(self._part, task.quant)
        self._count = 0
        self._expected = self._try(plainest(device.profile))

    def tried(self, profiles: Iterable[Profile]) -> list[Trial]:
        """The trials whose gradients are correct."""
        return self._valid(profiles, self._try)

    def compared(self, base: Trial, profiles: Iterable[Profile]) -> list[Trial]:
        """The trials whose gradients are correct, with times scaled to the base's clock.

        A hot or shared GPU becomes slower, so the base is
        timed again after each trial.
        """

        def compare(profile: Profile) -> Trial:
            trial = self._timed(profile)
            now = self._timed(base.profile, again=True).times
            return replace(trial, times=trial.times.at_pace(now, base.times))

        # A software GPU has no clock of its own, and is slow
        return self._valid(profiles, self._try if self._device.is_cpu else compare)

    def _valid(
        self, profiles: Iterable[Profile], attempt: Callable[[Profile], Trial]
    ) -> list[Trial]:
        trials = []
        for profile in profiles:
            try:
                trial = attempt(profile)
            except DeviceLostError:
                raise
            except DeviceError as err:
                self._skip(profile, str(err))
                continue
            error = difference(trial.gradients, self._expected.gradients)
            if error <= _LARGEST_DIFFERENCE[self._task.compute_dtype]:
                trials.append(trial)
            else:
                self._skip(profile, f"its gradients differ by {error:.0%}")
        return trials

    def _try(self, profile: Profile) -> Trial:
        if self._count and profile == self._expected.profile:
            return self._expected
        return self._timed(profile)

    def _timed(self, profile: Profile, *, again: bool = False) -> Trial:
        self._count += not again
        self._progress(f"timing kernels: variant {self._count}")
        return _time(self._device, self._task, self._part, self._folder, profile)

    def _skip(self, profile: Profile, reason: str) -> None:
        tiling = ", ".join(f"{name} {getattr(profile, name)}" for name in _REPORTED)
        self.notes.append(f"skipped {tiling}: {reason}")


def _chosen(base: Trial, trials: Sequence[Trial], notes: Sequence[str]) -> Choice:
    """The fastest choice of each family of kernels, and for products of each size class."""
    changes: dict[str, Any] = {}
    report = list(notes)
    for tunable in tunables_of(base.profile):
        best = min(trials, key=lambda trial: trial.times.families[tunable.name])
        seconds, before = (t.times.families[tunable.name] for t in (best, base))
        if not 0 < seconds < _NOISE * before:
            best = base
            report.append(f"{tunable.name}: default")
        else:
            changed = fields_of(tunable, base.profile, best.profile)
            changes |= changed
            shown = ", ".join(f"{k} {v}" for k, v in changed.items())
            report.append(f"{tunable.name}: {shown} ({seconds / before:.0%} of the default's time)")
        if tunable.name == "products":
            products = _by_size(tunable, base.profile, best, trials)
            changes["products"] = tuple(products.items())
            report += [f"products {name}: {_shown(v)}" for name, v in products.items()]
    return Choice(replace(base.profile, **changes), tuple(report))


Fields = tuple[tuple[str, Any], ...]


def _by_size(
    tunable: Tunable, base: Profile, usual: Trial, trials: Sequence[Trial]
) -> dict[str, Fields]:
    """Size classes of products for which another profile than the usual one is faster."""
    products: dict[str, Fields] = {}
    for name, before in usual.times.products.items():
        timed = [trial for trial in trials if name in trial.times.products]
        best = min(timed, key=lambda trial: trial.times.products[name])
        if 0 < best.times.products[name] < _NOISE * before:
            products[name] = tuple(fields_of(tunable, base, best.profile).items())
    return products


def _shown(fields: Fields) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields)


def difference(
    gradients: Mapping[str, npt.NDArray[np.float32]],
    expected: Mapping[str, npt.NDArray[np.float32]],
) -> float:
    """The maximum error of a gradient, relative to its norm; infinite for NaN."""
    largest = 0.0
    for name, exact in expected.items():
        norm = max(float(np.linalg.norm(exact)), 1e-30)
        apart = float(np.linalg.norm(gradients[name] - exact)) / norm
        largest = max(largest, apart if math.isfinite(apart) else math.inf)
    return largest


def _base_note(trial: Trial, chosen: Trial) -> str:
    kind = "textures" if trial.profile.textures else "buffers"
    mark = ", chosen" if trial is chosen else ""
    return f"operands in {kind}: {1e3 * trial.times.total:.1f} ms a layer{mark}"


class _Folder(RandomFolder):
    """Random weights, quantized once for all candidates."""

    def __init__(self, part: OneLayer, quant: QuantConfig) -> None:
        super().__init__(part.config, part.architecture)
        self._quant = quant
        self._made: dict[str, QuantizedWeight] = {}

    def find(self, name: str) -> RandomWeight | None:
        weight = super().find(name)
        if weight is None or self._quant.scheme != "nf4" or name not in self._linears:
            return weight
        return RandomWeight(name, weight.shape, partial(self._once, weight))

    def _once(self, weight: RandomWeight) -> QuantizedWeight:
        if weight.name not in self._made:
            self._made[weight.name] = quantize_nf4(
                weight.read(), self._quant.blocksize, self._quant.double_quant
            )
        return self._made[weight.name]


def _time(
    device: Device, task: Task, part: OneLayer, folder: RandomFolder, profile: Profile
) -> Trial:
    device.profile = profile
    base = Pretrained("tuning", part.config, find_family(part.config), part.architecture, folder)
    layout = device_layout(base, part.lora, task.quant, task.compute_dtype, device)
    random = np.random.default_rng(0)
    with QLoRAModel(layout, device) as model:
        batch = max(1, min(task.batch, _MAX_TOKENS // task.seq))
        ids = random.integers(0, model.architecture.text_vocab_size, (batch, task.seq))
        # B is initialized to zero, and A would have no gradient
        start = model.read_flat(model.adapter.parameters)
        model.write_parameters(start + _NUDGE * random.standard_normal(start.size, np.float32))
        model.zero_gradient()
        model.accumulate(*model.checked(ids, ids))
        gradients = model.adapter.split(model.read_flat(model.adapter.gradient))
        program, timer = model.program("train", batch, task.seq), DispatchTimer(device)
        best = best_of(
            program.pieces, timer, _MAX_ROUNDS, least=_MIN_ROUNDS, enough=_ENOUGH_SECONDS
        )
        return Trial(profile, _summed(program.plan.launches, best), gradients)


def _summed(launches: Sequence[Launch], seconds: Sequence[float]) -> Times:
    timed = list(zip(launches, seconds, strict=True))
    families = {
        tunable.name: float(sum(s for launch, s in timed if tunable.concerns(launch)))
        for tunable in tunables()
    }
    return Times(sum(seconds), families, _of_products(timed))


def _of_products(timed: Iterable[tuple[Launch, float]]) -> dict[str, float]:
    """Seconds of each size class of products, including launches that belong to a product."""
    products: dict[str, float] = defaultdict(float)
    ahead: float = 0.0
    for launch, seconds in timed:
        if launch.kernel != "gemm":
            continue
        ahead += seconds
        if "columns" in launch.values:
            sizes = (int(launch.values[name]) for name in ("rows", "columns", "k"))
            products[size_class(launch.path.split("/")[1][:2], *sizes)] += ahead
            ahead = 0.0
    return dict(products)
