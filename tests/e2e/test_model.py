"""The model as a user of the Python API meets it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from e2e.tiny import VOCAB, weights, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.errors import (
    CheckpointError,
    ConfigError,
    ShapeError,
    UnsupportedModelError,
)
from qlora_wgpu.gpu.device import Device

LORA = LoraConfig(r=5, lora_alpha=10)
EXACT = {"quant": QuantConfig(scheme="none"), "compute_dtype": "float32"}


def opened(folder, device, lora=LORA, **options):
    """A model whose B is not zero, so that every path shows."""
    model = QLoRAModel.from_pretrained(folder, lora, device=device, **{**EXACT, **options})
    rng = np.random.default_rng(3)
    state = model.adapter_state_dict()
    model.load_adapter(
        {n: (0.1 * rng.standard_normal(a.shape)).astype(np.float32) for n, a in state.items()}
    )
    return model


def sample(batch=3, seq=19, seed=1):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (batch, seq))
    labels = np.where(rng.random((batch, seq)) < 0.6, ids, -100)
    return ids, labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "biased", attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def model(folder, device):
    return opened(folder, device)


def close(a, b, tolerance=2e-5):
    assert set(a) == set(b)
    for name in a:
        error = np.linalg.norm(a[name] - b[name])
        assert error <= tolerance * (np.linalg.norm(b[name]) + 1e-6), name


def test_gradient_is_the_slope_of_the_loss(model):
    ids, labels = sample()
    _, gradients = model.loss_and_grads(ids, labels)
    state = model.adapter_state_dict()
    rng = np.random.default_rng(5)
    direction = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in state.items()}
    h, values = 3e-3, []
    for sign in (1, -1):
        model.load_adapter({n: a + np.float32(sign * h) * direction[n] for n, a in state.items()})
        total, count = model.summed_loss([(ids, labels, None)])
        values.append(total / count)
    model.load_adapter(state)
    slope = (values[0] - values[1]) / (2 * h)
    expected = sum(float(np.sum(gradients[n] * direction[n])) for n in state)
    # Differences of a float32 loss near 4: rounding 5e-7 / h, and h squared.
    assert abs(slope - expected) <= 1e-3 * (1 + abs(expected))


def test_micro_batches_equal_one_batch(model):
    ids, labels = sample(4)
    labels[1] = -100
    labels[2, 5:] = -100
    loss, whole = model.loss_and_grads(ids, labels)
    model.zero_gradient()
    count = sum(
        model.accumulate(*model.checked(ids[i : i + 1], labels[i : i + 1])) for i in range(4)
    )
    flat = model.read_flat(model.adapter.gradient) / np.float32(count)
    stats = model.read_stats()
    model.zero_gradient()
    assert abs(stats[0] / count - loss) < 1e-6 * loss
    close(model.adapter.split(flat), whole, 3e-6)


def test_no_label_is_no_division_by_zero(model):
    ids, _ = sample()
    loss, gradients = model.loss_and_grads(ids, np.full_like(ids, -100))
    assert loss == 0
    assert all(not array.any() for array in gradients.values())


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(model, side):
    ids, labels = sample(1, 12)
    loss, gradients = model.loss_and_grads(ids, labels)
    pad = ((0, 0), (0, 7) if side == "right" else (7, 0))
    mask = np.pad(np.ones_like(ids), pad)
    padded = model.loss_and_grads(np.pad(ids, pad), np.pad(labels, pad, constant_values=-100), mask)
    assert abs(loss - padded[0]) < 2e-5 * loss
    # Left padding moves the positions, which turns q and k alike: equal up to rounding.
    close(padded[1], gradients, 2e-4 if side == "left" else 3e-6)


def test_checkpointing_gives_the_same_bits(folder, device):
    ids, labels = sample(2, 33)
    kept, freed = (opened(folder, device, gradient_checkpointing=c) for c in (False, True))
    results = [m.loss_and_grads(ids, labels) for m in (kept, freed)]
    assert results[0][0] == results[1][0]
    for name, array in results[0][1].items():
        assert np.array_equal(array, results[1][1][name]), name
    bytes_of = [m.program("train", 2, 33).plan.activation_bytes for m in (kept, freed)]
    assert bytes_of[1] < bytes_of[0]


def test_row_shards_change_nothing(folder, model, device, monkeypatch):
    ids, labels = sample()
    expected = model.loss_and_grads(ids, labels)
    logits = model.logits(ids)
    monkeypatch.setattr(Device, "max_binding", property(lambda self: 4 * 1024))
    monkeypatch.setattr(Device, "buffer", _unlimited(Device.buffer))
    sharded = opened(folder, device)
    assert len(list(sharded.network.modules.head.shards(sharded.new_graph()))) > 1
    assert np.abs(sharded.logits(ids) - logits).max() < 1e-5
    close(sharded.loss_and_grads(ids, labels)[1], expected[1], 3e-6)


def _unlimited(original):
    def buffer(self, nbytes, kind, label=""):
        return self.raw.create_buffer(size=max(nbytes + -nbytes % 4, 16), usage=0x8C | 0x40)

    return buffer


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"head_dim": None},
        {"num_key_value_heads": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"hidden_size": 60, "head_dim": 6, "num_key_value_heads": 1, "intermediate_size": 7},
    ],
)  # fmt: skip
def test_variants_train(tmp_path, device, changes):
    small = opened(write_model(tmp_path / "m", **changes), device)
    ids, labels = sample()
    loss, gradients = small.loss_and_grads(ids, labels)
    assert 2 < loss < 10
    assert all(np.isfinite(a).all() and a.any() for a in gradients.values())


def test_storage_forms_give_one_model(tmp_path, device):
    ids, _ = sample()
    half = write_model(tmp_path / "f16", store=np.float16)
    tensors = {n: a.astype(np.float32) for n, a in load_file(half / "model.safetensors").items()}
    logits = opened(half, device).logits(ids)
    widened = write_model(tmp_path / "f32")
    tensors["lm_head.weight"] = tensors.pop(
        "model.embed_tokens.weight"
    )  # the tied one's other name
    names = sorted(tensors)
    (widened / "model.safetensors").unlink()
    index = {}
    for i in range(2):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names[i::2]}, widened / file)
        index |= dict.fromkeys(names[i::2], file)
    (widened / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert np.array_equal(opened(widened, device).logits(ids), logits)


def test_base_state_dict_is_what_was_stored(folder, model):
    stored = load_file(folder / "model.safetensors")
    state = model.base_state_dict()
    assert set(state) == set(stored)
    for name, array in stored.items():
        assert np.array_equal(np.squeeze(state[name]), array), name


def test_adapter_round_trip_and_names(tmp_path, model, folder, device):
    model.save_adapter(tmp_path / "a")
    state = model.adapter_state_dict()
    prefix = "base_model.model.model.layers.1.self_attn.k_proj"
    assert state[f"{prefix}.lora_A.weight"].shape == (5, 36)
    assert state[f"{prefix}.lora_B.weight"].shape == (20, 5)
    assert len(state) == 2 * 7 * 2
    again = QLoRAModel.from_pretrained(folder, LORA, device=device, **EXACT)
    again.load_adapter(tmp_path / "a")
    for name, array in again.adapter_state_dict().items():
        assert np.array_equal(array, state[name])
    other = QLoRAModel.from_pretrained(
        folder, LoraConfig(r=5, lora_alpha=11), device=device, **EXACT
    )
    with pytest.raises(CheckpointError, match="lora_alpha"):
        other.load_adapter(tmp_path / "a")


def test_target_modules(folder, device):
    only = QLoRAModel.from_pretrained(
        folder, LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"]), device=device, **EXACT
    )
    names = set(only.adapter_state_dict())
    assert len(names) == 4 and all(".v_proj." in n for n in names)
    loss, gradients = only.loss_and_grads(*sample())
    assert set(gradients) == names and loss > 0
    with pytest.raises(ConfigError, match="did you mean 'q_proj'"):
        QLoRAModel.from_pretrained(
            folder, LoraConfig(target_modules=["q_prj"]), device=device, **EXACT
        )


@pytest.mark.parametrize(
    ("ids", "labels", "mask", "message"),
    [
        (np.zeros(4, int), np.zeros(4, int), None, "shape"),
        (np.zeros((1, 4)), np.zeros((1, 4), int), None, "integers"),
        (np.full((1, 4), VOCAB), np.zeros((1, 4), int), None, "vocab"),
        (np.full((1, 4), -1), np.zeros((1, 4), int), None, "input_ids must be from 0"),
        (np.zeros((1, 4), int), np.zeros((1, 5), int), None, "labels"),
        (np.zeros((1, 4), int), np.full((1, 4), -1), None, "labels must be"),
        (np.zeros((1, 4), int), np.zeros((1, 4), int), np.full((1, 4), 2), "0 and 1"),
        (np.zeros((1, 4), int), np.zeros((1, 4), int), np.ones((1, 3), int), "attention_mask"),
    ],
)
def test_wrong_inputs(model, ids, labels, mask, message):
    with pytest.raises(ShapeError, match=message):
        model.loss_and_grads(ids, labels, mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_size": "36"}, "hidden_size"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, device, changes, message):
    folder = write_model(tmp_path / "m")
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message):
        QLoRAModel.from_pretrained(folder, device=device)


def test_weights_that_do_not_fit_are_refused(tmp_path, device):
    folder = write_model(tmp_path / "m")
    tensors = weights(json.loads((folder / "config.json").read_text()))
    name = "model.layers.0.mlp.up_proj.weight"
    for change, message in (
        ({name: tensors[name][:-1]}, "up_proj.weight has shape"),
        ({name: np.full_like(tensors[name], np.nan)}, "up_proj"),
        ({"model.layers.0.mlp.up_proj.bias": np.ones(52, np.float32)}, "no bias"),
    ):
        save_file({**tensors, **change}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            QLoRAModel.from_pretrained(folder, device=device)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="up_proj"):
        QLoRAModel.from_pretrained(folder, device=device)
