"""Executes examples/notebook.ipynb anew and writes it with what its cells show.

usage: python tools/notebook.py    (needs nbclient, nbformat and ipykernel beside the project)

The cells' sources are here; the file is never edited by hand.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

CELLS = (
    """# Fine-tuning in a notebook

A small trained Llama that ships with the project learns to answer questions about a story, on
whatever GPU there is, software Vulkan included. `docs/python.md` has all functions. This page is
executed by `python tools/notebook.py`; a test runs its cells.""",
    """>>> import json
>>> from pathlib import Path
>>>
>>> import qlora_wgpu
>>>
>>> demo = Path("../demo")  # from the folder of this notebook
>>> folder = Path("runs")
>>> steps = 60""",
    """## The data

Rows are chats, prompts with completions, instructions or texts, in files or in Python.""",
    """>>> lines = (demo / "data" / "train.jsonl").read_text().splitlines()
>>> rows = [json.loads(line) for line in lines]
>>> rows[0]""",
    """>>> tokenizer = qlora_wgpu.Tokenizer.from_folder(demo / "base")
>>> data = qlora_wgpu.load_dataset(rows, tokenizer, max_seq_length=64)
>>> tokenizer, data""",
    """## A run

`train` does and shows what `qlora-wgpu train` does. Any setting of the YAML can be given by name,
such as `learning_rate=1e-3`; `quiet=True` shows nothing. Its curves are drawn while it goes on.
Interrupting the kernel stops the run with its state saved.""",
    """>>> result = qlora_wgpu.train(
...     demo / "demo.yaml",
...     dir=folder / "run",
...     max_steps=steps,
...     eval_steps=steps // 3,
... )""",
    """>>> print(f"held-out loss {result.eval_loss_before:.2f}, then {result.eval_loss:.2f}")
>>> sample = result.samples[-1]
>>> print("prompt:", sample.prompt)
>>> print("before:", sample.before)
>>> print("after: ", sample.after)""",
    """`read_log` has what was logged, of a run that goes on, too; `to_pandas()` makes a `DataFrame`
of it.""",
    """>>> log = qlora_wgpu.read_log(result.run_dir)
>>> log.rows[-1]""",
    """The folder of the run has the adapter, as PEFT reads it, the checkpoints and the report.""",
    """>>> sorted(path.name for path in result.run_dir.iterdir() if path.name[0] != ".")""",
    """## The model

`open_adapter` opens what a run has trained on its base. `generate` goes on with a text, or answers
messages.""",
    """>>> model = qlora_wgpu.open_adapter(result.run_dir)
>>> story = "Mia hid the red kite near the gate. Tom hurried to the beach. Where did Tom go?"
>>> question = [{"role": "user", "content": story}]
>>> print(model.generate(question, max_new_tokens=24))
>>> with model.adapter_off():
...     print(model.generate(question, max_new_tokens=24))
>>> model""",
    """## Callbacks

A `TrainerCallback` watches a run, and can stop it. A stopped run can be resumed.""",
    """>>> class Enough(qlora_wgpu.TrainerCallback):
...     def on_evaluate(self, step):
...         if step.eval_loss < 3.8:
...             step.stop("the held-out loss is low enough")
...
...
>>> few = {"dir": folder / "stopped", "max_steps": steps, "eval_steps": 1, "quiet": True}
>>> stopped = qlora_wgpu.train(demo / "demo.yaml", callbacks=[Enough()], **few)
>>> print(stopped.steps, "steps:", stopped.stop_reason)
>>> whole = qlora_wgpu.train(demo / "demo.yaml", resume=True, **few)
>>> print(whole.steps, "steps:", whole.stop_reason)""",
    """A `Step` also saves and evaluates the run, and changes its learning rate. A loop of your own
over steps is `Trainer.steps()`.""",
    """>>> class Halve(qlora_wgpu.TrainerCallback):
...     def on_step_end(self, step):
...         if step.step == 2:
...             step.scale_learning_rate(0.5)
...
...
>>> slower = {"dir": folder / "slower", "max_steps": 4, "eval_steps": 0, "quiet": True}
>>> _ = qlora_wgpu.train(demo / "demo.yaml", callbacks=[Halve()], logging_steps=1, **slower)
>>> halved = qlora_wgpu.read_log(folder / "slower").rows
>>> [row["learning_rate"] for row in halved if "loss" in row]""",
    """## Its parts

A `Trainer` takes a model and rows, and prints nothing.""",
    """>>> config = qlora_wgpu.load_config(
...     demo / "demo.yaml",
...     {"dir": folder / "own", "max_steps": 4, "gradient_accumulation_steps": 2},
... )
>>> own = [{"prompt": "The sky is ", "completion": "blue."}] * 32
>>> trained = qlora_wgpu.Trainer(model, config).train(own)
>>> print(f"{trained.steps} steps, loss {trained.train_loss:.2f}")""",
    """`close`, or the end of a `with`, frees a model's memory at once, whatever the notebook still
holds of it.""",
    """>>> model.close()
>>> model""",
)


def source_of(text: str) -> str:
    """A cell without its prompts."""
    return re.sub(r"^(>>>|\.\.\.) ?", "", text, flags=re.M) if text.startswith(">>>") else text


def main() -> None:
    """Executes and writes it."""
    import nbformat
    from nbclient import NotebookClient

    makers = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [makers[text.startswith(">>>")](source_of(text)) for text in CELLS]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook = nbformat.v4.new_notebook(cells=cells)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "examples").mkdir()
        (Path(place) / "demo").symlink_to(ROOT / "demo")
        NotebookClient(notebook, kernel_name="python3", coalesce_streams=True).execute(
            cwd=f"{place}/examples"
        )
        text = nbformat.writes(_without_metadata(notebook))
    NOTEBOOK.write_text(text.replace(f"{place}/", "") + "\n", encoding="utf-8")


def _without_metadata(notebook: Any) -> Any:
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata.clear()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    main()
