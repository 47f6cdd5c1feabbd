"""What the operating system refuses a command: one sentence and exit code 2."""

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
from e2e.tiny import write_chats, write_model
from support.commands import run_here

from qlora_wgpu.cli._options import output_file, positive_integer, read_bytes
from qlora_wgpu.cli._terminal import Terminal, write, write_json
from qlora_wgpu.errors import ConfigError, DeviceError, QLoRAError, shell_word
from qlora_wgpu.gpu.adapters import list_adapters
from qlora_wgpu.supervision.streams import Output


class Full(io.StringIO):
    """A log on a disk that is full."""

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told(*args, cwd):
    done = run_here(*args, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("x" * 300, "adapter_config.json: File name too long"),
        (
            "~nobody-of-that-name/run",
            "a path starts with ~, but that home directory does",
        ),
        ("", "there is no run, adapter or model in ''"),
    ],
)
def test_runs_that_cannot_be_looked_for(tmp_path, run, message):
    assert message in told("generate", run, "--prompt", "hi", cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "Hello there"), "argument (Hello there). Pass a prompt with --prompt\n"),
        (("Where", "is", "Ben?"), "arguments (is Ben?). Pass a prompt with --prompt\n"),
        (("Hello there",), "pass either --prompt TEXT or --prompts FILE\n"),
    ],
)
def test_a_text_without_its_option(tmp_path, arguments, message):
    done = run_here("generate", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.endswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "run", "a.gguf"), "(a.gguf). Pass the output file with --gguf\n"),
        (("merge", "run", "new"), "(new). Pass the output folder with --out\n"),
        (
            ("init", "model", "a.jsonl"),
            ". Pass model and data with --model and --data, or a config with --from\n",
        ),
        (("watch", "run", "other"), "argument (other)\n"),
    ],
)
def test_a_place_without_its_option(tmp_path, arguments, message):
    done = run_here(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.endswith(message)


@pytest.mark.skipif(os.name != "posix", reason="others keep a folder that a process is in")
def test_a_working_directory_that_is_removed_meanwhile(tmp_path, monkeypatch):
    folder = tmp_path / "gone"

    def removed(*_):
        folder.rmdir()
        Path.cwd()

    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qlora_wgpu.cli.generate.OpenedModel.open", removed)
    found = told("generate", "--model", "model", "--prompt", "hi", cwd=folder)
    assert found == "error: the working directory no longer exists: change to another\n"


def test_a_folder_that_may_not_be_looked_into(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "locked/adapter")

    monkeypatch.setattr("qlora_wgpu.cli.generate.OpenedModel.open", refused)
    found = told("generate", "--model", "locked", "--prompt", "hi", cwd=tmp_path)
    assert found == "error: locked/adapter: Permission denied\n"


@pytest.mark.parametrize("show", [write, write_json, lambda text: Terminal().print(text)])
def test_what_is_shown_on_a_disk_that_is_full(monkeypatch, show):
    monkeypatch.setattr(sys, "stdout", Output(Full()))
    with pytest.raises(QLoRAError, match=r"to the standard output: No space left"):
        show("text")


def test_a_pipe_that_nobody_reads_is_no_error_of_ours(monkeypatch):
    full = Full()
    full.flush = lambda: (_ for _ in ()).throw(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    monkeypatch.setattr(sys, "stdout", Output(full))
    with pytest.raises(SystemExit) as end:
        write("text")
    assert end.value.code == 0
    Terminal().print("text")


def test_another_pipe_that_breaks_is_an_error(tmp_path, monkeypatch):
    def broken(*_):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("qlora_wgpu.cli.generate.OpenedModel.open", broken)
    found = told("generate", "--model", "model", "--prompt", "hi", cwd=tmp_path)
    assert found == "error: a connection was closed by the other end: Broken pipe\n"


def test_a_line_that_is_not_text(tmp_path, monkeypatch):
    write_model(tmp_path / "model")
    piped = io.TextIOWrapper(io.BytesIO(b"\xff\xfe hi\n"), "utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", piped)
    done = run_here("chat", "--model", "model", "--chat-template", "chatml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("error: the input is not valid utf-8\n")


def test_commands_to_be_copied_are_quoted(tmp_path):
    write_model(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", 4)
    args = ("--model", "model", "--data", "chats.jsonl", "--out")
    assert "--out '' must end in .yaml" in told("init", *args, "", cwd=tmp_path)
    done = run_here("init", *args, "my run.yaml", cwd=tmp_path)
    assert done.returncode == 0 and f"`qlora-wgpu train {shell_word('my run.yaml')}`" in done.stdout


def test_numbers_and_files_of_options(tmp_path, monkeypatch):
    assert positive_integer("--port", "65535", 65_535) == 65_535
    for call, message in (
        (lambda: positive_integer("--port", "65536", 65_535), "--port must be at most 65,535"),
        (lambda: positive_integer("--port", "9" * 5000), "--port must be a positive integer"),
        (lambda: read_bytes("--memory", "0"), "--memory must be a size such as"),
        (
            lambda: output_file("--json", ""),
            "--json must be a file name such as results.json",
        ),
        (lambda: output_file("--json", str(tmp_path)), "must be a file name"),
        (lambda: output_file("--json", str(tmp_path / "a" / "b")), "does not exist"),
    ):
        with pytest.raises(ConfigError, match=message) as refusal:
            call()
        assert len(str(refusal.value)) < 400
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be written: permission denied"):
        output_file("--json", str(tmp_path / "figures.json"))


def test_figures_of_an_estimate(tmp_path):
    write_model(tmp_path / "model")
    rank = told("estimate", "model", "--rank", "5000", cwd=tmp_path)
    assert rank == "error: --rank must be at most 4,096, got 5000\n"
    assert "a does not exist" in told("estimate", "model", "--json", "a/b.json", cwd=tmp_path)
    done = run_here("estimate", "model", "--json", "b.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "b.json").read_text())["rank"] == 16


def test_the_variable_that_names_a_backend_is_told(monkeypatch):
    monkeypatch.setenv("QLORA_WGPU_BACKEND", "nonsense")
    with pytest.raises(
        DeviceError, match=r"unknown backend 'nonsense' \(QLORA_WGPU_BACKEND\): set"
    ):
        list_adapters()
