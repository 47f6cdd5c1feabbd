"""What ``train`` says that is stopped before its steps, of which there is no result."""

from pathlib import Path

import pytest
from support.commands import run_here

from qlora_wgpu import runs
from qlora_wgpu.config import Config, load_config

RUN = "model: {path: base}\ndata: {train: rows.jsonl}\noutput: {dir: out}\n"


@pytest.mark.parametrize(
    ("flag", "checkpoint", "said"),
    [
        (
            (),
            None,
            "stopped before the first checkpoint; `qlora-wgpu train run.yaml --resume` starts",
        ),
        (
            ("--resume",),
            3,
            "checkpoints are kept, and `qlora-wgpu train run.yaml --resume`",
        ),
        (
            ("--overwrite",),
            None,
            "the first checkpoint; `qlora-wgpu train run.yaml --overwrite` start",
        ),
        (  # of the run that would have been replaced
            ("--overwrite",),
            3,
            "the first checkpoint; `qlora-wgpu train run.yaml --overwrite` start",
        ),
    ],
)
def test_what_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: tuple[str, ...],
    checkpoint: int | None,
    said: str,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", interrupted)
    (tmp_path / "run.yaml").write_text(RUN)
    if checkpoint is not None:
        folder = tmp_path / "out" / "checkpoints" / f"step-{checkpoint}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    done = run_here("train", "run.yaml", *flag, cwd=tmp_path)
    assert done.returncode == 130
    assert said in done.stdout


def test_a_run_goes_on_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the overrides that it was started with, which its own config.yaml has."""
    seen = []

    def interrupted(settings: Config, *_: object, **__: object) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", interrupted)
    (tmp_path / "run.yaml").write_text(RUN)
    begun = load_config(tmp_path / "run.yaml", ["optim.learning_rate=3e-3"])
    (tmp_path / "moved" / "checkpoints" / "step-1").mkdir(parents=True)
    for name, text in (("config.yaml", begun.to_yaml()), ("metrics.jsonl", "")):
        (tmp_path / "moved" / name).write_text(text)
    (tmp_path / "moved" / "checkpoints" / "step-1" / "manifest.json").write_text("{}")
    done = run_here("train", "moved", "--resume", cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    assert seen[0].optim.learning_rate == 3e-3 and seen[0].output.dir == "moved"
    assert "`qlora-wgpu train moved --resume` continues" in done.stdout
