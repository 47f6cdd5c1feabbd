"""A run's folder: nothing of the user's is replaced unasked, and only old checkpoints go."""

import json
import re
import shutil
from pathlib import Path

import pytest

from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.training.run_folder import (
    RunFolder,
    checkpoint_folders,
    refuse_existing_run,
    require_writable,
    settle_run,
)


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
    with pytest.raises(ConfigError, match=f"already contains a run .{name}.*overwrite=True"):
        refuse_existing_run(tmp_path)
    with pytest.raises(ConfigError, match="already contains a run"):
        RunFolder(tmp_path, "new")
    assert kept.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_is_not_trained_into(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has a model .config.json.: choose another folder"):
        RunFolder(tmp_path, "new")
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
    run.log.append({"step": 1, "loss": None})
    run.log.append({"step": 2, "loss": 0.1 + 0.2})
    with pytest.raises(ValueError, match="JSON"):
        run.log.append({"step": 3, "loss": float("nan")})
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


def test_one_run_at_a_time(tmp_path):
    first = RunFolder(tmp_path / "r", "x")
    for options in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(ConfigError, match="another run is using"):
            RunFolder(tmp_path / "r", "y", **options)
    with pytest.raises(ConfigError, match="another run is using"):
        settle_run(tmp_path / "r")
    assert (tmp_path / "r" / "config.yaml").read_text() == "x"
    first.close()
    RunFolder(tmp_path / "r", "y", overwrite=True)


def test_a_folder_that_is_lost_is_noticed(tmp_path):
    run = RunFolder(tmp_path / "r", "x")
    run.require_own()
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(CheckpointError, match="removed or replaced"):
        run.require_own()
    RunFolder(tmp_path / "r", "other")
    with pytest.raises(CheckpointError, match="removed or replaced"):
        run.require_own()


def old_run(path):
    for part in ("adapter", "best", "checkpoints/step-7", "tensorboard"):
        (path / part).mkdir(parents=True)
        (path / part / "file").write_text("old")
    for part in ("metrics.jsonl", "report.html", "config.yaml"):
        (path / part).write_text("old")


def tree(path):
    return {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()}


def test_a_replaced_run_stays_until_there_is_something_to_show(tmp_path):
    path = tmp_path / "r"
    old_run(path)
    before = tree(path)
    run = RunFolder(path, "new", overwrite=True)
    assert run.kept_run is not None and tree(run.replaced) == before
    run.close()
    # One that was begun and has nothing to show does not push it out.
    run = RunFolder(path, "newer", overwrite=True)
    assert tree(run.replaced) == before
    run.checkpoint_folder(1).mkdir()
    run.backup.remove()
    assert run.kept_run is None and (path / "config.yaml").read_text() == "newer"
    with pytest.raises(ConfigError, match="already contains a run"):
        refuse_existing_run(path)


@pytest.mark.slow
def test_a_kill_while_a_run_is_replaced_loses_nothing(tmp_path, monkeypatch):
    """At each rename, removal and write of a beginning."""

    class Kill(BaseException):
        pass

    at, left = 0, 0

    def counted(original):
        def call(*args, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise Kill
            return original(*args, **options)

        return call

    for name in ("rename", "replace", "mkdir", "unlink"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    while True:
        at += 1
        path, left = tmp_path / str(at), 0
        old_run(path)
        before, left = tree(path), at
        try:
            RunFolder(path, "new", overwrite=True).close()
            break
        except Kill:
            left = 0
        settle_run(path)
        after = {k: v for k, v in tree(path).items() if k != ".lock"}
        if (path / "config.yaml").read_text() == "old":
            assert after == before, at
        else:
            assert tree(path / "replaced") == before, at
        RunFolder(path, "new", overwrite=True).close()
    assert at > 12


def test_pruning_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "r", "x")
    for step in (1, 2):
        run.checkpoint_folder(step).mkdir()
        (run.checkpoint_folder(step) / "file").write_text("x")

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run.prune(1)
    assert [p.name for p in checkpoint_folders(run.path)] == ["step-2"]
    monkeypatch.undo()
    run.prune(1)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-2"]


def test_a_run_on_a_drive_that_does_not_exist(tmp_path, monkeypatch):
    """Windows has several; elsewhere the outermost folder is always there."""
    monkeypatch.setattr("qlora_wgpu.training.run_folder.exists", lambda _: False)
    root = re.escape(tmp_path.anchor)
    with pytest.raises(ConfigError, match=f"run cannot be written: {root} does not exist"):
        require_writable(tmp_path / "run")


def test_a_folder_is_tried_before_anything_takes_time(tmp_path):
    require_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / ".qlora-wgpu-killed").mkdir()  # before it could take it away
    require_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"cannot be written: .*file is not a folder$"):
            require_writable(place)
    (tmp_path / "link").symlink_to("gone")
    for place in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(ConfigError, match="cannot be written: it is a broken link to gone"):
            require_writable(place)
    first = RunFolder(tmp_path / "run", "x")
    with pytest.raises(ConfigError, match=r"another run is using output\.dir"):
        require_writable(tmp_path / "run")
    first.close()
    require_writable(tmp_path / "run")
