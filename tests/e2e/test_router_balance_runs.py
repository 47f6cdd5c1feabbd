"""The loss that balances a mixture's experts, from its setting to the log."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from safetensors.numpy import save_file

from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.errors import ConfigError, UnsupportedModelError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.training.checkpoints import RunState

FOLDER = Path(__file__).parents[1] / "references"
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    recorded = np.load(FOLDER / "mixtral-balanced.npz")
    made = tmp_path_factory.mktemp("mixtral")
    config = json.loads(str(recorded["config"]))
    (made / "config.json").write_text(json.dumps({**config, "output_router_logits": False}))
    save_file(weights(json.loads(str(recorded["shapes"])), 0.0), made / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def model(folder, device):
    made = QLoRAModel.from_pretrained(folder, LORA, QuantConfig(scheme="none"), "float32", device)
    made.load_adapter(adapter({n: a.shape for n, a in made.adapter_state_dict().items()}))
    return made


def with_factor(model, factor, ids, labels, mask):
    model.options = replace(model.options, router_aux_loss_coef=factor)
    try:
        return model.loss_and_grads(ids, labels, mask)
    finally:
        model.options = replace(model.options, router_aux_loss_coef=None)


def test_it_is_off_unless_it_is_asked_for(model):
    ids, mask, labels = batch()
    loss, grads = model.loss_and_grads(ids, labels, mask)
    off, same = with_factor(model, 0.0, ids, labels, mask)
    on, other = with_factor(model, 0.5, ids, labels, mask)
    assert loss == off and all(np.array_equal(same[n], a) for n, a in grads.items())
    assert on > loss + 0.5  # at least as many as a token meets, were all alike: 2
    assert any(not np.array_equal(other[n], a) for n, a in grads.items())


def test_padding_counts_nowhere(model):
    """More padding, and other tokens in it, change no bit of the loss."""
    ids, mask, labels = batch()
    loss, _ = with_factor(model, 0.5, ids, labels, mask)
    noise = np.where(mask == 1, ids, (ids + 5) % 50)
    assert with_factor(model, 0.5, noise, labels, mask)[0] == loss
    wider = [np.pad(a, ((0, 0), (0, 9)), constant_values=c)
             for a, c in ((ids, 3), (labels, -100), (mask, 0))]  # fmt: skip
    assert abs(with_factor(model, 0.5, *wider)[0] / loss - 1) <= 1e-6  # sums in another order


def test_packed_samples_count_as_they_do_in_rows(model):
    """Samples packed into a row have the loss and the gradient that they have side by side."""
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 50, (2, 8))
    apart = with_factor(model, 0.5, ids, ids, np.ones((2, 8), int))
    labels = ids.copy()
    labels[:, 0] = -100
    packed = with_factor(
        model, 0.5, ids.reshape(1, 16), labels.reshape(1, 16), np.repeat([[1, 2]], 8, axis=1)
    )
    assert abs(apart[0] - packed[0]) <= 1e-5
    for name, array in apart[1].items():
        assert np.abs(packed[1][name] - array).max() <= 2e-5 * np.abs(array).max()


def run(folder, device, out, accumulation, factor=0.5, **more):
    """Two rows, whose labels are three times as many in one as in the other."""
    rng = np.random.default_rng(7)
    rows = []
    for labels in (12, 4):
        ids = rng.integers(0, 50, 16)
        rows.append({"input_ids": ids, "labels": np.where(np.arange(16) >= 16 - labels, ids, -100)})
    model = QLoRAModel.from_pretrained(folder, LORA, QuantConfig(scheme="none"), "float32", device)
    config = Config(
        model={"path": str(folder)},
        data={"max_seq_length": 16},
        train={
            "max_steps": 2,
            "per_device_train_batch_size": 2 // accumulation,
            "gradient_accumulation_steps": accumulation,
            "router_aux_loss_coef": factor,
        },
        optim={"learning_rate": 1e-6, "lr_scheduler_type": "constant"},
        output={"dir": str(out)},
        **more,
    )
    Trainer(model, config).train(rows)
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return rows, model, logged


def test_micro_batches_are_weighted_by_their_labels(folder, device, tmp_path):
    rows, model, logged = run(folder, device, tmp_path / "a", accumulation=2)
    sums = []
    for row in rows:
        ids, labels = row["input_ids"][None], row["labels"][None]
        plain, _ = with_factor(model, 0.0, ids, labels, None)
        balanced, _ = with_factor(model, 1.0, ids, labels, None)
        count = (labels != -100).sum()
        sums.append((count, count * plain, count * (balanced - plain)))
    count, loss, balance = np.sum(sums, axis=0)
    for row in logged:  # the rate is next to nothing
        assert abs(row["aux_loss"] - balance / count) <= 1e-4
        assert abs(row["loss"] - (loss + 0.5 * balance) / count) <= 1e-4


def test_what_is_logged_is_a_figure_of_its_own(folder, device, tmp_path):
    _, _, logged = run(folder, device, tmp_path / "a", accumulation=1)
    assert all(2.0 < row["aux_loss"] < 5.0 for row in logged)
    _, _, plain = run(folder, device, tmp_path / "b", accumulation=1, factor=None)
    assert "aux_loss" not in plain[0]
    apart = logged[0]["loss"] - plain[0]["loss"]
    assert abs(apart - 0.5 * logged[0]["aux_loss"]) <= 1e-5


@pytest.mark.quick
def test_state_of_older_versions():
    old = json.loads(RunState(window=[(1.0, 2.0, 3.0, 4.0)]).to_json())
    assert RunState.from_json(json.dumps(old), "x").window == [(1.0, 2.0, 3.0, 4.0)]
    old["window"] = [[1.0, 2.0, 3.0]]
    assert RunState.from_json(json.dumps(old), "x").window == [(1.0, 2.0, 3.0, 0.0)]


def architecture(case, **changes):
    config = json.loads(str(np.load(FOLDER / f"{case}.npz")["config"])) | changes
    return find_family(config).read(config)


@pytest.mark.quick
def test_models_without_it_refuse_the_setting():
    with pytest.raises(ConfigError, match=r"train.router_aux_loss_coef = 0.01 is not supported"):
        architecture("llama").balance_coefficient(0.01)
    assert architecture("llama").balance_coefficient(None) == 0
    assert architecture("glm4_moe-experts").balance_coefficient(0.0) == 0
    with pytest.raises(UnsupportedModelError, match="transformers has no load-balancing loss"):
        architecture("glm4_moe-experts", output_router_logits=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "factor"), [("mixtral-experts", 0.001), ("olmoe-experts", 0.01), ("gpt_oss", 0.001)]
)
def test_defaults_are_transformers(case, factor):
    config = json.loads(str(np.load(FOLDER / f"{case}.npz")["config"]))
    config.pop("router_aux_loss_coef", None)
    config.pop("output_router_logits", None)
    assert find_family(config).read(config).balance_coefficient(None) == 0
    config["output_router_logits"] = True
    assert find_family(config).read(config).balance_coefficient(None) == factor
    config["router_aux_loss_coef"] = 0.25
    assert find_family(config).read(config).balance_coefficient(None) == 0.25
    assert find_family(config).read(config).balance_coefficient(0.0) == 0
