"""Steps in browsers against Python's: the same bits in Firefox on this machine's driver."""

import base64

import numpy as np
import pytest
from browser.conftest import DEMO

from qlora_wgpu.config import load_config
from qlora_wgpu.data.examples import Example
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.profile import CPU_PROFILE
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.training.batching import BatchPlan, padded_batch
from qlora_wgpu.training.optimizer import Optimizer
from qlora_wgpu.training.trainer import training_options
from qlora_wgpu.web import SiteOptions

STEPS = 4
# Rows of one length each, rows that are packed, and dropout.
SETTINGS = {
    "plain": [],
    "packed": ["data.packing=true", "optim.lr_scheduler_type=cosine", "optim.warmup_steps=2"],
    "dropout": ["lora.lora_dropout=0.1", "train.gradient_accumulation_steps=2"],
}


def examples(vocab: int) -> list[Example]:
    rng = np.random.default_rng(1)
    made = []
    for _ in range(40):
        ids = rng.integers(0, vocab, int(rng.integers(5, 60))).astype(np.int32)
        made.append(Example(ids, np.where(rng.random(len(ids)) < 0.6, ids, -100).astype(np.int32)))
    return made


def in_python(config, rows):
    """Losses and the adapter after some steps, with the page's kernels."""
    pretrained = Pretrained.open(config.model.path)
    device = Device()
    layout = ModelLayout(
        pretrained, config.lora, config.quant, config.train.compute_dtype, profile=CPU_PROFILE,
        max_binding=128 << 20,
    )  # fmt: skip
    device.profile = CPU_PROFILE
    options = training_options(config.train)
    model = QLoRAModel(layout, device, seed=config.train.seed, options=options)
    plan = BatchPlan.of(np.array([len(row) for row in rows]), config)
    optimizer = Optimizer(model, config.optim, plan.total_steps)
    losses = []
    for step in range(STEPS):
        for index, chosen in enumerate(plan.blocks(step)):
            batch = padded_batch(
                [[rows[i] for i in row] for row in chosen], plan.batch_size,
                config.data.max_seq_length,
            )  # fmt: skip
            model.accumulate(
                *model.checked(batch.input_ids, batch.labels, batch.attention_mask),
                dropout_key=plan.dropout_key(step + 1, index) if model.is_random else None,
            )
        optimizer.step(step + 1)
        sums = model.read_stats()
        model.zero_stats()
        losses.append(float(sums[0]) / float(sums[1]))
    return losses, model.read_flat(model.adapter.parameters)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_steps(browser, name, ask, tmp_path):
    config = load_config(DEMO / "demo.yaml", ["train.compute_dtype=float32", *SETTINGS[name]])
    folder = write_page(config, tmp_path / "site", SiteOptions(kernels="cpu")).folder
    rows = examples(Pretrained.open(config.model.path).architecture.vocab_size)
    given = [{"ids": e.input_ids.tolist(), "labels": e.labels.tolist()} for e in rows]
    # In between, training goes on from a snapshot.
    task = {"rank": config.lora.r, "steps": STEPS, "pause": 2, "examples": given}
    found, _ = ask(browser, "steps.html", task, folder=folder)
    losses, parameters = in_python(config, rows)
    got = np.frombuffer(base64.b64decode(found["parameters"]), np.float32)
    if browser == "firefox":  # the very driver: naga and lavapipe
        assert np.array_equal(got, parameters)
        assert [each["loss"] for each in found["figures"]] == losses
    else:  # Tint and SwiftShader: another compiler and other sums within a subgroup
        off = np.linalg.norm(got - parameters) / np.linalg.norm(parameters)
        assert off < 2e-6, off
