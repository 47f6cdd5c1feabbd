"""Tiers leave out cases, never a value or, in the gate, a pair of values."""

from collections import Counter
from itertools import combinations, product

import pytest
from support.tiers import ONE, PAIRS, VALUES, covering

pytest_plugins = ["pytester"]

AXES = [(6, 2, 4), (3, 2, 2, 2), (58, 6, 2), (5,), (1, 1)]


@pytest.mark.parametrize("strength", [VALUES, PAIRS])
@pytest.mark.parametrize("axes", AXES)
def test_every_combination_is_covered_by_few_cases(axes, strength):
    cases = list(product(*map(range, axes)))
    chosen = [cases[index] for index in covering(cases, strength)]
    strength = min(strength, len(axes))
    wanted, met = (
        {pick for case in some for pick in combinations(enumerate(case), strength)}
        for some in (cases, chosen)
    )
    assert met == wanted
    largest = sorted(axes)[-strength:]
    least = largest[0] * largest[1] if strength == PAIRS else largest[0]
    assert least <= len(chosen) <= 1.5 * least


def test_values_are_chosen_alike_often():
    cases = list(product(range(12), "ab", "xyz"))
    chosen = [cases[index] for index in covering(cases, VALUES)]
    assert len(chosen) == 12
    assert Counter(b for _, b, _ in chosen) == {"a": 6, "b": 6}
    assert Counter(c for _, _, c in chosen) == {"x": 4, "y": 4, "z": 4}


def test_cases_need_not_be_a_whole_product():
    cases = [("a", 1), ("a", 2), ("b", 2)]
    assert covering(cases, PAIRS) == [0, 1, 2]
    assert covering(cases, VALUES) == [0, 2]
    assert covering(cases, ONE) == [0]


TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.full
def test_full(): pass

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xy")
@pytest.mark.parametrize("c", "uv")
def test_product(a, b, c): pass

@pytest.mark.cover("all")
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xy")
def test_whole(a, b): pass

@pytest.mark.cover("values")
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xy")
def test_values(a, b): pass

@pytest.mark.cover("values", a=[0, 2])
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xy")
def test_named(a, b): pass

@pytest.fixture
def device(): pass

@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(2))
def test_on_device(device, a, b): pass

@pytest.mark.quick("values")
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(2))
def test_cheap(device, a, b): pass

@pytest.mark.parametrize("profile", range(3))
@pytest.mark.parametrize("b", range(2))
def test_cuts(device, profile, b): pass

@pytest.mark.parametrize("a", range(5))
def test_pure(a): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "counts"),
    [
        (
            "full",
            "plain 1 slow 1 full 1 product 12 whole 6 values 6 named 6 on_device 10 cheap 10 "
            "cuts 6 pure 5",
        ),
        (
            "test",
            "plain 1 slow 1 product 6 whole 6 values 3 named 2 on_device 5 cheap 5 cuts 3 pure 5",
        ),
        ("quick", "plain 1 product 3 whole 6 values 3 named 2 on_device 1 cheap 5 cuts 3 pure 5"),
    ],
)
def test_a_tier_has_its_cases(pytester, tier, counts):
    pytester.makepyfile(TESTS)
    done = pytester.runpytest("-p", "support.tiers", "--tier", tier, "--collect-only", "-q")
    found = [line.partition("::test_")[2] for line in done.outlines if "::test_" in line]
    names = [name.partition("[")[0] for name in found]
    assert " ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names)) == counts


@pytest.mark.slow
def test_a_value_that_no_case_has_is_refused(pytester):
    pytester.makepyfile(TESTS.replace("a=[0, 2]", "a=[0, 7]"))
    done = pytester.runpytest("-p", "support.tiers", "--tier", "test", "--collect-only")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines("*names [[]7], which no case has")


@pytest.mark.slow
def test_expressions_and_names_may_leave_no_case_that_a_marker_names(pytester):
    file = pytester.makepyfile(TESTS)

    def chosen(*given):
        done = pytester.runpytest("-p", "support.tiers", *given, "--collect-only", "-q")
        return [line.partition("::test_")[2] for line in done.outlines if "::test_" in line]

    assert chosen("--tier", "test", "-k", "named and 1- or slow") == ["slow"]
    assert chosen("--tier", "quick", f"{file.name}::test_named[x-1]") == ["named[x-1]"]
    assert chosen("--tier", "quick", f"{file.name}::test_full") == ["full"]
    pytester.makepyfile(test_other=TESTS)
    both = chosen("--tier", "quick", f"{file.name}::test_full", "test_other.py")
    assert both[:2] == ["full", "plain"] and both.count("full") == 1 and "slow" not in both


@pytest.mark.slow
def test_quick_has_of_whole_runs_what_is_marked(pytester):
    pytester.mkdir("e2e")
    plain, marked = "def test_plain(): pass\n", "@pytest.mark.quick\ndef test_marked(): pass\n"
    for name, text in {"test_a": "import nothing\n" + plain, "test_b": plain + marked}.items():
        (pytester.path / "e2e" / f"{name}.py").write_text("import pytest\n" + text)
    done = pytester.runpytest("-p", "support.tiers", "--tier", "quick", "--collect-only", "-q")
    assert [line for line in done.outlines if "::" in line] == ["e2e/test_b.py::test_marked"]
