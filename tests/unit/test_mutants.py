"""Mutants follow from their seed, change one place each, and meet the tests that reach them."""

import ast
import json
import random
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import qlora_wgpu
from campaigns.python_mutants import of_a_module
from tools import mutants as tool
from tools.mutants import KINDS, ROOT, drawn, failed_test, kind_of, room_of, rooms
from tools.reach import Reach, report_from

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


@pytest.mark.full
def test_mutants_follow_from_their_seed(mutants):
    assert drawn(6, seed=7) == mutants[:6]
    assert drawn(6, seed=8) != mutants[:6]
    assert len(set(mutants)) == len(mutants)


@pytest.mark.full
def test_every_room_is_drawn(mutants):
    for kind in KINDS:
        own = [room_of(each) for n, each in enumerate(mutants, 1) if kind_of(n) == kind]
        assert set(own[: len(rooms(kind))]) == set(rooms(kind))


@pytest.mark.full
def test_each_changes_one_line_and_python_stays_python(mutants):
    for each in mutants:
        text = (ROOT / each.path).read_text(encoding="utf-8")
        changed = each.source(each.path, text)
        before, after = text.split("\n"), changed.split("\n")
        differing = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert differing == [each.line]
        if each.path.endswith(".py"):
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


MODULE = """\
'''A module.'''
LIMIT = 3

def shorten(words, most=LIMIT):
    '''Some words.'''
    if not words:
        return []
    elif len(words) > most:
        return [
            w for w in words][:most]
    return words

class Shop:
    open = True

    def sell(self):
        def price():
            return 2
        return price
"""


@pytest.mark.parametrize(
    ("line", "reached"),
    [
        (2, "empty long short sell price"),  # LIMIT, as everything that may see it
        (4, "empty long short sell price"),
        (6, "empty long short"),
        (7, "empty"),
        (8, "long short"),
        (10, "long"),
        (11, "short"),
        (14, "empty long short sell price"),
        (18, "price"),
        (19, "sell price"),
    ],
)
def test_a_copy_reports_where_a_test_passes(tmp_path, monkeypatch, line, reached):
    (tmp_path / "qlora_wgpu").mkdir()
    notes = tmp_path / "notes"
    names = {"gpu/device.py": "def pipeline(shader): pass", "own.py": MODULE}
    (tmp_path / "qlora_wgpu" / "gpu").mkdir()
    for name, text in names.items():
        (tmp_path / "qlora_wgpu" / name).write_text(text)
    mutant = tool.Mutant("", "qlora_wgpu/own.py", "", "", line - 1)
    report_from(tmp_path, [mutant], notes)
    reporter = ModuleType("qlora_wgpu._reached")
    exec((tmp_path / "qlora_wgpu" / "_reached.py").read_text(), vars(reporter))
    monkeypatch.setitem(sys.modules, "qlora_wgpu._reached", reporter)
    monkeypatch.setattr(qlora_wgpu, "_reached", reporter, raising=False)
    module, gpu = ModuleType("own"), ModuleType("device")
    exec((tmp_path / "qlora_wgpu" / "own.py").read_text(), vars(module))
    exec((tmp_path / "qlora_wgpu" / "gpu" / "device.py").read_text(), vars(gpu))
    calls = {
        "empty": lambda: module.shorten([]), "long": lambda: module.shorten(list("abcd")),
        "short": lambda: module.shorten(["a"]), "sell": lambda: module.Shop().sell(),
        "price": lambda: module.Shop().sell()(),
        "kernel": lambda: gpu.pipeline(SimpleNamespace(path="a.wgsl")),
    }  # fmt: skip
    for name, call in calls.items():
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"t.py::{name} (call)")
        call()
        call()
    told = [f"qlora_wgpu/own.py:{line}\tt.py::{name}" for name in reached.split()]
    assert notes.read_text().splitlines() == [*told, "a.wgsl\tt.py::kernel"]


