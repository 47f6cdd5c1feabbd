"""The page as people use it: a file becomes an adapter, and goes nowhere."""

import json
import subprocess
import sys

import numpy as np
import pytest
from browser.conftest import DEMO, PATCHED, user_task
from browser.drive import Server

from qlora_wgpu.lora import load_adapter

FLOAT32 = ["--model", str(DEMO / "base"), "--compute-dtype", "float32"]


def in_python(command, folder, *more, said=None):
    """What a command writes with an adapter."""
    found = subprocess.run(
        [sys.executable, "-m", "qlora_wgpu", command, *FLOAT32, "--adapter", str(folder), *more],
        input=said, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return found.stdout


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_file_becomes_an_adapter(browser, ask, tmp_path):
    task = user_task(rows=200) | {"epochs": 2}
    found, requested = ask(browser, "page.html", task)
    assert found["rows"].startswith("rows.jsonl: 180 rows to learn from")
    assert found["figures"].startswith("Done, 24 steps. Loss on the rows held out: 3.")
    # What makes no sense yet is not shown.
    assert found["buttons"] == ["load", "train", "send", "again", "weights", "config"]
    # Nothing is asked for once the model is there, nor is anything tried.
    last = max(i for i, path in enumerate(requested) if "weights/" in path)
    assert [path for path in requested[last + 1 :] if "favicon" not in path] == []
    assert found["violations"] == []
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("weights", "config"):
        kind = "safetensors" if name == "weights" else "json"
        part = "model" if name == "weights" else name
        (folder / f"adapter_{part}.{kind}").write_bytes(bytes(found[name]))
    tensors, config = load_adapter(folder)
    assert config.r == 16 and all(np.isfinite(t).all() for t in tensors.values())
    assert json.loads(bytes(found["config"]))["peft_type"] == "LORA"
    # It says in Python what it says in the page, and not what the base says.
    said, asked = found["after"], task["question"]
    assert found["answer"] == (said or "(it says nothing)") and said != found["before"]
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
