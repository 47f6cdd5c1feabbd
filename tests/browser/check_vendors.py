"""A page takes the plans that are cut for its GPU's vendor, and trains by them as by the others."""

import pytest
from browser.conftest import DEMO
from browser.python_steps import as_json, examples

from qlora_wgpu.config import load_config
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

MODEL = {"model.mjs": b"import './patch.mjs';\nexport * from './opened.mjs';\n"}
ALIASES = {"opened.mjs": "model.mjs"}
VENDOR = (
    b"Object.defineProperty(GPUAdapter.prototype, 'info', { get: () => ({ vendor: '%b' }) });\n"
)
FOLDERS = {b"intel": "r16-few-registers", b"apple": "r16-few-registers", b"nvidia": "r16"}


def test_plans_are_those_of_the_vendor(ask, tmp_path):
    """In Firefox: Chromium's software GPU compiles a GPU's kernels for minutes."""
    config = load_config(
        DEMO / "demo.yaml", ["train.compute_dtype=float32", "train.per_device_train_batch_size=2"]
    )
    site = write_page(config, tmp_path / "site", SiteOptions(buckets=(32,)))
    task = {"rank": 16, "steps": 2, "examples": as_json(examples(200, 24, 8))}
    losses = []
    for vendor, folder in FOLDERS.items():
        over = MODEL | {"patch.mjs": VENDOR % vendor}
        found, requested = ask("firefox", "shape.html", task, over, ALIASES, folder=site.folder)
        plans = {path.split("/")[-2] for path in requested if path.endswith("variant.plan")}
        assert plans == {folder}
        losses.append([figures["loss"] for figures in found["figures"]])
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)
