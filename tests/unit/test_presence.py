"""What cannot be looked at is not taken for missing, and nobody asks in another way."""

import ast
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

import qlora_wgpu
from qlora_wgpu.checkpoint import hub
from qlora_wgpu.checkpoint.model_folder import ModelFolder
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.data.prompts import prompt_kind
from qlora_wgpu.data.sources import check_file
from qlora_wgpu.errors import DataError
from qlora_wgpu.files import exists, is_dir, is_file, is_there
from qlora_wgpu.training.run_folder import RunBackup

ROOT = Path(qlora_wgpu.__file__).parent
ASKED = ("exists", "is_dir", "is_file")


def fail(monkeypatch: pytest.MonkeyPatch, error: OSError, at: Callable[[Path], object]) -> None:
    """Lets the system answer with an error where a path is looked at."""
    stat = Path.stat

    def failing(path: Path, *args: object, **options: object) -> object:
        if at(path):
            raise error
        return stat(path, *args, **options)

    monkeypatch.setattr(Path, "stat", failing)


def test_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    seen = [
        [ask(tmp_path / name) for ask in (exists, is_dir, is_file)] for name in ("file", "link")
    ]
    assert seen == [[True, False, True], [True, True, False]]


@pytest.mark.parametrize("name", ["gone", "file/below", "nothing", "round", "a\0b"])
def test_what_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nothing").symlink_to("gone")
    (tmp_path / "round").symlink_to("round")
    assert [ask(tmp_path / name) for ask in (exists, is_dir, is_file)] == [False] * 3


def test_a_link_to_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "nothing").symlink_to("gone")
    assert is_there(tmp_path / "nothing")
    assert not is_there(tmp_path / "gone")


@pytest.mark.parametrize("ask", [exists, is_dir, is_file, is_there])
def test_what_cannot_be_looked_at(tmp_path: Path, ask: Callable[[Path], bool]) -> None:
    with pytest.raises(OSError) as caught:
        ask(tmp_path / ("x" * 5000))
    assert caught.value.errno == errno.ENAMETOOLONG


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_errors_of_permissions_and_disks(tmp_path, monkeypatch, code: int) -> None:
    fail(monkeypatch, OSError(code, "no"), lambda path: path.name == "a")
    for ask in (exists, is_dir, is_file, is_there):
        with pytest.raises(OSError, match="no"):
            ask(tmp_path / "a")


def test_a_model_in_a_locked_folder_is_not_asked_of_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", lambda *args, **options: pytest.fail("asked the hub"))
    error = PermissionError(errno.EACCES, "Permission denied", "locked/model")
    fail(monkeypatch, error, lambda path: path.parts[:1] == ("locked",))
    with pytest.raises(PermissionError):
        ModelFolder.open("locked/model")


def test_a_prompt_format_that_cannot_be_looked_at_is_not_the_default(tmp_path, monkeypatch):
    fail(monkeypatch, OSError(errno.EIO, "no"), lambda path: path.suffix == ".json")
    with pytest.raises(OSError, match="no"):
        prompt_kind(tmp_path)


def test_data_in_a_locked_folder_are_not_called_missing(tmp_path, monkeypatch) -> None:
    error = PermissionError(errno.EACCES, "Permission denied")
    fail(monkeypatch, error, lambda path: path.name == "a.jsonl")
    with pytest.raises(DataError, match=r"cannot read .*a.jsonl': Permission denied"):
        check_file(tmp_path / "a.jsonl")


def test_a_run_that_cannot_be_looked_at_is_not_overwritten_by_the_one_before(tmp_path, monkeypatch):
    replaced = RunBackup(RunPaths(tmp_path))
    (tmp_path / "replaced").mkdir()
    ((tmp_path / "replaced") / "metrics.jsonl").write_text("old")
    (tmp_path / "metrics.jsonl").write_text("new")
    error = OSError(errno.ESTALE, "Stale file handle")
    fail(monkeypatch, error, lambda path: path.parent == tmp_path and path.suffix)
    with pytest.raises(OSError, match="Stale"):
        replaced.settle()
    assert (tmp_path / "metrics.jsonl").read_text() == "new"


def asks(path: Path) -> list[str]:
    """The lines of a module that ask pathlib whether something is there."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ASKED
        and not node.args
    ]


@pytest.mark.slow
def test_nobody_asks_pathlib() -> None:
    """But for ``supervision``, which knows the standard library alone: it has files of its own."""
    modules = [p for p in ROOT.rglob("*.py") if "supervision" not in p.relative_to(ROOT).parts]
    assert len(modules) > 100
    assert [line for path in modules for line in asks(path)] == []
