"""Times the kernels of one layer of the user's model, in several configurations."""

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
    """Profiles that differ in all kernels: the default, and the same without textures."""
    return [profile, CPU_PROFILE] if profile.textures else [profile]


def tunables_of(profile: Profile) -> list[Tunable]:
    """The choices that a tuner has about a profile."""
    return [tunable for tunable in tunables() if tunable.changes(profile)]


def candidates(profile: Profile) -> list[Profile]:
    """Profiles to time: each changes one thing about every family of kernels at once.

    The families do not share launches, so one run times a change of each.
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
    """A profile's values of the fields that a tunable may change about its base."""
    names = {name for change in tunable.changes(base) for name in change}
    return {name: getattr(profile, name) for name in sorted(names)}


# Each launch is timed this often, and its best time counts.
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 3, 20, 0.5
_MOST_TOKENS = 2_048  # of the micro-batch that is timed
_TOLD = (
    "gemm_kind", "matrix_tile", "matrix_deep", "tile_group", "gemm_tile", "gemm_group",
    "attention_kind", "attention_strips",
)  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "head_dim", "vocab_size")  # fmt: skip
_NUDGE = 0.02
# Roundings of results to their type, in another order: a share of a gradient's norm.
_LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
_NOISE = 0.98  # what saves less than this leaves is the clock's own scatter


