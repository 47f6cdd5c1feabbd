"""An adapter over a base of another name opens, and whatever opens it says so once."""

import re
import warnings

import pytest
from support.commands import run_here

import qlora_wgpu
from e2e.test_cli import CONFIG
from e2e.tiny import write_chats, write_model

TOLD = r"out/adapter was trained on \S*model and is opened on \S*other, which has the same shapes"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 6, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    done = run_here("train", "run.yaml", "train.max_steps=1", cwd=folder)
    assert done.returncode == 0 and "was trained on" not in done.stdout + done.stderr, done.stderr
    (folder / "model").rename(folder / "other")
    return folder


@pytest.fixture
def each_time(monkeypatch):
    """What was told in another test does not count."""
    monkeypatch.setattr("qlora_wgpu.lora.compatibility._warned_of", set())


@pytest.mark.parametrize(
    "command",
    [
        "generate out --model other --prompt a --max-new-tokens 1",
        "eval out model.path=other",
        "merge out --model other --out merged",
        "export out --model other --gguf adapter.gguf --adapter-only",
        "train run.yaml model.path=other lora.init_from=out/adapter output.dir=more "
        "train.max_steps=1",
    ],
)
def test_commands(place, each_time, command):
    done = run_here(*command.split(), cwd=place)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if re.search(TOLD, line)]
    assert len(told) == 1 and told[0].startswith("warning: "), done.stderr


def test_python(place, each_time, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.warns(UserWarning, match=TOLD), qlora_wgpu.open_adapter("out/adapter", "other"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is known now
        with qlora_wgpu.open_adapter("out/adapter", "other") as model:
            model.load_adapter("out/adapter", "again")
