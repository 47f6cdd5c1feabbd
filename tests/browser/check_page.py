"""The page as people use it: a file becomes an adapter, and goes nowhere."""

import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from browser.conftest import DEMO, PATCHED, user_task
from browser.drive import Server

from qlora_wgpu.config import load_config
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

FLOAT32 = ["--model", str(DEMO / "base"), "--compute-dtype", "float32"]


def in_python(command, folder, *more, said=None):
    """What a command writes with an adapter."""
    found = subprocess.run(
        [sys.executable, "-m", "qlora_wgpu", command, *FLOAT32, "--adapter", str(folder), *more],
        input=said, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return found.stdout


def unpacked(found, into):
    """The adapter's folder that was saved."""
    with zipfile.ZipFile(io.BytesIO(bytes(found["folder"]))) as archive:
        assert archive.testzip() is None
        archive.extractall(into)
    return into / "adapter"


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_file_becomes_an_adapter(browser, ask, tmp_path):
    task = user_task(rows=200) | {"epochs": 2}
    found, requested = ask(browser, "page.html", task)
    assert found["rows"].startswith("rows.jsonl: 180 rows to train on")
    assert found["figures"].startswith("Done, 24 steps. Held-out loss: 3.")
    # What makes no sense yet is not shown.
    assert found["buttons"] == ["load", "train", "send", "again", "folder", "weights", "config"]
    # Nothing is asked for once the model is there, nor is anything tried.
    last = max(i for i, path in enumerate(requested) if "weights/" in path)
    assert [path for path in requested[last + 1 :] if "favicon" not in path] == []
    assert found["violations"] == []
    folder = unpacked(found, tmp_path)
    tensors, config = load_adapter(folder)
    assert config.r == 16 and all(np.isfinite(t).all() for t in tensors.values())
    assert json.loads(bytes(found["config"]))["peft_type"] == "LORA"
    assert (folder / "adapter_model.safetensors").read_bytes() == bytes(found["weights"])
    assert (folder / "adapter_config.json").read_bytes() == bytes(found["config"])
    # It says in Python what it says in the page, and not what the base says.
    said, asked = found["after"], task["question"]
    assert found["answer"] == said != found["before"]
    assert found["before"].endswith(" …")  # the base goes on and on: a sample has 60 tokens
    assert in_python("generate", folder, "--chat", "--prompt", asked).strip() == said.strip()
    assert said.strip() in in_python("chat", folder, said=f"{asked}\n")


KINDS = [
    ["messages"],
    ["conversations"],
    ["prompt", "completion"],
    ["instruction", "input", "output"],
    ["text"],
]


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_rows_of_instructions_are_asked_so_afterwards(browser, ask, tmp_path):
    # Their prompts are longer than the demo's rows.
    config = load_config(DEMO / "demo.yaml", [
        "train.compute_dtype=float32", "data.max_seq_length=192",
        "train.per_device_train_batch_size=2",
    ])  # fmt: skip
    options = SiteOptions(kernels="cpu", buckets=(192,))
    site = write_page(config, tmp_path / "site", options).folder
    chats = [json.loads(line)["messages"] for line in user_task(rows=30)["text"].splitlines()]
    rows = [{"instruction": chat[0]["content"], "output": chat[1]["content"]} for chat in chats]
    # Which is asked has no input: that is a part of the prompt. Other columns are none.
    rows = [{**row, "input": "", "prompt": "all of it"} for row in rows]
    rows[0]["input"] = "Ben."
    task = user_task() | {"text": "".join(json.dumps(row) + "\n" for row in rows), "kinds": True}
    found, _ = ask(browser, "page.html", task, folder=site)
    # What the page shows of each kind is what it takes.
    assert [kind["shown"] for kind in found["kinds"]] == KINDS
    assert all("4 rows to train on" in kind["rows"] for kind in found["kinds"])
    assert found["asked"] == rows[1]["instruction"] != rows[0]["instruction"]
    folder = unpacked(found, tmp_path)
    assert json.loads((folder / "prompt_format.json").read_text())["prompt_format"] == "alpaca"
    said, asked = found["answer"], task["question"]
    assert said != found["before"]
    assert in_python("generate", folder, "--chat", "--prompt", asked).strip() == said.strip()
    assert said.strip() in in_python("chat", folder, said=f"{asked}\n")


TALKATIVE = b"""
setInterval(() => {
  fetch('http://127.0.0.1:%d/data').catch(() => {});
  try { new WebSocket('ws://127.0.0.1:%d/data'); } catch { }
}, 300);
"""


@pytest.mark.parametrize("module", ["page", "worker"])
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_nothing_could_leave_the_machine(browser, module, ask, tmp_path):
    other = Server([tmp_path])
    port = int(other.url.rpartition(":")[2])
    files = {
        "page": {"app.mjs": PATCHED % (b"patch.mjs", b"own.mjs")},
        "worker": {"worker.mjs": PATCHED % (b"patch.mjs", b"own.mjs")},
    }[module] | {"patch.mjs": TALKATIVE % (port, port)}
    aliases = {"own.mjs": "app.mjs" if module == "page" else "worker.mjs"}
    try:
        found, _ = ask(browser, "page.html", {"only": "load"}, files, aliases)
    finally:
        other.close()
    assert other.requested == []
    if module == "page":  # what a worker was refused its page does not hear of
        assert f"http://127.0.0.1:{port}" in "".join(found["violations"])
