"""What the Python API takes, and what it refuses by name: inputs, weights of labels, files."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from e2e.biased_model import LLAMA3, biased_folder, opened
from e2e.tiny import VOCAB, weights, write_model
from qlora_wgpu import QLoRAModel
from qlora_wgpu.errors import (
    CheckpointError,
    ShapeError,
    UnsupportedModelError,
)

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return biased_folder(tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def model(folder, device):
    return opened(folder, device)


@pytest.mark.slow
def test_weights_of_labels(model):
    """Weights of 0 and 1 are a mask; others multiply losses, which their sum divides."""
    rng = np.random.default_rng(3)
    ids, weights = rng.integers(0, VOCAB, (2, 12)), np.ones((2, 12), np.float32)
    checked = model.checked(ids, ids)
    half = checked[1].copy()
    half[:, 6:], weights[:, 6:] = -100, 0.0

    def sums(targets, weights):
        model.zero_gradient()
        model.accumulate(checked[0], targets, checked[2], weights=weights)
        return model.read_stats()[:2], model.read_flat(model.adapter.gradient).copy()

    masked, gradient = sums(half, None)
    weighted, same = sums(checked[1], weights)
    np.testing.assert_allclose(weighted, masked, rtol=1e-6)
    np.testing.assert_allclose(same, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())
    three, more = sums(checked[1], 3 * weights)
    np.testing.assert_allclose(three, 3 * masked, rtol=1e-6)
    np.testing.assert_allclose(more, 3 * gradient, rtol=0, atol=3e-6 * np.abs(gradient).max())
    model.zero_gradient()


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("weights", "message"), [(np.ones((1, 4)), "shape"), (-np.ones((1, 5)), "finite"),
                             (np.full((1, 5), np.nan), "finite")],
)  # fmt: skip
def test_wrong_weights_of_labels(model, weights, message):
    ids = np.zeros((1, 5), int)
    with pytest.raises(ShapeError, match=f"weights must .*{message}"):
        model.accumulate(*model.checked(ids, ids), weights=weights)


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("ids", "labels", "mask", "message"),
    [
        (np.zeros(4, int), np.zeros(4, int), None, "shape"),
        (np.zeros((1, 4)), np.zeros((1, 4), int), None, "integers"),
        (np.full((1, 4), VOCAB), np.zeros((1, 4), int), None, "vocab"),
        (np.full((1, 4), -1), np.zeros((1, 4), int), None, "input_ids must be from 0"),
        (np.zeros((1, 4), int), np.zeros((1, 5), int), None, "labels"),
        (np.zeros((1, 4), int), np.full((1, 4), -1), None, "labels must be"),
        (np.zeros((1, 4), int), np.zeros((1, 4), int), np.array([[1, 2, 1, 2]]), "ascending"),
        (np.zeros((1, 4), int), np.zeros((1, 4), int), np.ones((1, 3), int), "attention_mask"),
    ],
)
def test_wrong_inputs(model, ids, labels, mask, message):
    with pytest.raises(ShapeError, match=message):
        model.loss_and_grads(ids, labels, mask)


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "each pair",
        ),
        ({"hidden_act": "mish"}, "mish"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_size": "36"}, "hidden_size"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": ["linear"], "factor": 2}}, "rope type"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "beta_fast": 32}}, "beta_fast"),
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
