"""Mutants follow from their seed, change one place each, and meet the nearest tests first."""

import ast
import random
from contextlib import contextmanager
from pathlib import Path

import pytest

from campaigns.python_mutants import of_a_module
from tools import mutants as tool
from tools.mutants import KINDS, ROOT, Nearness, drawn, failed_test, kind_of, room_of, rooms

pytestmark = pytest.mark.slow

SOURCE = """
import typing
if typing.TYPE_CHECKING: x: int = 1

def f(a: int = 3, *, log: bool | None = None) -> "list[int] | None":
    '''Text of 5.'''
    if a < 4 and not log:
        raise ValueError(
            f"{a + 1} is small"
        )
    for each in "äöü"[a:]:
        if each == "ä": continue
        print(each)
    return a // 2 - 1
"""
# Where each kind of change stands and what it makes of it.
CHANGES = {
    ("def f(a: int = 4, *, log: bool | None = None) -> ", "another constant"),
    ("if a <= 4 and not log:", "< to <="), ("if a > 4 and not log:", "< to >"),
    ("if a < 5 and not log:", "another constant"), ("if a < 4 or not log:", "and to or"),
    ("if a < 4 and log:", "not removed"), ("if 0: raise ValueError(", "raise removed"),
    ('for each in "äöü"[(a) + 1:]:', "bound off by one"),
    ('if each != "ä": continue', "== to !="), ('if each == "ä": break', "continue to break"),
    ("if 0: print(each)", "call removed"), ("return None", "None returned"),
    ("return a * 2 - 1", "// to *"), ("return a // 3 - 1", "another constant"),
    ("return a // 2 + 1", "- to +"), ("return a // 2 - 2", "another constant"),
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def mutants():
    return drawn(2 * max(len(rooms(kind)) for kind in KINDS), seed=7)


def test_python_offers_each_change_and_none_of_texts_and_annotations(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(SOURCE, encoding="utf-8")
    rng = random.Random(0)
    found = {of_a_module(rng, tmp_path, [path]) for _ in range(400)}
    changes = {(each.after.strip().partition('"list')[0], each.kind) for each in found}
    assert changes == CHANGES
    assert len(found) == len(CHANGES)


def test_mutants_follow_from_their_seed(mutants):
    assert drawn(6, seed=7) == mutants[:6]
    assert drawn(6, seed=8) != mutants[:6]
    assert len(set(mutants)) == len(mutants)


def test_every_room_is_drawn(mutants):
    for kind in KINDS:
        own = [room_of(each) for n, each in enumerate(mutants, 1) if kind_of(n) == kind]
        assert set(own[: len(rooms(kind))]) == set(rooms(kind))


def test_each_changes_one_line_and_python_stays_python(mutants):
    for each in mutants:
        text = (ROOT / each.path).read_text(encoding="utf-8")
        changed = each.source(each.path, text)
        before, after = text.split("\n"), changed.split("\n")
        differing = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert differing == [each.line]
        if each.path.endswith(".py"):
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


FILES = {
    "qlora_wgpu/__init__.py": "",
    "qlora_wgpu/ops/__init__.py": "",
    "qlora_wgpu/ops/norm.py": "launch('norm/forward.wgsl')",
    "qlora_wgpu/ops/tile.py": "launch(f'tile/{name}_{kind}.wgsl')",
    "qlora_wgpu/model.py": "from qlora_wgpu.ops.norm import norm",
    "qlora_wgpu/verbs.py": "import importlib; importlib.import_module(name)",
    "qlora_wgpu/__main__.py": "from qlora_wgpu import verbs",
    "shaders/norm/forward.wgsl": "//#include common/sum.wgsl",
    "shaders/tile/a_b.wgsl": "",
    "shaders/common/sum.wgsl": "",
    "tests/support/bench.py": "import qlora_wgpu.model",
    "tests/ops/test_norm.py": "from support.bench import bench",
    "tests/ops/test_all.py": "import qlora_wgpu.ops.norm, qlora_wgpu.ops.tile",
    "tests/ops/test_tile.py": "",
    "tests/e2e/test_model.py": "from qlora_wgpu import model",
    "tests/e2e/test_command.py": "run('-m', 'qlora_wgpu')",
    "tests/unit/test_other.py": "",
}
NEAREST = {
    "qlora_wgpu/ops/norm.py": [
        "ops/test_norm",
        "ops/test_all",
        "e2e/test_model",
        "e2e/test_command",
    ],
    "qlora_wgpu/verbs.py": ["e2e/test_command"],
    "qlora_wgpu/model.py": ["e2e/test_model", "ops/test_norm", "e2e/test_command"],
    "shaders/common/sum.wgsl": [
        "ops/test_all",
        "e2e/test_model",
        "ops/test_norm",
        "e2e/test_command",
    ],
    "shaders/norm/forward.wgsl": ["ops/test_norm", "ops/test_all", "e2e/test_model"],
    "shaders/tile/a_b.wgsl": ["ops/test_tile", "ops/test_all"],
}


@pytest.mark.parametrize("path", NEAREST)
def test_the_test_of_its_name_comes_first_then_by_what_uses_it(checkout: Path, path: str) -> None:
    tests = [name for name in FILES if "/test_" in name]
    nearest = Nearness(checkout).nearest(path, tests)
    assert sorted(nearest) == sorted(tests)
    names = [name.removeprefix("tests/").removesuffix(".py") for name in nearest]
    assert names[: len(NEAREST[path])] == NEAREST[path]


@pytest.mark.parametrize(
    ("said", "test", "how"),
    [
        ("a/test_a.py::test_x PASSED\na/test_a.py::test_y[c - d] FAILED\n", "y[c - d]", "failed"),
        ("a/test_a.py::test_x[FAILED] PASSED\na/test_a.py::test_y PASSED\n"
         "a/test_a.py::test_y ERROR\n", "y", "failed"),
        ("a/test_a.py::test_x \na/test_a.py::test_y[c d] \n[gw0] PASSED a/test_a.py::test_x \n"
         "[gw1] FAILED a/test_a.py::test_y[c d] \n", "y[c d]", "failed"),
        ("a/test_a.py::test_x PASSED\na/test_a.py::test_y +++++ Timeout +++++\n", "y", "hung"),
        ("a/test_a.py::test_x PASSED\na/test_a.py::test_y Timeout (0:15:00)!\n", "y", "hung"),
        ("a/test_a.py::test_x PASSED\na/test_a.py::test_y[c d] ", "y[c d]", "died"),
        ("a/test_a.py::test_y[c d] Fatal Python error: Aborted\n\nThread 0x1:\n", "y[c d]", "died"),
    ],
)  # fmt: skip
def test_the_test_to_blame_is_read_off_what_pytest_says(said, test, how):
    assert failed_test(said) == (f"a/test_a.py::test_{test}", how)


def test_a_file_that_cannot_be_collected_is_to_blame_and_nothing_is_where_none_began():
    collected = "=== short test summary info ===\nERROR a/test_a.py - ModuleNotFoundError: b\n"
    assert failed_test(collected) == ("a/test_a.py", "failed")
    assert failed_test("ImportError while loading conftest 'conftest.py'.\n") == ("", "died")


class Answers:
    """Stands in for a copy: which test each file fails, with the mutant or also without."""

    def __init__(self, failing, red, slow=()):
        self.failing_of, self.red, self.slow, self.is_mutated = failing, red, slow, False

    @contextmanager
    def mutated(self, mutant):
        self.is_mutated = True
        yield
        self.is_mutated = False

    def failing(self, given, *options, patience=1):
        if not self.is_mutated:
            fails = given[0] in self.red or (given[0] in self.slow and patience == 1)
            return (given[0], "hung") if fails else ("", "")
        assert options[:2] == ("--tier", "quick")  # whatever one was run with alone
        for file in given:
            for test in self.failing_of.get(file, []):
                if f"--deselect={test}" not in options:
                    return test, "hung" if test in self.slow else "failed"
        return "", ""


NORM, ALL = "tests/ops/test_norm.py", "tests/ops/test_all.py"


@pytest.mark.parametrize(
    ("tests", "caught_by", "red"),
    [
        (Answers({}, ()), "", set()),
        (Answers({NORM: [f"{NORM}::a"], ALL: [f"{ALL}::b"]}, ()), f"{NORM}::a", set()),
        (
            Answers({NORM: [f"{NORM}::a", f"{NORM}::b"]}, [f"{NORM}::a"]),
            f"{NORM}::b",
            {f"{NORM}::a"},
        ),
        (Answers({NORM: [NORM], ALL: [f"{ALL}::b"]}, [NORM]), f"{ALL}::b", {NORM}),
        (Answers({NORM: [NORM]}, [NORM]), "", {NORM}),
        (Answers({NORM: [f"{NORM}::a"]}, (), slow=[f"{NORM}::a"]), "", {f"{NORM}::a"}),
    ],
)
def test_only_a_test_that_passes_without_the_mutant_catches_it(checkout, tests, caught_by, red):
    tests.root = checkout
    judge = tool.Judge(tests, nearest=None, workers=2)
    mutant = tool.Mutant("removed", "qlora_wgpu/ops/norm.py", "launch('norm/forward.wgsl')", "", 0)
    outcome = judge.outcome(mutant, "quick")
    assert (outcome.caught_by, judge.red) == (caught_by, red)


def test_what_was_found_is_not_run_again(checkout, tmp_path):
    mutant = tool.Mutant("removed", "qlora_wgpu/ops/norm.py", "launch('norm/forward.wgsl')", "", 0)
    path = tmp_path / "results.jsonl"
    tests = Answers({}, ())
    tests.root = checkout
    two = tool.Results(path).of(mutant, "quick", tool.Judge(tests, nearest=2, workers=2))
    assert (two.caught_by, two.files) == ("", 2)
    tests.failing_of = {NORM: [f"{NORM}::a"]}
    assert tool.Results(path).of(mutant, "quick", tool.Judge(tests, 2, 2)) == two
    assert tool.Results(path).of(mutant, "quick", tool.Judge(tests, 3, 2)).caught_by == f"{NORM}::a"
