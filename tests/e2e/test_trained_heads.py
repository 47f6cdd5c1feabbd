"""A trained head or embedding, as a pair or whole, against recorded PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.head_cases import ALPHA, CASES, R, inputs
from references.seeded import adapter, weights
from safetensors.numpy import load_file, save_file

from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.lora import load_adapter

FOLDER = Path(__file__).parents[1] / "references" / "heads"
PLAIN = QuantConfig(scheme="none")


def difference(ours, theirs):
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def lora(case):
    return LoraConfig(r=R, lora_alpha=ALPHA, **CASES[case][2])


def base(place, case):
    """The base's folder, and what PEFT computed."""
    recorded = np.load(FOLDER / f"{case}.npz")
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(str(recorded["config"]))
    shapes = json.loads(str(recorded["shapes"]))
    save_file(weights(shapes, float(recorded["norm_offset"])), folder / "model.safetensors")
    return folder, recorded


def expected_gradients(recorded):
    return {n[5:]: recorded[n] for n in recorded.files if n.startswith("grad:")}


def start(recorded):
    return adapter({n: array.shape for n, array in expected_gradients(recorded).items()})


def check_logits(logits, recorded, mask, allowed):
    seen, scale = mask == 1, np.abs(recorded["logits"]).max()
    assert np.abs(logits[..., :40] - recorded["logits"])[seen].max() <= allowed * scale
    assert np.abs(logits[..., -1] - recorded["last"])[seen].max() <= allowed * scale


@pytest.mark.parametrize("case", CASES)
def test_against_peft(device, tmp_path, case):
    folder, recorded = base(tmp_path, case)
    model = QLoRAModel.from_pretrained(folder, lora(case), PLAIN, "float32", device)
    ids, mask, labels = inputs()
    before = model.logits(ids, mask)
    model.load_adapter(start(recorded))
    logits, seen = model.logits(ids, mask), mask == 1
    check_logits(logits, recorded, mask, 1e-5)  # float32 sums in another order
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert np.abs(lse - recorded["lse"])[seen].max() <= 1e-4
    with model.adapter_off():
        assert np.array_equal(model.logits(ids, mask), before)

    expected = expected_gradients(recorded)
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    assert abs(loss - recorded["losses"][0]) <= 1e-5
    assert set(gradients) == set(expected)
    worst = {name: difference(gradients[name], array) for name, array in expected.items()}
    assert max(worst.values()) <= 2e-5, worst
    rows = [
        {"input_ids": i, "labels": t, "attention_mask": m}
        for i, t, m in zip(ids, labels, mask, strict=True)
    ]
    config = Config(
        model={"path": str(folder)},
        data={"max_seq_length": ids.shape[1]},
        train={
            "max_steps": len(recorded["losses"]),
            "per_device_train_batch_size": len(ids),
            "gradient_accumulation_steps": 1,
        },
        optim={"learning_rate": 5e-3, "lr_scheduler_type": "constant", "weight_decay": 0.01},
        output={"dir": str(tmp_path / "run"), "save_steps": 1000},
    )
    Trainer(model, config).train(rows)
    logged = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = np.array([row["loss"] for row in logged])
    # AdamW starts by the sign of each gradient, those near zero too, so rounding grows: PyTorch's
    # own float32 shows how much.
    apart = np.abs(losses / recorded["losses"] - 1)
    bound = 2e-5 + 4 * np.abs(recorded["losses_float32"] / recorded["losses"] - 1).max()
    assert bound <= 1e-3 and apart.max() <= bound, apart

    # The files are PEFT's but for the base's own matrices, which PEFT writes beside pairs on them.
    saved = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    theirs = json.loads(str(recorded["names"]))
    theirs = {n: tuple(s) for n, s in theirs.items() if ".base_layer." not in n}
    assert {n: a.shape for n, a in saved.items()} == theirs
    ours = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    theirs = json.loads(str(recorded["adapter_config"]))
    assert ours["target_modules"] == sorted(theirs["target_modules"])
    given = CASES[case][2].get("modules_to_save")
    assert ours["modules_to_save"] == given and bool(theirs["modules_to_save"]) == bool(given)
    assert ours.get("ensure_weight_tying", False) == theirs["ensure_weight_tying"]


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_near(device, tmp_path, case):
    """No further off than PyTorch's own bfloat16 is with the same weights."""
    folder, recorded = base(tmp_path, case)
    model = QLoRAModel.from_pretrained(folder, lora(case), PLAIN, "bfloat16", device)
    ids, mask, labels = inputs()
    model.load_adapter(start(recorded))
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    assert abs(loss / recorded["losses"][0] - 1) <= 0.01
    worst = {n: difference(gradients[n], a) for n, a in expected_gradients(recorded).items()}
    assert max(worst.values()) <= recorded["bfloat16"][1], worst


@pytest.mark.parametrize("case", ["pair-untied", "pair-tied", "whole-untied", "whole-tied"])
def test_what_peft_saved_is_opened(device, tmp_path, case):
    folder, recorded = base(tmp_path, case)
    place = tmp_path / "adapter"
    place.mkdir()
    stored = load_file(folder / "model.safetensors")
    names = json.loads(str(recorded["names"]))
    copies = {
        n: stored["lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"]
        for n in names
        if n.endswith("lm_head.base_layer.weight")
    }
    assert bool(copies) == case.startswith("pair-")
    start_ = start(recorded)
    if case == "whole-tied":  # which PEFT writes twice
        head, embedding = (
            f"base_model.model.{m}.weight" for m in ("lm_head", "model.embed_tokens")
        )
        copies = {head: start_[embedding].copy()}
    save_file(start_ | copies, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(str(recorded["adapter_config"]))
    model = QLoRAModel.from_pretrained(folder, None, PLAIN, "float32", device, adapter=place)
    ids, mask, _ = inputs()
    check_logits(model.logits(ids, mask), recorded, mask, 1e-5)
    model.save_adapter(tmp_path / "again")
    tensors, _ = load_adapter(tmp_path / "again")
    assert all(np.array_equal(tensors[n], a) for n, a in start(recorded).items())
