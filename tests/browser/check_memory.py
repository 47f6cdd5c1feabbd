"""What a page says that it takes of a GPU is what it takes."""

import pytest
from browser.conftest import DEMO
from browser.python_steps import as_json, examples

from qlora_wgpu.config import load_config
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

RUNS = {
    "plain": [],
    "dora": ["lora.use_dora=true"],
    "bits": ["optim.name=adamw_8bit", "train.gradient_dtype=bfloat16"],
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_the_memory_told_is_taken(browser, name, ask, tmp_path):
    config = load_config(DEMO / "demo.yaml", ["train.per_device_train_batch_size=2", *RUNS[name]])
    site = write_page(config, tmp_path / "site", SiteOptions(kernels="cpu", buckets=(32, 48)))
    rows = examples(200, 24, 48)
    # Rows of both lengths, and prompts of all.
    task = {"rank": 16, "steps": 6, "writes": True, "examples": as_json(rows)}
    found, _ = ask(browser, "shape.html", task, folder=site.folder)
    assert found["bytes"] == found["counted"]["bytes"] == site.memory[16][48]
