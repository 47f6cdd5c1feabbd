"""A pytest plugin that chooses the tests of a tier: quick, test or full.

A test that says nothing is in all three. ``@pytest.mark.slow`` leaves it out of quick, and
``@pytest.mark.full`` out of test as well. Whole runs, in tests/e2e, and what is no part of the
product, in tests/bench, are slow unless they are marked ``@pytest.mark.quick``. Where a test is a
product of several parametrizations, full has all of its cases, test a covering array: each pair of
two arguments' values occurs, or each value if the test computes on a device, where cases are
expensive. In quick each value occurs; tests on a device have one case there, or one for each
``profile`` of kernels.

A test that is named by itself, with ``::``, is run whatever the tier.

``@pytest.mark.cover("values")`` (or ``"pairs"``, ``"all"``) asks for another covering in test, and
``cover(family=["llama"])`` has both smaller tiers take these values of an argument alone;
``quick(family=["llama"])`` has quick do so, and ``quick("values")`` asks for another covering
there, for tests that have a device and compute next to nothing in a case.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest

TIERS = ("quick", "test", "full")
ONE, VALUES, PAIRS, ALL = range(4)
"""How cases are covered: one of them, each value, each pair of values, or every case."""
SLOW = ("e2e", "bench")
"""Folders of tests that are slow unless they say otherwise."""
LEFT_OUT = {"quick": ("slow", "full"), "test": ("full",), "full": ()}
"""Marks of the tests that a tier does not have."""
_COVERS = {"values": VALUES, "pairs": PAIRS, "all": ALL}


def covering(
    cases: Sequence[Sequence[Hashable]], strength: int, axis: int | None = None
) -> list[int]:
    """Chooses cases so that each value, or each pair of values of two axes, occurs.

    Args:
        cases: The value on each axis, by case. They need not be a whole product.
        strength: ONE, VALUES, PAIRS or ALL.
        axis: The only one whose values have to occur; those of all axes by default.

    Returns:
        The indices of the cases chosen, in order. Greedy: the case with the most new combinations
        comes next, of equals the one whose values have been chosen least, then the first.
    """
    if strength == ALL:
        return list(range(len(cases)))
    if strength == ONE or not cases[0]:
        return [0]
    values = [list(enumerate(case)) for case in cases]
    wanted = values if axis is None else [[own[axis]] for own in values]
    met = [set(combinations(own, min(strength, len(own)))) for own in wanted]
    left = set().union(*met)
    used: Counter[tuple[int, Hashable]] = Counter()
    chosen = []
    while left:
        news = [len(own & left) for own in met]
        most = max(news)
        equals = [index for index, new in enumerate(news) if new == most]
        best = min(equals, key=lambda index: sum(used[value] for value in values[index]))
        chosen.append(best)
        left -= met[best]
        used.update(values[best])
    return sorted(chosen)


def _axes(items: Sequence[pytest.Function]) -> dict[str, tuple[int, ...]]:
    """By argument, which object it is in each case; without arguments of one value."""
    names = items[0].callspec.params
    columns = {name: tuple(id(item.callspec.params[name]) for item in items) for name in names}
    return {name: column for name, column in columns.items() if len(set(column)) > 1}


def _named(cases: Sequence[pytest.Function], marker: pytest.Mark | None) -> list[pytest.Function]:
    """The cases whose arguments have values that a marker names."""
    chosen = list(cases)
    for name, values in (marker.kwargs if marker else {}).items():
        chosen = [case for case in chosen if case.callspec.params.get(name) in values]
        left = [v for v in values if all(case.callspec.params[name] != v for case in chosen)]
        if left:
            raise pytest.UsageError(f"{marker} names {left}, which no case has")
    return chosen


def _covered(cases: Sequence[pytest.Function], tier: str) -> Sequence[pytest.Function]:
    """The cases of one test that a smaller tier has."""
    marker = cases[0].get_closest_marker("cover")
    cases = _named(cases, marker)
    quick = cases[0].get_closest_marker("quick") if tier == "quick" else None
    cases = _named(cases, quick)
    axes, axis = _axes(cases), None
    asked = _COVERS[marker.args[0]] if marker and marker.args else None
    on_device = "device" in cases[0].fixturenames
    strength = asked or (ALL if len(axes) < 2 else VALUES if on_device else PAIRS)
    if quick and quick.args:
        strength = _COVERS[quick.args[0]]
    elif tier == "quick" and on_device:
        axis = list(axes).index("profile") if "profile" in axes else None
        strength = ONE if axis is None else VALUES
    elif tier == "quick" and strength != ALL:
        strength = VALUES
    rows = list(zip(*axes.values(), strict=True)) if axes else [()] * len(cases)
    return [cases[index] for index in covering(rows, strength, axis)]


def _kept(items: Sequence[pytest.Item], tier: str) -> Iterator[pytest.Item]:
    tests: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in LEFT_OUT[tier]):
            tests[item.parent.nodeid, getattr(item, "originalname", item.name)].append(item)
    for cases in tests.values():
        yield from _covered(cases, tier) if hasattr(cases[0], "callspec") else cases


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="full", help="how many of the tests to run")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "slow: not in the tier quick",
        "quick(what, **only): in the tier quick, where a folder is not, or which cases it has",
        "full: in the tier full alone",
        "cover(what, **only): which cases the smaller tiers have: values, pairs or all",
    ):
        config.addinivalue_line("markers", line)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Quick does not import the files of slow folders of which it has no test: most of them."""
    slow = collection_path.parent.name in SLOW and collection_path.name.startswith("test_")
    if config.getoption("tier") == "quick" and slow:
        return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list | None:
    """Cases of a test that is left out are not even made, where no test is named by itself."""
    out = LEFT_OUT[collector.config.getoption("tier")]
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    named = any("::" in given for given in collector.config.args)
    return [] if marks & set(out) and not named else None


def _is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether it is asked for by itself, not with its file."""
    own = item.nodeid.partition("::")[2]
    for file, _, name in (given.partition("::") for given in config.args):
        whole = own == name or own.startswith((f"{name}[", f"{name}::"))
        if name and whole and item.path == (config.invocation_params.dir / file).resolve():
            return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before ``-k``, which may leave none of the values that a marker names.

    Kernels' tests come first: workers that share the last tests among them in small parts would
    compile the same kernels at the same time.
    """
    items.sort(key=lambda item: item.path.parent.name != "ops")
    for item in items:
        if item.path.parent.name in SLOW and not item.get_closest_marker("quick"):
            item.add_marker("slow")
    tier = config.getoption("tier")
    if tier == "full":
        return
    named = {item for item in items if _is_named(item, config)}
    kept = named | set(_kept([item for item in items if item not in named], tier))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
