"""Runs on rows with images: what steps read, and what resuming computes again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from references.seeded import weights
from safetensors.numpy import save_file
from support.commands import run_here
from support.image_models import folder_of, rgb_of

from e2e.test_images_against_pytorch import folder_with, recorded, row_of
from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.data import PromptFormat, read_prompt_files
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.families.family import find_family
from qlora_wgpu.generation import continuation, generate
from qlora_wgpu.images.placeholders import image_files
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.model.pretrained import tensor_shapes
from qlora_wgpu.model.vision_encoder import VisionEncoder
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


def test_rows_of_prompts_have_images(model, rows, tmp_path):
    """Also more of them than are read at a time, as text, and of one with none."""
    place = tmp_path / "prompts"
    place.mkdir()
    asked = [{key: each[key] for key in ("messages", "images")} for each in rows] * 3
    for each in asked:
        each["images"] = [f"../{Path(image).name}" for image in each["images"]]
    asked.append({"text": "A <image> b", "image": "../1.png"})
    (place / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    done = run_here(
        "generate", "--model", tmp_path / "model", "--prompts", place / "rows.jsonl", "--chat",
        "--scheme", "none", "--max-new-tokens", 4, "--batch", 2, cwd="/",
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert Tower.encoded == 2
    written = [json.loads(line) for line in done.stdout.splitlines()]
    pretrained = model.layout.pretrained.folder
    files = image_files(pretrained.path, pretrained.config, model.tokenizer.token)
    chat = read_prompt_files(pretrained.path)
    plain, texts = PromptFormat.text(chat.tokenizer), []
    for row in asked:
        form, turns = (chat, row["messages"][:1]) if "messages" in row else (plain, [
            {"role": "user", "content": row["text"]}
        ])  # fmt: skip
        own = row.get("images", [row.get("image")])
        ids, sources = form.encoded(turns, images=files, folder=place, own=own)
        features = Tower().encode([files.tokens.processor(each.decoded()) for each in sources])
        made = list(generate(model, ids, max_new_tokens=4, images=features))
        texts.append(continuation(chat.tokenizer, () if form is chat else ids, made))
    assert [each["completion"] for each in written] == texts
    assert len(set(texts)) > 3
    assert [
        {key: each[key] for key in row} for each, row in zip(written, asked, strict=True)
    ] == asked


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_answers_about_images_are_trained_on(model, rows, tmp_path, objective):
    """The first loss is that of the reference model, and the held-out loss falls."""
    answers = {"chosen": "So.", "rejected": "Not so."}
    pairs = [{"prompt": each["messages"][:1], "images": each["images"], **answers} for each in rows]
    settings = config(tmp_path, 2).model_dump()
    settings["train"] |= {"objective": objective, "beta": 0.1, "loss_type": None}
    settings["optim"]["learning_rate"] = 1e-2
    Trainer(model, Config.model_validate(settings)).train(pairs, pairs)
    assert Tower.encoded == 2
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    held_out = [row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row]
    first = np.log(2) if objective == "dpo" else 0.5
    assert logged(tmp_path)[0] == pytest.approx(first, abs=1e-5)
    assert held_out[0] == pytest.approx(first, abs=1e-5) and held_out[-1] < first - 1e-3


# ---- runs from the outside, with a real tower ----------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model, its rows with three pictures, and a run's configuration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder_with("qwen3_vl", recorded("qwen3_vl"), tmp_path / "model")
    for name, numbers in (("train", (0, 1, 2, 0)), ("eval", (2,))):
        lines = [json.dumps(row_of(number, tmp_path)) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\n"
        "data: {train: train.jsonl, eval: eval.jsonl, max_seq_length: 128}\n"
        "train: {num_train_epochs: 2, per_device_train_batch_size: 2}\n"
        "eval: {eval_steps: 1, sample_max_new_tokens: 1}\n"
        "output: {dir: out, save_steps: 1}\n"
    )
    return tmp_path


@pytest.fixture
def encoded(monkeypatch):
    """The numbers of images that a tower has encoded, call by call."""
    counts, encode = [], VisionEncoder.encode

    def counted(encoder, images):
        counts.append(len(images))
        return encode(encoder, images)

    monkeypatch.setattr(VisionEncoder, "encode", counted)
    return counts


def test_a_tower_runs_once_for_all_epochs_evaluations_and_resumes(place, encoded):
    """Its plan is the one that ``estimate`` prints, made of the sizes of all pictures."""
    planned = run_here("estimate", "run.yaml", cwd=place).stdout
    (plan,) = (row for row in planned.splitlines() if "memory of the vision tower" in row)
    assert "3 images of at most 10 tokens" in planned
    first = run_here("train", "run.yaml", cwd=place)
    assert first.returncode == 0, first.stderr
    assert encoded == [3] and plan in first.stdout and "3 images: 3 encoded" in first.stdout
    more = run_here("train", "run.yaml", "--resume", "train.num_train_epochs=3", cwd=place)
    held_out = run_here("eval", "out", cwd=place)
    for done, images in ((more, 3), (held_out, 2)):
        assert done.returncode == 0, done.stderr
        assert f"{images} images: features are cached" in done.stdout + done.stderr
        assert "vision tower" not in done.stdout + done.stderr
    assert encoded == [3]
