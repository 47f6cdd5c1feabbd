"""The numbers that the Python API gives: logits, losses and gradients."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from e2e.biased_model import EXACT, LLAMA3, biased_folder, close, opened, sample
from e2e.numpy_llama import llama_logits, mean_loss
from e2e.tiny import VOCAB, write_model
from qlora_wgpu import LoraConfig, QuantConfig
from qlora_wgpu.gpu.device import Device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return biased_folder(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def model(folder, device):
    return opened(folder, device)


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("scheme", ["none", "nf4"])
def test_gradient_is_the_slope_of_the_loss(folder, device, scheme):
    model = opened(folder, device, quant=QuantConfig(scheme=scheme))
    ids, labels = sample()
    _, gradients = model.loss_and_grads(ids, labels)
    state = model.adapter_state_dict()
    rng = np.random.default_rng(5)
    direction = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in state.items()}

    def loss(h):
        model.load_adapter({n: a + np.float32(h) * direction[n] for n, a in state.items()})
        total, count, _ = model.summed_loss([(ids, labels, None)])
        return total / count

    h = 3e-3
    near, far = ((loss(x) - loss(-x)) / (2 * x) for x in (h, 2 * h))
    model.load_adapter(state)
    slope = (4 * near - far) / 3  # Richardson: without the error in h squared
    expected = sum(float(np.sum(gradients[n] * direction[n])) for n in state)
    # Differences of a float32 loss near 4: rounding 5e-7 / h.
    assert abs(slope - expected) <= 1e-3 * (1 + abs(expected))


@pytest.mark.parametrize("scheme", ["none", "nf4"])
def test_micro_batches_equal_one_batch(folder, device, scheme):
    model = opened(folder, device, quant=QuantConfig(scheme=scheme))
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


@pytest.mark.parametrize("options", [EXACT, {"quant": QuantConfig(), "compute_dtype": "bfloat16"}])
def test_checkpointing_gives_the_same_bits(folder, device, options):
    ids, labels = sample(2, 33)
    kept, freed = (
        opened(folder, device, gradient_checkpointing=c, **options) for c in (False, True)
    )
    results = [m.loss_and_grads(ids, labels) for m in (kept, freed)]
    assert results[0][0] == results[1][0]
    for name, array in results[0][1].items():
        assert np.array_equal(array, results[1][1][name]), name
    bytes_of = [m.program("train", 2, 33).plan.activation_bytes for m in (kept, freed)]
    assert bytes_of[1] < bytes_of[0]


def test_checkpointing_lowers_what_the_device_holds(tmp_path):
    folder = write_model(tmp_path / "m", num_hidden_layers=6)
    taken = []
    for checkpointing in (False, True):
        fresh = Device()
        model = opened(folder, fresh, gradient_checkpointing=checkpointing)
        model.loss_and_grads(*sample(2, 64))
        taken.append(fresh.memory.by_kind["activations"])
        assert taken[-1] == model.program("train", 2, 64).plan.activation_bytes
    assert taken[1] < 0.5 * taken[0], taken


def test_dropout_is_the_same_when_recomputed(folder, device):
    lora = LoraConfig(r=5, lora_alpha=10, lora_dropout=0.3)
    flats = []
    for checkpointing in (False, True):
        model = opened(folder, device, lora, gradient_checkpointing=checkpointing)
        model.zero_gradient()
        model.accumulate(*model.checked(*sample(2, 33)), dropout_key=12345)
        flats.append(model.read_flat(model.adapter.gradient).copy())
        model.zero_gradient()
    assert np.array_equal(flats[0], flats[1]) and flats[0].any()


@pytest.mark.full
def test_row_shards_change_nothing(folder, model, device, monkeypatch):
    ids, labels = sample()
    expected = model.loss_and_grads(ids, labels)
    logits = model.logits(ids)
    monkeypatch.setattr(Device, "max_binding", property(lambda self: 4 * 1024))
    monkeypatch.setattr(Device, "buffer", _unlimited(Device.buffer))
    sharded = opened(folder, device)
    assert len(list(sharded.layout.modules.head.shards(sharded.layout.new_graph()))) > 1
    assert np.abs(sharded.logits(ids) - logits).max() < 1e-5
    close(sharded.loss_and_grads(ids, labels)[1], expected[1], 3e-6)


def _unlimited(original):
    def buffer(self, nbytes, kind, label="", *, bound=True):
        return self.raw.create_buffer(size=max(nbytes + -nbytes % 4, 16), usage=0x8C | 0x40)

    return buffer


ODD = {"hidden_size": 60, "head_dim": 6, "num_key_value_heads": 1, "intermediate_size": 7}


VARIANTS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim from hidden": {"head_dim": None},
    "no GQA": {"num_key_value_heads": None},
    "one kv head": {"num_key_value_heads": 1},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "new rope keys": {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e4}},
    "rope theta null": {"rope_theta": None},
    "odd sizes": ODD,
    "one layer": {"num_hidden_layers": 1, "vocab_size": 7, "rms_norm_eps": 1e-3},
    "narrower than a unit of eight": {"hidden_size": 4, "intermediate_size": 3, "mlp_bias": True},
}


@pytest.mark.quick
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_and_loss_are_those_of_float64(tmp_path, device, variant):
    folder = write_model(tmp_path / "m", **VARIANTS[variant])
    config = json.loads((folder / "config.json").read_text())
    rslora = LoraConfig(r=5, lora_alpha=10, use_rslora=variant == "untied")
    small = opened(folder, device, rslora)
    ids, labels = sample()
    ids, labels = ids % config["vocab_size"], np.where(labels < 0, -100, ids % config["vocab_size"])
    mask = np.ones_like(ids)
    mask[1, 13:], labels[1, 13:] = 0, -100
    expected = llama_logits(
        config, load_file(folder / "model.safetensors"), ids, mask, small.adapter_state_dict(),
        10 / 5**0.5 if variant == "untied" else 2.0,
    )  # fmt: skip
    logits = small.logits(ids, mask)
    assert logits.shape == expected.shape and logits.dtype == np.float32
    real = mask != 0
    assert np.abs(logits[real] - expected[real]).max() < 2e-5 * np.abs(expected).max()
    loss, gradients = small.loss_and_grads(ids, labels, mask)
    assert loss == pytest.approx(mean_loss(expected, labels), rel=2e-6)
    assert all(np.isfinite(a).all() and a.any() for a in gradients.values())


@pytest.mark.parametrize("quant", [{}, {"blocksize": 32}, {"double_quant": False}])
def test_nf4_computes_with_the_weights_it_shows(folder, device, quant):
    """Together with the recorded codes: what the device holds is what it multiplies by."""
    model = opened(folder, device, quant=QuantConfig(**quant))
    config = json.loads((folder / "config.json").read_text())
    ids, labels = sample()
    state = model.base_state_dict()
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    error = np.linalg.norm(state[name] - stored[name]) / np.linalg.norm(stored[name])
    assert 0.05 < error < 0.12
    flat = {n: array.reshape(stored[n].shape) for n, array in state.items()}
    expected = llama_logits(config, flat, ids, None, model.adapter_state_dict(), 2.0)
    assert np.abs(model.logits(ids) - expected).max() < 2e-5 * np.abs(expected).max()
    assert model.loss_and_grads(ids, labels)[0] == pytest.approx(mean_loss(expected, labels), 2e-6)


def test_rows_do_not_see_each_other(model):
    ids, labels = sample(3)
    logits, (loss, _) = model.logits(ids), model.loss_and_grads(ids, labels)
    other = ids.copy()
    other[1] = (other[1] + 1) % VOCAB
    changed = model.logits(other)
    assert np.array_equal(changed[[0, 2]], logits[[0, 2]])
    assert np.abs(changed[1] - logits[1]).max() > 0.01
    one_by_one = [model.summed_loss([(ids[i : i + 1], labels[i : i + 1], None)]) for i in range(3)]
    total, count, _ = (sum(part) for part in zip(*one_by_one, strict=True))
    assert total / count == pytest.approx(loss, rel=1e-6)


@pytest.mark.quick
def test_the_future_is_not_seen(model):
    ids, _ = sample(1)
    other = ids.copy()
    other[0, 11:] = (other[0, 11:] + 1) % VOCAB
    before, after = model.logits(ids)[0], model.logits(other)[0]
    assert np.array_equal(before[:11], after[:11])
    assert np.abs(before[11:] - after[11:]).max() > 0.01
