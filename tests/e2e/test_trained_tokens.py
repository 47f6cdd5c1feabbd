"""Trained rows of the embedding and the head, against recorded PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.token_cases import ALPHA, CASES, TARGETS, R, inputs
from safetensors.numpy import load_file, save_file
from support.recorded_models import (
    check_gradients,
    check_logits,
    check_normalizers,
    check_training,
    expected_gradients,
    recorded_base,
    start,
)

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.lora import load_adapter

FOLDER = Path(__file__).parents[1] / "references" / "tokens"
PLAIN = QuantConfig(scheme="none")


def lora(case):
    return LoraConfig(
        r=R, lora_alpha=ALPHA, target_modules=TARGETS, trainable_token_indices=CASES[case][2]
    )


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
        assert np.array_equal(model.logits(ids, mask), before)  # the base has its rows again

    check_gradients(model, recorded, ids, mask, labels)
    check_training(model, folder, recorded, ids, mask, labels, tmp_path / "run")

    # The files are PEFT's: the same names and shapes, and the setting as it was given.
    saved = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert {n: a.shape for n, a in saved.items()} == {
        n: a.shape for n, a in expected_gradients(recorded).items()
    }
    ours = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    theirs = json.loads(str(recorded["adapter_config"]))
    assert ours["trainable_token_indices"] == theirs["trainable_token_indices"]


@pytest.mark.parametrize("case", ["tied", "both"])
def test_what_peft_saved_is_opened(device, tmp_path, case):
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    place = tmp_path / "adapter"
    place.mkdir()
    save_file(start(recorded), place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(str(recorded["adapter_config"]))
    model = QLoRAModel.from_pretrained(folder, None, PLAIN, "float32", device, adapter=place)
    ids, mask, _ = inputs()
    check_logits(model.logits(ids, mask), recorded, mask)
    model.save_adapter(tmp_path / "again")
    tensors, _ = load_adapter(tmp_path / "again")
    assert all(np.array_equal(tensors[n], a) for n, a in start(recorded).items())
