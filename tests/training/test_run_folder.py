"""A run's folder: nothing of the user's is replaced unasked, and only old checkpoints go."""

import json

import pytest

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.run_folder import RunFolder, refuse_existing_run


def test_a_new_folder_gets_its_parts(tmp_path):
    run = RunFolder(tmp_path / "a" / "b", "lora: {r: 4}\n")
    assert run.path == tmp_path / "a" / "b"
    assert (run.path / "config.yaml").read_text() == "lora: {r: 4}\n"
    assert (run.path / "metrics.jsonl").read_text() == ""
    assert run.checkpoints.is_dir() and not run.adapter.exists()


def test_a_folder_with_other_files_is_taken(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path, "x")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["adapter", "checkpoints", "metrics.jsonl", "config.yaml"])
def test_nothing_is_replaced_unasked(tmp_path, name):
    kept = tmp_path / name
    if "." not in name:
        kept.mkdir()
        kept /= "mine"
    kept.write_text("mine")
    with pytest.raises(ConfigError, match=f"already holds a run .{name}.*--overwrite"):
        refuse_existing_run(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(tmp_path, "new")
    assert kept.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    for part in ("adapter", "checkpoints/step-7"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "old").write_text("old")
    (tmp_path / "metrics.jsonl").write_text("old")
    (tmp_path / "config.yaml").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    run = RunFolder(tmp_path, "new", overwrite=True)
    assert not run.adapter.exists() and not list(run.checkpoints.iterdir())
    assert (tmp_path / "config.yaml").read_text() == "new"
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_its_place(tmp_path, overwrite):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"output\.dir .*file.* cannot be written"):
            RunFolder(path, "x", overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


def test_rows_are_json_and_never_nan(tmp_path):
    run = RunFolder(tmp_path / "r", "x")
    run.log({"step": 1, "loss": None})
    run.log({"step": 2, "loss": 0.1 + 0.2})
    with pytest.raises(ValueError, match="JSON"):
        run.log({"step": 3, "loss": float("nan")})
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 0.1 + 0.2},
    ]


@pytest.mark.parametrize(("keep", "left"), [(1, [100]), (2, [20, 100]), (9, [3, 20, 100])])
def test_the_newest_checkpoints_stay(tmp_path, keep, left):
    run = RunFolder(tmp_path / "r", "x")
    for step in (100, 3, 20):  # by number, not as text
        run.checkpoint_folder(step).mkdir()
    run.prune(None)
    assert len(list(run.checkpoints.iterdir())) == 3
    run.prune(keep)
    assert sorted(int(p.name.removeprefix("step-")) for p in run.checkpoints.iterdir()) == left
