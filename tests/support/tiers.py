"""A pytest plugin that chooses the tests of a tier: quick, test or full.

A test that says nothing is in all three. ``@pytest.mark.slow`` leaves it out of quick, and
``@pytest.mark.full`` out of test as well. Where a test is a product of several parametrizations,
full has all of its cases, test a covering array in which each pair of two axes' values occurs, and
quick one in which each value occurs, or a single case if the test computes on a device.
``@pytest.mark.cover("values")`` has test take each value, too, and ``cover("all")`` every case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations

import pytest

TIERS = ("quick", "test", "full")
ONE, VALUES, PAIRS = 0, 1, 2
"""Strengths of a covering: how many axes' values are met in all combinations."""
_COVERS = {"values": VALUES, "pairs": PAIRS, "all": None}


def covering(cases: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """Chooses cases so that each combination of the values of any `strength` axes occurs.

    Args:
        cases: The value on each axis, by case. They need not be a whole product.
        strength: 0 for the first case alone, 1 for each value, 2 for each pair of values.

    Returns:
        The indices of the cases chosen, in order. Greedy: the case with the most new combinations
        comes next, of equals the first.
    """
    if strength == ONE:
        return [0]
    strength = min(strength, len(cases[0]))
    met = [set(combinations(enumerate(case), strength)) for case in cases]
    left = set().union(*met)
    chosen = []
    while left:
        best = max(range(len(cases)), key=lambda index: len(met[index] & left))
        chosen.append(best)
        left -= met[best]
    return sorted(chosen)


def _axes(items: Sequence[pytest.Function]) -> list[tuple[str, ...]]:
    """The cases of a test: by parametrization, the id of its value; those of one value left out."""
    columns = zip(*(item.callspec._idlist for item in items), strict=True)
    moving = [column for column in columns if len(set(column)) > 1]
    return list(zip(*moving, strict=True)) if moving else [()] * len(items)


def _strength(item: pytest.Item, tier: str, axes: int) -> int | None:
    """How the cases of a test are covered in a tier; None for all of them."""
    marker = item.get_closest_marker("cover")
    asked = _COVERS[marker.args[0]] if marker else PAIRS
    if tier == "test":
        return asked if axes > 1 or marker else None
    if "device" in item.fixturenames:
        return ONE
    return VALUES if axes > 1 and (asked is not None) else None


def _kept(items: Sequence[pytest.Item], tier: str) -> Iterator[pytest.Item]:
    out = {"quick": ("slow", "full"), "test": ("full",)}[tier]
    functions: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in out):
            name = getattr(item, "originalname", item.name)
            functions[item.parent.nodeid, name].append(item)
    for cases in functions.values():
        if not hasattr(cases[0], "callspec"):
            yield from cases
            continue
        axes = _axes(cases)
        strength = _strength(cases[0], tier, len(axes[0]))
        if strength is None or not axes[0]:
            yield from cases
        else:
            yield from (cases[index] for index in covering(axes, strength))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=TIERS, default="full", help="which tests: quick, test or full"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "slow: not in the tier quick",
        "full: in the tier full alone",
        "cover(what): which cases of a product the tier test has: values, pairs or all",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("tier")
    if tier == "full":
        return
    kept = set(_kept(items, tier))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
