"""What the self-check says of the mutant that is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from campaigns.shader_mutants import Key
from qlora_wgpu.selfcheck.cases import Case
from qlora_wgpu.selfcheck.coverage import covering, statements
from qlora_wgpu.selfcheck.results import DTYPES, _result, _traced, cases_of
from qlora_wgpu.selfcheck.runner import Traced, Tracer

if TYPE_CHECKING:
    from campaigns.mutated_shaders import Group
    from campaigns.tiny_trainings import Training


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
    traced = group.kept("traced", lambda: _traced(group.device, group.profile, group.dtype))
    launches = [launch for plan in training.plans for launch in plan.launches]
    return covering(statements(launches), traced)[0]


def _keys(group: Group, case: Case, dtype: str) -> set[Key]:
    """The variants that a check launches."""

    def traced() -> set[Key]:
        group.load.asked.clear()
        run = Tracer(group.device, group.profile, dtype, in_textures=case.in_textures)
        with suppress(Traced):
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
