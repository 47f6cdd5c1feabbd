"""Changes one operator of a shader and looks whether the self-check sees it.

    python -m campaigns.mutated_shaders --count 300 --seed 1

Each mutant runs on one of the profiles that launch its shader, in one type. Where it changes the
training or generation of a tiny model by more than rounding, both ``doctor --check`` and the check
that this very training begins with must refuse it.

    python -m campaigns.mutated_shaders --files preference/ sampling/ --count 50

These files alone, and the checks alone, of every profile until one fails: also for kernels that no
tiny training launches. What no check sees is either no change or a gap, which only a look can tell.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from campaigns.shader_mutants import BARRIER, Key, Loader, Mutant, of_a_file, of_a_statement
from campaigns.tiny_trainings import Training, cases
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.selfcheck import variants
from qlora_wgpu.selfcheck.cases import Case
from qlora_wgpu.selfcheck.results import DTYPES, _result, cases_of, cases_of_launches
from qlora_wgpu.selfcheck.runner import Tracer, TracingDone

_SECONDS = 120.0  # of the processor, after which a mutant counts as one that does not end
_TRAININGS = 4  # that a mutant may take to show that it changes nothing
_OWN_SHARE = 3  # how much more often the device's own kernels are taken

HARMLESS, NO_SHADER, REFUSED = "changes nothing", "does not compile", "refused"
MISSED_BY_DOCTOR, MISSED_BY_TRAIN = "missed by doctor --check", "missed by train"
MISSED_BY_BOTH, ENDLESS, UNREACHED = "missed by both", "does not end", "reached by no training"
BY_NO_CHECK = "seen by no check"
MISSES = (MISSED_BY_DOCTOR, MISSED_BY_TRAIN, MISSED_BY_BOTH)


@dataclass
class Group:
    """Kernels of one profile in one type, and what trains on them."""

    name: str
    device: Device
    profile: Profile
    dtype: str
    load: Loader
    folder: Path
    _kept: dict[Hashable, Any] = field(default_factory=dict)

    def kept(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What is made once, while shaders are right."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @cached_property
    def trainings(self) -> list[Training]:
        """All, traced and not yet run."""
        with self.load.right():
            return [
                Training(c, self.folder / str(i), self.device, self.profile, self.dtype, self.load)
                for i, c in enumerate(cases())
            ]

    @cached_property
    def keys(self) -> set[Key]:
        """All variants that trainings launch."""
        return set().union(*(training.keys for training in self.trainings))

    def changed(self) -> tuple[Training, str] | None:
        """A training that the mutant changes, and what of it."""
        seen: set[Key] = set()
        tried = 0
        for training in self.trainings:
            changed = {key for key in training.keys if self.load.changes(key)}
            if changed <= seen or tried == _TRAININGS:
                continue
            seen, tried = seen | changed, tried + 1
            what = training.changed()
            if what:
                return training, what
        return None


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: str
    kind: str
    group: str
    outcome: str
    detail: str
    seconds: float


class Laboratory:
    """A device and all groups of its kernels."""

    def __init__(self, folder: Path) -> None:
        self.device = Device()
        self.load = Loader()
        self.groups = {
            f"{name}, {dtype}": Group(
                f"{name}, {dtype}", self.device, profile, dtype, self.load, folder
            )
            for name, profile in variants(self.device).items()
            for dtype in ("bfloat16", "float32")
        }

    def drawn(self, seed: int, index: int) -> tuple[Mutant, Group | None]:
        """Mutant ``index`` of a seed, and the group that it runs in; None if none launches it."""
        rng = random.Random(f"{seed} {index}")
        names = list(self.groups)
        shares = [_OWN_SHARE if name.startswith("own") else 1 for name in names]
        order = sorted(names, key=lambda n: -(rng.random() ** (1 / shares[names.index(n)])))
        if rng.random() < 0.6:
            mutant = of_a_file(rng)
        else:
            with self.load.right():
                shaders = [self.load.shader(key) for key in self.groups[order[0]].keys]
            mutant = of_a_statement(rng, shaders)
        with self.load.mutated(mutant):
            for name in order:
                if any(self.load.changes(key) for key in self.groups[name].keys):
                    return mutant, self.groups[name]
        return mutant, None

    def outcome(self, mutant: Mutant, group: Group | None) -> tuple[str, str]:
        """What becomes of a mutant in a group, and a remark."""
        if group is None:
            return UNREACHED, ""
        with self.load.mutated(mutant):
            try:
                changed = group.changed()
            except DeviceError as err:
                return NO_SHADER, str(err).splitlines()[-1]
            except Exception as err:
                return NO_SHADER, f"{type(err).__name__} {str(err).splitlines()[-1]}"
            if changed is None:
                return HARMLESS, ""
            training, what = changed
            doctor, train = seen_by_doctor(group), seen_by_train(group, training)
        detail = f"{training.case.family}: {what}; doctor: {doctor or '-'}; train: {train or '-'}"
        if doctor and train:
            return REFUSED, detail
        missed = MISSED_BY_TRAIN if doctor else MISSED_BY_DOCTOR if train else MISSED_BY_BOTH
        return missed, detail

    def checked(self, seed: int, index: int, files: tuple[str, ...]) -> Outcome:
        """Draws a mutant of some files and runs the checks until one sees it."""
        begin = time.monotonic()
        mutant = of_a_file(random.Random(f"{seed} {index}"), files)
        outcome, name, detail = UNREACHED, "", ""
        with self.load.mutated(mutant):
            for group in self.groups.values():
                if not any(self.load.changes(key) for key in launched_by_checks(group)):
                    continue
                outcome, name = BY_NO_CHECK, group.name
                detail = seen_by_doctor(group, others=False)
                if detail:
                    outcome = REFUSED
                    break
        return Outcome(str(mutant), mutant.kind, name, outcome, detail, time.monotonic() - begin)

    def examine(self, seed: int, index: int) -> Outcome:
        """Draws a mutant and runs it."""
        begin = time.monotonic()
        mutant, group = self.drawn(seed, index)
        outcome, detail = self.outcome(mutant, group)
        name = group.name if group is not None else ""
        return Outcome(str(mutant), mutant.kind, name, outcome, detail, time.monotonic() - begin)


def _work(pipe: Connection, seed: int, files: tuple[str, ...]) -> None:
    """A process of its own, since a shader that does not end cannot be stopped otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder))
        with laboratory.load.installed():
            while (index := pipe.recv()) is not None:
                if files:
                    pipe.send(laboratory.checked(seed, index, files))
                else:
                    pipe.send(laboratory.examine(seed, index))


