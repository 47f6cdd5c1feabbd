"""A trained head or embedding, as a pair or whole, against recorded PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.head_cases import ALPHA, CASES, R, inputs
from safetensors.numpy import load_file, save_file
from support.recorded_models import (
    check_gradients,
    check_logits,
    check_normalizers,
    check_training,
    difference,
    expected_gradients,
    recorded_base,
    start,
)

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.lora import load_adapter

FOLDER = Path(__file__).parents[1] / "references" / "heads"
PLAIN = QuantConfig(scheme="none")


def lora(case):
    return LoraConfig(r=R, lora_alpha=ALPHA, **CASES[case][2])


@pytest.mark.parametrize("case", CASES)
def test_against_peft(device, tmp_path, case):
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    model = QLoRAModel.from_pretrained(folder, lora(case), PLAIN, "float32", device)
    ids, mask, labels = inputs()
    before = model.logits(ids, mask)
    model.load_adapter(start(recorded))
    logits = model.logits(ids, mask)
    check_logits(logits, recorded, mask)
    check_normalizers(logits, recorded, mask)
    with model.adapter_off():
        assert np.array_equal(model.logits(ids, mask), before)

    check_gradients(model, recorded, ids, mask, labels)
    check_training(model, folder, recorded, ids, mask, labels, tmp_path / "run")

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
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    model = QLoRAModel.from_pretrained(folder, lora(case), PLAIN, "bfloat16", device)
    ids, mask, labels = inputs()
    model.load_adapter(start(recorded))
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    assert abs(loss / recorded["losses"][0] - 1) <= 0.01
    worst = {n: difference(gradients[n], a) for n, a in expected_gradients(recorded).items()}
    assert max(worst.values()) <= recorded["bfloat16"][1], worst


@pytest.mark.parametrize("case", ["pair-untied", "pair-tied", "whole-untied", "whole-tied"])
def test_what_peft_saved_is_opened(device, tmp_path, case):
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
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
