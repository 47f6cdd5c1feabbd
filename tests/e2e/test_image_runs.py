"""Runs on rows with images: what steps read, and what resuming computes again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from references.seeded import weights
from safetensors.numpy import save_file
from support.image_models import folder_of, rgb_of

from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.families.family import find_family
from qlora_wgpu.images.placeholders import image_files
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.model.pretrained import tensor_shapes
from qlora_wgpu.training import images as training_images
from qlora_wgpu.training.data import preparation

HIDDEN, TOKENS = 24, 16
TEXT = {
    "model_type": "llama", "vocab_size": 270, "hidden_size": HIDDEN, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}  # fmt: skip


class Tower:
    """In place of a vision tower: features that follow from an image's first pixels."""

    encoded = 0

    def __init__(self, *_):
        pass

    def encode(self, images):
        Tower.encoded += len(images)
        pixels = [np.resize(image.crops[0], (TOKENS, HIDDEN)) for image in images]
        return [ImageFeatures(each.astype(np.float32)) for each in pixels]

    def close(self):
        pass


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(training_images, "opened_tower", Tower)
    monkeypatch.setattr(Tower, "encoded", 0)
    folder = tmp_path / "model"
    folder.mkdir()
    folder_of("llava", folder)
    config = json.loads((folder / "config.json").read_text()) | {"text_config": TEXT}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(find_family(config).read(config))
    save_file(weights(shapes, 0.0), folder / "model.safetensors")
    return QLoRAModel.from_pretrained(folder, LoraConfig(r=2), QuantConfig(scheme="none"))


def row(number, images):
    parts = [{"type": "image"}] * len(images) + [{"type": "text", "text": f"{number}?"}]
    answer = {"role": "assistant", "content": "So."}
    messages = [{"role": "user", "content": parts}, answer]
    return {"messages": messages, "images": images}


@pytest.fixture
def rows(tmp_path):
    for number, size in enumerate(((9, 5), (60, 40))):
        Image.fromarray(rgb_of(*size)).save(tmp_path / f"{number}.png")
    first, second = str(tmp_path / "0.png"), str(tmp_path / "1.png")
    return [row(0, [first]), row(1, [second, first]), row(2, []), row(3, [second])]


def config(tmp_path, steps, **data):
    return Config(
        model={"path": str(tmp_path / "model")},
        data={"max_seq_length": 128, **data},
        train={"max_steps": steps, "per_device_train_batch_size": 2},
        eval={"eval_steps": 1},
        output={"dir": str(tmp_path / "run"), "save_steps": 1},
    )


def logged(tmp_path):
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_reads_the_images_of_its_rows(model, rows, tmp_path, packing):
    settings = config(tmp_path, 1, packing=packing)
    begin = model.adapter_state_dict()
    trainer = Trainer(model, settings, overwrite=True)
    trainer.train(rows[:2] if not packing else rows)
    assert Tower.encoded == 2
    model.load_adapter(begin)
    tokenizer = model.tokenizer
    folder = model.layout.pretrained.folder
    files = image_files(folder.path, folder.config, tokenizer.token)
    found = encode_rows(rows, tokenizer, preparation(settings.data, images=files))
    encoded = {
        key: Tower().encode([files.tokens.processor(source.decoded())])[0]
        for key, source in found.image_sources.items()
    }
    chosen = found[: 2 if not packing else len(rows)]
    total = labels = 0.0
    for example in chosen:
        ids, targets = example.input_ids[None], example.labels[None]
        own = [[encoded[key] for key in example.images]]
        loss, _ = model.loss_and_grads(ids, targets, images=own)
        total += loss * example.num_label_tokens
        labels += example.num_label_tokens
    assert logged(tmp_path)[0] == pytest.approx(total / labels, abs=2e-4)


def test_a_resumed_run_never_encodes_an_image_again(model, rows, tmp_path):
    Trainer(model, config(tmp_path, 2)).train(rows, rows[:2])
    assert Tower.encoded == 2
    Trainer(model, config(tmp_path, 3), resume=True).train(rows, rows[:2])
    assert Tower.encoded == 2
    assert len(logged(tmp_path)) == 3
