"""The log of a run in Python, and the curves that a notebook draws of it."""

import itertools
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from qlora_wgpu import read_log
from qlora_wgpu.cli import _display
from qlora_wgpu.cli._display import NotebookCurves
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.run_folder import RunFolder

ROWS = [
    {"step": 0, "eval_loss": 3.0},
    {"step": 1, "loss": 2.5, "learning_rate": 0.0},
    {"step": 2, "loss": 2.0, "learning_rate": 1e-4},
    {"step": 2, "eval_loss": 1.9},
]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run", "model: {path: x}\n")
    for row in ROWS:
        folder.log.append(row)
    folder.texts.append({"step": 0, "prompt": "p", "expected": "", "text": "t"})
    folder.close()
    return folder.path


def test_rows_and_texts(run, tmp_path):
    log = read_log(run)
    assert log.rows == ROWS and log.samples[0]["text"] == "t"
    assert repr(log) == "RunHistory(4 rows up to step 2)"
    with pytest.raises(ConfigError, match="contains no run"):
        read_log(tmp_path)


def test_a_table_has_a_row_a_step(run, monkeypatch):
    class DataFrame:
        def __init__(self, rows):
            self.rows = rows

        def set_index(self, name):
            return name, self.rows

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=DataFrame))
    index, rows = read_log(run).to_pandas()
    assert index == "step" and [row["step"] for row in rows] == [0, 1, 2]
    assert rows[2] == ROWS[2] | ROWS[3]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        read_log(run).to_pandas()


def test_its_curves_style_nothing_else(run):
    html = read_log(run)._repr_html_()
    assert html.startswith('<div class="qlora-wgpu">') and html.count("<svg") == 2
    style = html[html.index("<style>") : html.index("</style>")]
    assert style.count("{") == style.count("}") and style.split()[1] == ".qlora-wgpu"
    depth = [style[:i].count("{") - style[:i].count("}") for i in range(len(style))]
    assert sum(a == 0 < b for a, b in itertools.pairwise(depth)) == 1  # one rule has all


def test_a_notebook_draws_in_one_place(monkeypatch):
    shown, clock = [], [0.0]
    handle = SimpleNamespace(update=lambda html: shown.append(html))

    def display(html, display_id):
        assert display_id is True
        shown.append(html)
        return handle

    module = SimpleNamespace(display=display, HTML=str)
    monkeypatch.setattr(_display.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(_display, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    curves = NotebookCurves()
    curves.evaluation(ROWS[0])  # nothing is there to be drawn into
    curves.started(2, 0, Counter())
    curves.step(ROWS[1])
    curves.step(ROWS[2])  # too soon after the last drawing
    clock[0] = 2.0
    curves.evaluation(ROWS[3])
    curves.finished(None)
    steps = [html[html.index("step ") :][: len("step 0 of 2")] for html in shown]
    assert steps == ["step 0 of 2", "step 1 of 2", "step 2 of 2", "step 2 of 2"]
