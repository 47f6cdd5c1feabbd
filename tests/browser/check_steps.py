"""Steps in browsers against Python's: the same bits in Firefox on this machine's driver."""

import base64

import numpy as np
import pytest
from browser.conftest import DEMO
from browser.python_steps import as_json, examples, in_python

from qlora_wgpu.config import load_config
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

STEPS = 4
# Rows of one length each, rows that are packed, and dropout.
SETTINGS = {
    "plain": [],
    "packed": ["data.packing=true", "optim.lr_scheduler_type=cosine", "optim.warmup_steps=2"],
    "dropout": ["lora.lora_dropout=0.1", "train.gradient_accumulation_steps=2"],
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_steps(browser, name, ask, tmp_path):
    config = load_config(DEMO / "demo.yaml", ["train.compute_dtype=float32", *SETTINGS[name]])
    folder = write_page(config, tmp_path / "site", SiteOptions(kernels="cpu")).folder
    rows = examples(Pretrained.open(config.model.path).architecture.vocab_size)
    # In between, training goes on from a snapshot.
    task = {"rank": config.lora.r, "steps": STEPS, "pause": 2, "examples": as_json(rows)}
    found, _ = ask(browser, "steps.html", task, folder=folder)
    losses, parameters, _ = in_python(config, rows, STEPS)
    got = np.frombuffer(base64.b64decode(found["parameters"]), np.float32)
    if browser == "firefox":  # the very driver: naga and lavapipe
        assert np.array_equal(got, parameters)
        assert [each["loss"] for each in found["figures"]] == losses
    else:  # Tint and SwiftShader: another compiler and other sums within a subgroup
        off = np.linalg.norm(got - parameters) / np.linalg.norm(parameters)
        assert off < 2e-6, off
