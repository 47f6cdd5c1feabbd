"""How much there is to read: these numbers may fall, and are lowered when they do."""

import subprocess
import sys
from pathlib import Path

import pytest
from e2e.tiny import write_chats, write_model

import qlora_wgpu
from qlora_wgpu import runs
from qlora_wgpu.training import Observer

ROOT = Path(qlora_wgpu.__file__).parent
ENGINE = [
    "gpu", "graph", "kernels", "ops", "families", "lora", "model", "generation", "quant",
    "reference", "selfcheck", "tuning", "bench",
]  # fmt: skip
FILES = {"engine": 290, "product": 216}
LINES = {"engine": 44_160, "product": 52_100}
TRAINING = {"engine": 105, "product": 84}  # files that a run of two steps passes through


def half(path: Path) -> str:
    return "engine" if path.relative_to(ROOT).parts[0] in ENGINE else "product"


@pytest.mark.parametrize("of", FILES)
def test_the_package_grows_no_larger(of: str) -> None:
    files = [path for path in ROOT.rglob("*.py") if half(path) == of]
    assert len(files) <= FILES[of]
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in files) <= LINES[of]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "most"), [("cli", 20), ("cli.init", 105), ("config.dialects.conversion", 60)]
)
def test_what_a_command_imports(module: str, most: int) -> None:
    """Before it knows what it is asked: each takes its time at every start."""
    count = "len([m for m in sys.modules if m.startswith('qlora_wgpu')])"
    code = f"import sys, qlora_wgpu.{module}; print({count})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= most


@pytest.mark.full
def test_a_run_passes_through_few_files(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.jsonl")
    settings = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_seq_length": 64},
        "train": {"max_steps": 2, "per_device_train_batch_size": 2},
        "output": {"dir": str(tmp_path / "run")},
        "device": {"tune": "never"},
    }
    files: set[str] = set()

    def called(frame, event, _):
        if event == "call" and not frame.f_code.co_qualname.startswith("<module"):
            files.add(frame.f_code.co_filename)

    sys.setprofile(called)
    try:
        runs.train(settings, Observer())
    finally:
        sys.setprofile(None)
    own = [Path(name) for name in files if name.startswith(f"{ROOT}/")]
    counts = {of: sum(half(path) == of for path in own) for of in TRAINING}
    assert all(counts[of] <= most for of, most in TRAINING.items()), counts
