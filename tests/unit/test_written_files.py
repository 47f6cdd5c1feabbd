"""Files that commands write are whole or not there: each goes through ``checkpoint/atomic``."""

from __future__ import annotations

import ast
import errno
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from e2e.tiny import write_chats, write_model

import qlora_wgpu
from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.cli._options import output_file, write_json_file
from qlora_wgpu.cli.init import init
from qlora_wgpu.cluster.security import make_certificates
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.exporting.gguf import _write as write_gguf_adapter

ROOT = Path(qlora_wgpu.__file__).parent

WRITERS = {"write_text", "write_bytes", "copyfile", "copytree", "copy2", "fdopen", "open"}
IN_AN_UNFINISHED_FOLDER = {
    "gguf/folder.py", "checkpoint/manifest.py", "checkpoint/safetensors_file.py",
    "data/prepared.py", "images/stored.py", "exporting/folders.py", "runs/exporting.py",
    "training/checkpoints.py", "web/site.py", "web/variant.py",
    "runs/web.py", "exporting/gguf.py", "cluster/security.py",
}  # fmt: skip
GONE_WITH_THE_PROCESS = {
    "data/tokenizer.py", "grpo/reward_process.py", "sandbox/process.py",
    "supervision/child.py", "supervision/streams.py",
}  # fmt: skip
BY_OTHER_MEANS = {
    "checkpoint/atomic.py",  # the door itself
    "gpu/driver.py",  # a number a line; what is no number is skipped
    "model/weight_cache.py",  # renamed once it is written, and hashed
    "training/integrations.py",  # TensorBoard's records, each with a checksum, are appended
}


def is_writer(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in WRITERS:
        return False
    if name not in ("open", "fdopen"):
        return True
    given = [*call.args, *(word.value for word in call.keywords)]
    modes = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return any(set(mode) <= set("rwxab+t") and set(mode) & set("wxa+") for mode in modes)


@pytest.mark.slow
def test_nothing_else_writes_files() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
        if any(map(is_writer, calls)):
            found.add(path.relative_to(ROOT).as_posix())
    assert found == IN_AN_UNFINISHED_FOLDER | GONE_WITH_THE_PROCESS | BY_OTHER_MEANS


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that takes everything and then says that it has kept nothing."""

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


def figures(folder):
    write_json_file(folder / "figures.json", {"a": 1})


def gguf_adapter(folder):
    import gguf

    write_gguf_adapter(gguf.GGUFWriter(None, "llama"), folder / "adapter.gguf")


def certificates(folder):
    make_certificates(folder, 30)


@pytest.mark.parametrize("write", [figures, gguf_adapter, certificates])
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, full_disk, write):
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_init_leaves_no_part_of_its_yaml(tmp_path, full_disk):
    write_model(tmp_path / "model")
    data, out = write_chats(tmp_path / "chats.jsonl", 4), tmp_path / "run.yaml"
    args = ["--model", tmp_path / "model", "--data", data, "--out", out]
    done = CliRunner().invoke(init, [str(arg) for arg in args])
    assert isinstance(done.exception, CheckpointError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "model"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such devices")
def test_no_file_takes_the_place_of_a_pipe_or_a_link(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", b"figures")
    assert os.read(reader, 100) == b"figures" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    (tmp_path / "link").symlink_to(tmp_path / "figures.json")
    write_json_file(output_file("--json", str(tmp_path / "link")), {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "figures.json").read_text()) == {"a": 1}