@dataclass(frozen=True)
class Times:
    """The times of a configuration for a layer, forward and backward."""

    total: float  # seconds of all launches
    families: Mapping[str, float]  # of the families of kernels, by the names of their tunables
    products: Mapping[str, float]  # of products, by the class of their sizes

    def at_pace(self, now: Times, then: Times) -> Times:
        """These times corrected to an earlier pace, by what the base took ``now`` and ``then``.

        Each family is corrected by itself: the processors' clock may fall without the memory's.
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
    """A profile with its times and the gradients that it computed, all on the host."""

    profile: Profile
    times: Times
    gradients: Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Task:
    """The training that kernels are timed for."""

    config: Mapping[str, Any]  # the model's config.json
    lora: LoraConfig
    quant: QuantConfig
    compute_dtype: ComputeDtype
    batch: int  # rows of a micro-batch
    seq: int  # tokens of a row

    @property
    def sizes(self) -> dict[str, Any]:
        """The layers' shapes by config.json, or by its text part where it has one."""
        text = self.config.get("text_config")
        part = text if isinstance(text, Mapping) else self.config
        return {name: part.get(name) for name in _SIZES}

    @property
    def timed_batch(self) -> int:
        """Rows that are timed."""
        return max(1, min(self.batch, _MOST_TOKENS // self.seq))


@dataclass(frozen=True)
class Choice:
    """The profile that a tuner chose."""

    profile: Profile  # the fastest
    notes: tuple[str, ...]  # for each family of kernels, what was chosen and what it saves


def tune(device: Device, task: Task, progress: Callable[[str], None] = lambda text: None) -> Choice:
    """Times the candidates whose gradients are those of the plainest kernels.

    What a driver does not compile, has no memory for or computes wrongly is left out.
    """
    default = device.profile
    if not has_timestamps(device):
        return Choice(default, ("the GPU has no timestamps: defaults",))
    tuning = _Tuning(device, task, progress)
    whole = tuning.tried(dict.fromkeys([*bases(default), plainest(default)]))
    base = whole[0]
    if default.textures:
        base = min(whole, key=lambda trial: trial.times.total)
        tuning.notes += [_base_note(trial, base) for trial in whole if len(whole) > 1]
    trials = [base, *tuning.tried_beside(base, candidates(base.profile))]
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
        """The trials whose gradients are right."""
        return self._right(profiles, self._try)

    def tried_beside(self, base: Trial, profiles: Iterable[Profile]) -> list[Trial]:
        """The trials whose gradients are right, with times corrected to the base's pace.

        A GPU that gets hot lowers its clock, and one that others use gets slower: so the base is
        timed again after each.
        """

        def beside(profile: Profile) -> Trial:
            trial = self._timed(profile)
            now = self._timed(base.profile, again=True).times
            return replace(trial, times=trial.times.at_pace(now, base.times))

        # A software GPU has no clock of its own, and takes its time.
        return self._right(profiles, self._try if self._device.is_cpu else beside)

    def _right(
        self, profiles: Iterable[Profile], attempt: Callable[[Profile], Trial]
    ) -> list[Trial]:
        trials = []
        for profile in profiles:
            try:
                trial = attempt(profile)
            except DeviceLostError:
                raise
            except DeviceError as err:
                self._leave_out(profile, str(err))
                continue
            error = difference(trial.gradients, self._expected.gradients)
            if error <= _LARGEST_DIFFERENCE[self._task.compute_dtype]:
                trials.append(trial)
            else:
                self._leave_out(profile, f"its gradients are {error:.0%} off")
        return trials

    def _try(self, profile: Profile) -> Trial:
        if self._count and profile == self._expected.profile:
            return self._expected
        return self._timed(profile)

    def _timed(self, profile: Profile, *, again: bool = False) -> Trial:
        self._count += not again
        self._progress(f"timing kernels: variant {self._count}")
        return _time(self._device, self._task, self._part, self._folder, profile)

    def _leave_out(self, profile: Profile, reason: str) -> None:
        cut = ", ".join(f"{name} {getattr(profile, name)}" for name in _TOLD)
        self.notes.append(f"left out {cut}: {reason}")


def _chosen(base: Trial, trials: Sequence[Trial], notes: Sequence[str]) -> Choice:
    """The best of each family of kernels, and of products those of each class of sizes."""
    changes: dict[str, Any] = {}
    told = list(notes)
    for tunable in tunables_of(base.profile):
        best = min(trials, key=lambda trial: trial.times.families[tunable.name])
        seconds, before = (t.times.families[tunable.name] for t in (best, base))
        if not 0 < seconds < _NOISE * before:
            best = base
            told.append(f"{tunable.name}: default")
        else:
            changed = fields_of(tunable, base.profile, best.profile)
            changes |= changed
            shown = ", ".join(f"{k} {v}" for k, v in changed.items())
            told.append(f"{tunable.name}: {shown} ({seconds / before:.0%} of the default's time)")
        if tunable.name == "products":
            products = _by_size(tunable, base.profile, best, trials)
            changes["products"] = tuple(products.items())
            told += [f"products {name}: {_shown(cut)}" for name, cut in products.items()]
    return Choice(replace(base.profile, **changes), tuple(told))


Fields = tuple[tuple[str, Any], ...]


def _by_size(
    tunable: Tunable, base: Profile, usual: Trial, trials: Sequence[Trial]
) -> dict[str, Fields]:
    """Classes of products for which another configuration than the usual one is faster."""
    products: dict[str, Fields] = {}
    for name, before in usual.times.products.items():
        with_it = [trial for trial in trials if name in trial.times.products]
        best = min(with_it, key=lambda trial: trial.times.products[name])
        if 0 < best.times.products[name] < _NOISE * before:
            products[name] = tuple(fields_of(tunable, base, best.profile).items())
    return products


def _shown(fields: Fields) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields)


def difference(
    gradients: Mapping[str, npt.NDArray[np.float32]],
    expected: Mapping[str, npt.NDArray[np.float32]],
) -> float:
    """How far gradients are off: of one tensor at most, relative to its norm; NaN is infinite."""
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
        batch = task.timed_batch
        ids = random.integers(0, model.architecture.vocab_size, (batch, task.seq))
        # B begins as zeros, with which A would have no gradient.
        start = model.read_flat(model.adapter.parameters)
        model.write_parameters(start + _NUDGE * random.standard_normal(start.size, np.float32))
        model.zero_gradient()
        model.accumulate(*model.checked(ids, ids))
        gradients = model.adapter.split(model.read_flat(model.adapter.gradient))
        program, timer = model.program("train", batch, task.seq), DispatchTimer(device)
        best = best_of(
            program.pieces, timer, _MOST_ROUNDS, least=_LEAST_ROUNDS, enough=_ENOUGH_SECONDS
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
    """Seconds of each class of products; what is measured ahead of a product is part of it."""
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
