"""What leaves this machine, or stays on it in the clear: nothing that the user did not ask for."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from e2e.tiny import write_chats, write_model

TESTS = Path(__file__).parents[1]
SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123456789"

# Python tells a hook of every connection and every name that is looked up, whoever asks.
GUARDED = """
import sys

def refuse(event, details):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        sys.stderr.write(f"CONNECTS: {event} {details}\\n")
        raise OSError("no connection is to be opened")

sys.addaudithook(refuse)
from qlora_wgpu.cli import run_command
run_command()
"""


def run(place, *args, script=GUARDED):
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        cwd=place, capture_output=True, text=True, timeout=300, check=False,
        env={
            **os.environ, "HF_TOKEN": SECRET,
            "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model and data whose paths have the form of names on the hub."""
    folder = tmp_path_factory.mktemp("privacy")
    for name in ("org", "data"):
        (folder / name).mkdir()
    write_model(folder / "org" / "model")
    write_chats(folder / "data" / "train")
    (folder / "data" / "train").rename(folder / "data" / "train.jsonl")
    config = {
        "model": {"path": "org/model"},
        "data": {"train": "data/train.jsonl", "max_seq_length": 64},
        "lora": {"r": 2},
        "train": {"max_steps": 1},
        "output": {"dir": "out"},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return folder


def test_the_guard_sees_connections(place):
    script = GUARDED.replace("from qlora_wgpu.cli import run_command\nrun_command()", "")
    script += "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')\n"
    assert "CONNECTS: socket." in run(place, script=script).stderr


@pytest.mark.slow
def test_a_local_model_opens_no_connection_and_keeps_no_token(place):
    for args in (("train", "run.yaml"), ("data", "run.yaml")):
        done = run(place, *args)
        assert done.returncode == 0, done.stderr
        assert "CONNECTS" not in done.stderr
        assert SECRET not in done.stdout + done.stderr
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "report.html", "adapter_config.json"} <= {
        path.name for path in files
    }
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_message_of_the_hub_shows_no_token(place, monkeypatch, capsys):
    from qlora_wgpu import cli
    from qlora_wgpu.errors import DataError

    def fail(*_, **__):
        raise DataError(f"cannot be had: https://user:pass@host/?token={SECRET}")

    monkeypatch.setattr("qlora_wgpu.runs.prepare", fail)
    monkeypatch.setattr("qlora_wgpu.cli.commands", deepcopy(cli.commands))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", ["qlora-wgpu", "data", str(place / "run.yaml")])
    with pytest.raises(SystemExit):
        cli.run_command()
    assert "https://***@host/?token=***" in capsys.readouterr().err
