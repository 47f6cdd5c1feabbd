"""Language models that read images' features against recorded PyTorch: none, one and three."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.image_cases import ALPHA, CASES, GRIDS, R, batch, features, packed
from references.projections import distance, projections
from references.seeded import adapter, weights
from safetensors.numpy import save_file

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.model.image_inputs import ImageFeatures

RECORDED = np.load(Path(__file__).parents[1] / "references/image_language.npz")


def recorded(case):
    """What was recorded of a case, by name."""
    return {n.split("/")[1]: RECORDED[n] for n in RECORDED.files if n.startswith(f"{case}/")}


def images_of(known):
    made = features(int(known["deepstack"]))
    return [
        [ImageFeatures(rows, grid) for rows, grid in zip(own, grids, strict=True)]
        for own, grids in zip(made, GRIDS, strict=True)
    ]


def opened(case, known, folder, device):
    """The base with the adapter that everything was computed with."""
    (folder / "config.json").write_text(str(known["config"]))
    tensors = weights(json.loads(str(known["shapes"])), float(known["norm_offset"]))
    save_file(tensors, folder / "model.safetensors")
    lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=CASES[case][2])
    model = QLoRAModel.from_pretrained(folder, lora, QuantConfig(scheme="none"), "float32", device)
    model.load_adapter(adapter(json.loads(str(known["adapter"]))))
    return model


def check_gradients(known, loss, gradients):
    assert abs(loss - known["loss"]) <= 1e-5 * known["loss"]
    names = [str(name) for name in known["names"]]
    assert sorted(gradients) == names
    for name, norm, expected in zip(names, known["norms"], known["gradients"], strict=True):
        off = distance(projections(name, gradients[name]), expected)
        assert off <= 2e-5 * norm, (name, off / norm)  # float32 sums in another order


@pytest.mark.parametrize("case", CASES)
def test_against_pytorch(device, tmp_path, case):
    """Logits and gradients of a batch with padding and without images in one row."""
    known = recorded(case)
    model, images = opened(case, known, tmp_path, device), images_of(known)
    ids, mask, labels = batch()
    logits = model.logits(ids, mask, images=images)[mask == 1]
    assert distance(projections("logits", logits), known["logits"]) <= 1e-5 * known["logits_norm"]
    loss, gradients = model.loss_and_grads(ids, labels, mask, images=images)
    check_gradients(known, loss, gradients)


@pytest.mark.parametrize("case", ["qwen2_vl", "gemma3", "lfm2_vl"])
def test_samples_with_images_in_one_row(device, tmp_path, case):
    """Two samples in one row have the gradient that they have in two."""
    known = recorded(case)
    model, images = opened(case, known, tmp_path, device), images_of(known)
    ids, mask, labels = (array[1:] for array in batch())
    loss, gradients = model.loss_and_grads(ids, labels, mask, images=images[1:])
    ids, mask, labels = packed()
    same, others = model.loss_and_grads(ids, labels, mask, images=[images[1] + images[2]])
    assert abs(same - loss) <= 1e-6 * loss
    for name, gradient in gradients.items():
        # Measured 7e-7: sums in another order.
        assert np.linalg.norm(others[name] - gradient) <= 5e-6 * np.linalg.norm(gradient), name
