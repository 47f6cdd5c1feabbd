"""The page as people use it, and what may go wrong."""

import numpy as np
import pytest
from browser.conftest import DEMO, user_task

from qlora_wgpu import QLoRAModel
from qlora_wgpu.lora import load_adapter

PATCHED = b"import './patch.mjs';\nimport './computing.mjs';\n"
ALIASES = {"computing.mjs": "worker.mjs"}
# Time passes faster for the worker, so that it keeps snapshots soon.
HURRIED = b"const now = performance.now.bind(performance);\nperformance.now = () => 200 * now();\n"
LOST = b"""
const open = GPUAdapter.prototype.requestDevice;
let devices = 0;
GPUAdapter.prototype.requestDevice = async function (...given) {
  const device = await open.apply(this, given);
  if (devices++ === 0) setTimeout(() => device.destroy(), 6000);
  return device;
};
"""
FULL = b"""
FileSystemSyncAccessHandle.prototype.write = () => {
  throw new DOMException('', 'QuotaExceededError');
};
"""


def adapter(found, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(found["weights"]))
    (folder / "adapter_config.json").write_bytes(bytes(found["config"]))
    return folder


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_file_becomes_an_adapter(browser, ask, tmp_path):
    found, requested = ask(browser, "page.html", user_task())
    assert found["rows"].startswith("rows.jsonl: 54 rows to learn from")
    assert found["figures"].startswith("Done, 4 steps. Held-out loss:")
    assert found["answer"]
    folder = adapter(found, tmp_path)
    tensors, config = load_adapter(folder)
    assert config.r == 16 and all(np.isfinite(t).all() for t in tensors.values())
    with QLoRAModel.from_pretrained(DEMO / "base", adapter=folder) as model:
        assert model.adapter.num_parameters == sum(t.size for t in tensors.values())
    # Nothing is asked for once the model is there.
    last = max(i for i, path in enumerate(requested) if "weights/" in path)
    assert [path for path in requested[last + 1 :] if "favicon" not in path] == []


def test_a_reload_goes_on_with_the_same_bits(ask):
    task = user_task(rows=200)
    patched = {"worker.mjs": PATCHED, "patch.mjs": HURRIED}
    whole, _ = ask("firefox", "page.html", task)
    found, _ = ask("firefox", "page.html", task | {"reload": 5}, patched, ALIASES)
    assert "is kept from before, at step" in found["kept"]
    assert found["weights"] == whole["weights"]


def test_a_stop_goes_on_with_the_same_bits(ask):
    task = user_task(rows=100)
    whole, _ = ask("firefox", "page.html", task)
    found, _ = ask("firefox", "page.html", task | {"stop": True})
    assert found["kept"].startswith("Stopped after step")
    assert found["weights"] == whole["weights"]


def test_a_lost_device_is_told_and_training_goes_on(ask):
    task = user_task(rows=400)
    whole, _ = ask("firefox", "page.html", task)
    patched = {"worker.mjs": PATCHED, "patch.mjs": LOST}
    found, _ = ask(
        "firefox", "page.html", task | {"tolerates": "Training goes on"}, patched, ALIASES
    )
    assert found["told"] and found["told"][0].startswith("The GPU was lost")
    assert found["weights"] == whole["weights"]


def test_a_full_disk_is_told_and_training_goes_on(ask):
    patched = {"worker.mjs": PATCHED, "patch.mjs": FULL}
    task = user_task() | {"tolerates": "no room for a snapshot"}
    found, _ = ask("firefox", "page.html", task, patched, ALIASES)
    assert found["told"] and found["figures"].startswith("Done")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("picture.png", "\x89PNG", "picture.png is of no known kind"),
        ("rows.jsonl", "{}\n", "a row needs the key 'messages'"),
        ("rows.jsonl", "no JSON\n", "rows.jsonl line 1 is not valid JSON"),
        ("rows.csv", "prompt,completion\na\n", "it has 1 cells"),
        ("rows.json", "[]", "has no rows"),
    ],
)
def test_a_file_that_is_no_data_is_told(ask, name, text, told):
    with pytest.raises(AssertionError, match=told):
        ask("firefox", "page.html", user_task() | {"name": name, "text": text})


def test_a_truncated_weight_file_is_told(ask, site):
    content = (site / "weights" / "000.bin").read_bytes()
    with pytest.raises(AssertionError, match="it was not copied whole"):
        ask("firefox", "page.html", user_task(), {"weights/000.bin": content[:-512]})
    with pytest.raises(AssertionError, match=r"weights/000.bin is damaged"):
        ask("firefox", "page.html", user_task(), {"weights/000.bin": content[:-4] + b"\1\2\3\4"})


@pytest.mark.parametrize(
    ("module", "told"),
    [("chart.mjs", "The page does not run"), ("memory.mjs", "The page's worker does not run")],
)
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_damaged_module_is_told(ask, browser, module, told):
    with pytest.raises(AssertionError, match=told):
        ask(browser, "page.html", user_task(), {module: b"const text = 'it's damaged';"})


@pytest.mark.parametrize(
    ("browser", "remedy"), [("firefox", "about:config"), ("chromium", "flags")]
)
def test_no_webgpu_is_told_with_what_to_switch_on(ask, browser, remedy):
    with pytest.raises(AssertionError, match=remedy):
        ask(browser, "page.html", user_task(), webgpu=False)
