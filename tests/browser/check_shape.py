"""A model of SmolLM2-135M's shape, in browsers as in Python; figures are printed (pytest -s)."""

import base64

import numpy as np
import pytest
from browser.conftest import DEMO
from browser.processes import PeakMemory
from browser.python_steps import as_json, examples, in_python, random_model

from qlora_wgpu.bench.workload import config_of
from qlora_wgpu.config import load_config
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

LENGTH = 32
STEPS = 20


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_real_models_shape(browser, ask, tmp_path):
    config = load_config(DEMO / "demo.yaml", [
        f"model.path={random_model(config_of('smollm2-135m'), tmp_path / 'model')}",
        "train.compute_dtype=float32", "train.per_device_train_batch_size=2",
        f"data.max_seq_length={LENGTH}", f"train.max_steps={STEPS}",
    ])  # fmt: skip
    site = write_page(config, tmp_path / "site", SiteOptions(kernels="cpu", buckets=(LENGTH,)))
    rows = examples(config_of("smollm2-135m")["vocab_size"], 40, LENGTH)
    task = {"rank": config.lora.r, "steps": STEPS, "examples": as_json(rows)}
    with PeakMemory() as peak:
        found, _ = ask(browser, "shape.html", task, folder=site.folder, seconds=1800.0)
    first, last = found["times"][0], found["times"][-1]
    tokens = found["figures"][-1]["tokens"] - found["figures"][0]["tokens"]
    memory = site.memory[16][LENGTH]
    print(
        f"\n{browser}: open after {found['opened'] / 1e3:.1f} s, first step {first / 1e3:.1f} s, "
        f"then {1e3 * tokens / (last - first):.1f} tokens/s; device {found['bytes'] / 2**20:.0f} "
        f"MiB of {memory / 2**20:.0f} told, processes {peak.nbytes / 2**20:.0f} MiB"
    )
    assert 0.9 * memory < found["bytes"] <= memory  # texts are not written here
    losses, parameters, _ = in_python(config, rows, STEPS)
    got = np.frombuffer(base64.b64decode(found["parameters"]), np.float32)
    told = [each["loss"] for each in found["figures"]]
    if browser == "firefox":
        assert np.array_equal(got, parameters) and told == losses
    else:  # other sums in the last digits
        assert np.allclose(told, losses, rtol=3e-6, atol=0.0)
        assert np.linalg.norm(got - parameters) < 5e-5 * np.linalg.norm(parameters)
