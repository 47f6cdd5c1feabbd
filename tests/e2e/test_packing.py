"""Packed samples: loss and gradients are those of the samples alone."""

import json

import numpy as np
import pytest

from e2e.test_training import config, metrics, opened
from e2e.tiny import VOCAB, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, Trainer

LENGTHS = (7, 12, 1, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, VOCAB, n) for n in LENGTHS]
    labels = [np.where(rng.random(n) < 0.7, i, -100) for n, i in zip(LENGTHS, ids, strict=True)]
    return ids, labels


def packed(parts, fill, length=32):
    row = np.full((1, length), fill)
    row[0, : sum(map(len, parts))] = np.concatenate(parts)
    return row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_gradients_are_those_of_the_samples(folder, device, samples, dtype):
    model = QLoRAModel.from_pretrained(folder, LoraConfig(r=4, lora_alpha=8), None, dtype, device)
    rng = np.random.default_rng(0)
    state = {n: 0.1 * rng.standard_normal(a.shape) for n, a in model.adapter_state_dict().items()}
    model.load_adapter({n: a.astype(np.float32) for n, a in state.items()})
    ids, labels = samples
    mask = packed([np.full(n, i + 1) for i, n in enumerate(LENGTHS)], 0)
    loss, together = model.loss_and_grads(packed(ids, 0), packed(labels, -100), mask)
    total, count, alone = 0.0, 0, dict.fromkeys(state, 0.0)
    for i, t in zip(ids, labels, strict=True):
        each = int((t[1:] != -100).sum())
        one, gradients = model.loss_and_grads(i[None], t[None])
        total, count = total + one * each, count + each
        alone = {n: alone[n] + each * g for n, g in gradients.items()}
    near = 2e-6 if dtype == "float32" else 2e-5  # the same roundings, in sums of another order
    assert abs(loss - total / count) <= near
    for name, gradient in together.items():
        error = np.linalg.norm(gradient - alone[name] / count) / np.linalg.norm(gradient)
        assert error <= 5 * near, (name, error)
    leaking, _ = model.loss_and_grads(packed(ids, 0), packed(labels, -100), np.minimum(mask, 1))
    assert abs(leaking - loss) > 1e-3  # what the numbers of samples are for


def test_a_packed_run_takes_fewer_rows_and_learns_the_same_tokens(folder, device, tmp_path):
    rng = np.random.default_rng(1)
    rows = []
    for _ in range(24):
        ids = (rng.integers(0, VOCAB) + np.arange(rng.integers(3, 14))) % VOCAB
        rows.append({"input_ids": ids.tolist()})
    logs = []
    for packing in (False, True):
        out = tmp_path / str(packing)
        train = {
            "num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1000,
        }  # fmt: skip
        settings = config(folder, out, train=train, data={"packing": packing})
        Trainer(opened(folder, device), settings).train(rows)
        logs.append(metrics(out))
    (plain,), (together,) = logs
    assert plain["num_tokens"] == together["num_tokens"]
    # One step over everything: the same loss and the same gradient.
    assert together["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert together["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
    assert json.dumps(together)
