"""Rows with pictures against recorded transformers: ids, features, logits and gradients."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from references.image_run_cases import (
    ALPHA,
    CASES,
    MODULES,
    NEW_TOKENS,
    RATE,
    ROWS,
    R,
    messages,
    pictures,
    written,
)
from references.projections import distance, projections
from references.seeded import adapter, weights
from safetensors.numpy import save_file

from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.data import PreprocessConfig, Tokenizer
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.images.placeholders import image_files
from qlora_wgpu.training import Observer
from qlora_wgpu.training.images import encoded_images

RECORDED = np.load(Path(__file__).parents[1] / "references/image_runs.npz")
FLOAT32 = 2e-5  # sums in another order
# In bfloat16 values may be this many times as far off as PyTorch's own: other roundings of a few.
AS_PYTORCH = 1.5


def recorded(case):
    """What was recorded of a case, by name."""
    return {n.split("/")[1]: RECORDED[n] for n in RECORDED.files if n.startswith(f"{case}/")}


def folder_with(case, known, folder):
    """The model's folder, and a file of rows with their pictures next to it."""
    folder.mkdir()
    written(case, folder)
    (folder / "config.json").write_text(str(known["config"]))
    tensors = weights(json.loads(str(known["shapes"])), float(known["norm_offset"]))
    save_file(tensors, folder / "model.safetensors")
    return folder


def row_of(number, folder):
    paths = []
    for i, rgb in enumerate(pictures(number)):
        paths.append(str(folder / f"{number}-{i}.png"))
        Image.fromarray(rgb).save(paths[-1])
    return {"messages": messages(number), "images": paths}


class Opened:
    """A case's model on a device, with its rows encoded and their images' features."""

    def __init__(self, case, place, device, dtype):
        self.known = recorded(case)
        folder = folder_with(case, self.known, place / "model")
        tokenizer = Tokenizer.from_folder(folder)
        config = json.loads((folder / "config.json").read_text())
        files = image_files(folder, config, tokenizer.token)
        rows = [row_of(number, place) for number in range(len(ROWS))]
        found = encode_rows(rows, tokenizer, PreprocessConfig(512, images=files))
        self.examples = list(found)
        lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=MODULES)
        scheme = QuantConfig(scheme="none")
        self.model = QLoRAModel.from_pretrained(folder, lora, scheme, dtype, device)
        self.model.load_adapter(adapter(json.loads(str(self.known["adapter"]))))
        self.store = encoded_images(
            self.model.layout.pretrained, files, found.image_sources, device, dtype, "memory",
            Observer(),
        )  # fmt: skip

    @property
    def images(self):
        return [[self.store[key] for key in example.images] for example in self.examples]

    def batch(self):
        """Ids, labels and mask of all rows, padded."""
        longest = max(map(len, self.examples))
        made = np.zeros((3, len(self.examples), longest), np.int64)
        made[1] = -100
        for row, example in enumerate(self.examples):
            length = len(example)
            made[0, row, :length] = example.input_ids
            made[1, row, :length] = example.labels
            made[2, row, :length] = 1
        return tuple(made)

    def off(self):
        """How far features, logits, the loss and gradients are off, relative to their norms."""
        known, (ids, labels, mask) = self.known, self.batch()
        rows = np.concatenate([image.rows for own in self.images for image in own])
        features = distance(projections("features", rows), known["features"])
        logits = self.model.logits(ids, mask, images=self.images)[mask == 1]
        apart = distance(projections("logits", logits), known["logits"])
        loss, gradients = self.model.loss_and_grads(ids, labels, mask, images=self.images)
        assert sorted(gradients) == known["names"].tolist()
        each = [
            distance(projections(str(name), gradients[str(name)]), expected)
            for name, expected in zip(known["names"], known["gradients"], strict=True)
        ]
        return {
            "features": features / known["features_norm"],
            "logits": apart / known["logits_norm"],
            "loss": abs(loss / known["loss"] - 1),
            "gradients": np.linalg.norm(each) / np.linalg.norm(known["norms"]),
        }


@pytest.mark.quick(case=["gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_rows_to_gradients_in_float32(device, tmp_path, case):
    """Images of Gemma 3 are larger than its sliding window."""
    opened = Opened(case, tmp_path, device, "float32")
    for row, example in enumerate(opened.examples):
        assert example.input_ids.tolist() == opened.known[f"ids{row}"].tolist()
        assert example.labels.tolist() == opened.known[f"labels{row}"].tolist()
    off = opened.off()
    assert max(off.values()) <= FLOAT32, off


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_as_near_as_pytorchs(device, tmp_path, case):
    opened = Opened(case, tmp_path, device, "bfloat16")
    off, (logits, gradients) = opened.off(), opened.known["bfloat16"]
    assert 1e-4 < off["logits"] <= AS_PYTORCH * logits
    assert 1e-4 < off["gradients"] <= AS_PYTORCH * gradients


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_losses_of_a_run(device, tmp_path, case):
    """A run of ten steps on the rows, whose pictures are read from files."""
    opened = Opened(case, tmp_path, device, "float32")
    config = Config.model_validate({
        "model": {"path": str(tmp_path / "model")},
        "data": {"max_seq_length": 512, "image_cache": "memory"},
        "train": {"max_steps": 10, "per_device_train_batch_size": 3},
        "optim": {"learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.01},
        "output": {"dir": str(tmp_path / "run"), "save_steps": 1000},
    })  # fmt: skip
    Trainer(opened.model, config).train([row_of(number, tmp_path) for number in range(len(ROWS))])
    logged = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = np.array([row["loss"] for row in logged])
    # PyTorch's own float32 shows how much rounding grows.
    exact = opened.known["losses"]
    own = np.abs(opened.known["losses_float32"] / exact - 1).max()
    assert own <= 1e-4 and losses[-1] < 0.9 * losses[0]
    assert np.abs(losses / exact - 1).max() <= 2e-5 + 4 * own


@pytest.mark.cover(case=["gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens(device, tmp_path, case):
    opened = Opened(case, tmp_path, device, "float32")
    engine = Engine(opened.model, len(ROWS), 128)
    made = []
    for example, images in zip(opened.examples, opened.images, strict=True):
        prompt = example.input_ids[: int(np.argmax(example.labels != -100))].tolist()
        made.append(engine.add(prompt, max_new_tokens=NEW_TOKENS, images=images))
    assert [list(text) for text in made] == opened.known["tokens"].tolist()