class Worker:
    """The process that examines, replaced when it hangs."""

    def __init__(self, seed: int, files: tuple[str, ...] = ()) -> None:
        self._seed, self._files = seed, files
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(
            target=_work, args=(end, self._seed, self._files), daemon=True
        )
        self._process.start()
        end.close()

    def examine(self, index: int) -> Outcome:
        """The outcome of a mutant."""
        self._pipe.send(index)
        begin = self._processor_seconds()
        try:
            while self._processor_seconds() - begin < _SECONDS:
                if self._pipe.poll(2):
                    outcome: Outcome = self._pipe.recv()
                    return outcome
        except EOFError:
            pass
        self._process.kill()
        self._process.join()
        self._start()
        return Outcome(f"number {index}", "", "", ENDLESS, "", _SECONDS)

    def _processor_seconds(self) -> float:
        """What the process has used: other work on the machine does not count."""
        text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends it."""
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def seen_by_doctor(group: Group, *, others: bool = True) -> str:
    """The check of ``doctor --check`` that fails; or nothing.

    Args:
        group: Whose profile's checks are run.
        others: Whether those in the other type are, too.
    """
    for dtype in sorted(DTYPES, key=lambda dtype: dtype != group.dtype):
        if dtype != group.dtype and not others:
            continue
        with group.load.right():
            cases = group.kept(("doctor", dtype), lambda d=dtype: _doctors(group, d))
        if failing := _failing(group, cases, dtype):
            return failing
    return ""


def seen_by_train(group: Group, training: Training) -> str:
    """The check that this training begins with and that fails; or nothing."""
    with group.load.right():
        cases = group.kept(("train", training.case), lambda: _trains(group, training))
    return _failing(group, cases, group.dtype)


def _doctors(group: Group, dtype: str) -> list[Case]:
    return cases_of(group.device, group.profile, dtype)


def _trains(group: Group, training: Training) -> list[Case]:
    launches = [launch for plan in training.plans for launch in plan.launches]
    return cases_of_launches(group.device, group.profile, group.dtype, launches)


def _keys(group: Group, case: Case, dtype: str) -> set[Key]:
    """The variants that a check launches."""

    def traced() -> set[Key]:
        group.load.asked.clear()
        run = Tracer(group.device, group.profile, dtype, in_textures=case.in_textures)
        with suppress(TracingDone):
            case.function(run, *case.arguments)
        return set(group.load.asked)

    with group.load.right():
        return group.kept((case, dtype), traced)


def launched_by_checks(group: Group) -> set[Key]:
    """The variants that the checks of a group's profile launch in its type."""

    def all_keys() -> set[Key]:
        return set().union(*(_keys(group, case, group.dtype) for case in cases))

    with group.load.right():
        cases = group.kept(("doctor", group.dtype), lambda: _doctors(group, group.dtype))
        return group.kept("launched by checks", all_keys)


def _failing(group: Group, cases: Iterable[Case], dtype: str) -> str:
    """The first of these checks that the mutant fails."""
    for case in cases:
        if any(group.load.changes(key) for key in _keys(group, case, dtype)):
            result = _result(group.device, [case], group.name, group.profile, dtype)
            if not result.good:
                what = result.refusal[:60] or f"{result.error:.1e}, {result.excess:.1f} allowed"
                return f"{case.check}{case.arguments} {what}"
    return ""


def campaign(
    indices: Sequence[int], seed: int, seconds: float, files: tuple[str, ...] = ()
) -> list[Outcome]:
    """Runs mutants, of all files or of some, one after another and shows what becomes of them."""
    worker, outcomes = Worker(seed, files), []
    end = time.monotonic() + seconds
    try:
        for index in indices:
            if time.monotonic() > end:
                break
            outcome = worker.examine(index)
            outcomes.append(outcome)
            print(f"{index} {outcome.outcome} [{outcome.group}] {outcome.mutant} "
                  f"| {outcome.detail} | {outcome.seconds:.1f} s", flush=True)  # fmt: skip
    finally:
        worker.close()
    return outcomes


def main() -> int:
    """Runs the campaign; 1 if a mutant that changes training was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some mutants")
    parser.add_argument("--files", nargs="*", default=[], help="the beginnings of files' names")
    options = parser.parse_args()
    indices = options.only or range(options.count)
    outcomes = campaign(indices, options.seed, options.seconds, tuple(options.files))
    for barrier in (False, True):
        counted = Counter(o.outcome for o in outcomes if (o.kind == BARRIER) == barrier)
        print("barriers removed:" if barrier else "mutants:", sum(counted.values()))
        for name, number in counted.most_common():
            print(f"  {number:4d} {name}")
    return int(any(o.outcome in MISSES and o.kind != BARRIER for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
