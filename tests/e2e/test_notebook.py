"""The notebook's cells still run, in their order and with fewer steps."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def write_small_demo(folder):
    """The demo with few rows, and few of them at once."""
    (folder / "data").mkdir(parents=True)
    (folder / "base").symlink_to(ROOT / "demo" / "base")
    for name, rows in (("train.jsonl", 12), ("eval.jsonl", 4)):
        lines = (ROOT / "demo" / "data" / name).read_text().splitlines()
        (folder / "data" / name).write_text("\n".join(lines[:rows]) + "\n")
    text = (ROOT / "demo" / "demo.yaml").read_text()
    small = text.replace("train_batch_size: 16", "train_batch_size: 2")
    assert small != text
    (folder / "demo.yaml").write_text(small)


@pytest.mark.full
def test_its_cells_run(tmp_path, monkeypatch, capfd):
    write_small_demo(tmp_path / "demo")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.setattr("qlora_wgpu.runs.prompts._MAX_TOKENS", 4)
    assert sum(re.sub(r"\bsteps = 60\b", "", cell) != cell for cell in CODE) == 1
    names = {}
    for cell in CODE:
        exec(compile(cell.replace("steps = 60", "steps = 3"), "notebook.ipynb", "exec"), names)
    assert names["whole"].steps == 3 and names["trained"].steps == 4
    assert repr(names["model"]) == "QLoRAModel(closed)"
    assert "held-out loss" in capfd.readouterr().out


def test_it_was_executed_from_its_first_cell_to_its_last():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(output["output_type"] == "error" for c in code for output in c["outputs"])
    shown = json.dumps([cell["outputs"] for cell in code])
    assert "held-out loss 3.90, then" in shown and "QLoRAModel(closed)" in shown
    assert "\\u001b" not in shown and "/tmp" not in shown  # no moving lines, no one's folders


def test_it_is_what_the_tool_would_execute():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "tools" / "notebook.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    sources = ["".join(cell["source"]) for cell in NOTEBOOK["cells"]]
    assert sources == [tool.source_of(text) for text in tool.CELLS], "run python tools/notebook.py"