def test_tests_that_reach_a_mutant_come_the_cheapest_first(tmp_path):
    times, notes = tmp_path / "times", tmp_path / "notes"
    seconds = {"a": [9, 3, 0, 1], "b": [1, 1, 1, 1], "c": [1, 1, 0, 1], "d": [1, 0, 0, 1]}
    phases = [{"test": t, "seconds": s, "outcome": "passed"} for t, s in seconds.items()]
    phases.append({"test": "c", "seconds": [0, 0, 0, 0], "outcome": "failed"})
    times.write_text("\n".join(map(json.dumps, phases)))
    notes.write_text("m.py:1\ta\nm.py:1\tb\nm.py:1\tc\ndirect.wgsl\ta\nother.wgsl\tb\n")
    (tmp_path / "shaders").mkdir()
    for name, text in {"direct": "//#include part.wgsl", "part": "//#include least.wgsl",
                       "least": "", "other": ""}.items():  # fmt: skip
        (tmp_path / "shaders" / f"{name}.wgsl").write_text(text)
    reach = Reach.read(notes, times, [tool.Mutant("", "m.py", "", "", 0)])
    reach.save(tmp_path / "saved")
    assert Reach.load(tmp_path / "saved").mutants == reach.mutants != ()
    for each in (reach, Reach.load(tmp_path / "saved")):
        python, unknown, shader = (
            each.tests(tool.Mutant("", path, "", "", 0), tmp_path)
            for path in ("m.py", "n.py", "shaders/least.wgsl")
        )
        assert (python, unknown, shader) == (["b", "a"], ["d", "b", "a"], ["a"])


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
    """Stands in for a copy: which tests fail with the mutant, and which also without."""

    root = Path("nowhere")

    def __init__(self, failing, red=(), slow=()):
        self.with_it, self.without, self.slow, self.is_mutated = failing, red, slow, False
        self.batches = []

    @contextmanager
    def mutated(self, mutant):
        self.is_mutated = True
        yield
        self.is_mutated = False

    def collected(self, tier, *paths):
        if tier == "quick":
            return ["t.py::a[1]", "t.py::b"]
        assert paths == ("t.py",)
        return ["t.py::a[1]", "t.py::a[2]", "t.py::b", "t.py::c", "t.py::other", "t.py::whole"]

    def failing(self, given, patience=1):
        if self.is_mutated:
            self.batches.append(list(given))
        failing = self.with_it if self.is_mutated else self.without
        for test in given:
            if test in failing or (not self.is_mutated and test in self.slow and patience == 1):
                return test, "hung" if test in self.slow else "failed"
        return "", ""


A, B, C = "t.py::a[1]", "t.py::b", "t.py::c"
MUTANT = tool.Mutant("removed", "m.py", "a", "b", 0)
REACH = Reach({C: 1, B: 2, A: 3, "t.py::other": 4}, {"m.py:1": frozenset({A, B, C})})


@pytest.mark.parametrize(
    ("tests", "caught_by", "red"),
    [
        (Answers([]), "", set()),
        (Answers([C]), "", set()),  # which is not in quick
        (Answers([A, B]), B, set()),
        (Answers([A, B], red=[B]), A, {B}),
        (Answers([B], red=[B]), "", {B}),
        (Answers([B], slow=[B]), "", {B}),
    ],
)
def test_only_a_test_that_passes_without_the_mutant_catches_it(tests, caught_by, red):
    judge = tool.Judge(tests, REACH)
    outcome = judge.outcome(MUTANT, "quick")
    assert (outcome.caught_by, outcome.tests, judge.red) == (caught_by, 2, red)


def test_a_tier_has_what_no_tier_before_it_had():
    judge = tool.Judge(Answers([]), REACH)
    assert judge.tests(MUTANT, "quick") == [B, A]
    assert judge.tests(MUTANT, "test") == [C]
    assert judge.tests(MUTANT, "full") == ["t.py::a[2]", "t.py::whole"]


def test_a_few_tests_come_before_many(monkeypatch):
    monkeypatch.setattr(tool, "BATCHES", (1, 5))
    tests = Answers([])
    tool.Judge(tests, REACH).outcome(MUTANT, "quick")
    assert tests.batches == [[B], [A]]


def test_what_was_found_is_not_run_again(tmp_path):
    path = tmp_path / "results.jsonl"
    found = tool.Results(path).of(MUTANT, "quick", tool.Judge(Answers([]), REACH))
    assert found.caught_by == ""
    other = tool.Judge(Answers([B]), REACH)
    assert tool.Results(path).of(MUTANT, "quick", other) == found
    assert tool.Results(path).of(MUTANT, "test", other).tests == 1


def test_more_than_a_folder_has_are_refused(monkeypatch):
    monkeypatch.setattr(tool, "rooms", lambda kind: ["shaders/column_scale"])
    monkeypatch.setattr(tool, "MOST_DRAWS", 50)
    with pytest.raises(SystemExit, match="column_scale has no more mutants for --count 400"):
        drawn(400, seed=1)
