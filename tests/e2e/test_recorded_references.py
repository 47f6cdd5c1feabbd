"""Against gradients, losses and adapters that PEFT and bitsandbytes gave, where at hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.recorded import RECORDED, needs_recordings
from support.recorded_models import difference

from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer

BASE = RECORDED / "models" / "TinyStories-656K"
CASES = {
    "qlora-ts656k-nf4-dq": ("nf4", BASE, 8, 16, 30, 2e-3),
    "qlora-ts656k-fp32": ("none", BASE, 8, 16, 30, 2e-3),
    **{
        f"families/{name}": ("none", None, 4, 8, 10, 5e-3)
        for name in (
            "llama",
            "llama3-rope-tied",
            "mistral-window16",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
            "phi3",
        )
    },
}
pytestmark = needs_recordings


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", list(CASES))
def test_against_peft(device, tmp_path, case, dtype):
    scheme, base, r, alpha, steps, rate = CASES[case]
    folder = RECORDED / "oracles" / case
    base = base or folder
    io, trace = np.load(folder / "io.npz"), json.loads((folder / "trace.json").read_text())
    ids, labels, mask = io["input_ids"], io["labels"], io["attention_mask"]
    model = QLoRAModel.from_pretrained(
        base, LoraConfig(r=r, lora_alpha=alpha), QuantConfig(scheme=scheme), dtype, device
    )
    exact = dtype == "float32"
    logits = model.logits(ids, mask)
    recorded = io["logits"] if "logits" in io else io["base_logits_row0_first16"][None]
    logits = logits if "logits" in io else logits[:1, :16]
    # float32: sums in another order; bfloat16: operands are rounded to 8 bits.
    assert np.abs(logits - recorded).max() <= (1e-4 if exact else 0.2)

    loss, gradients = model.loss_and_grads(ids, labels, mask)
    close = 1e-5 if exact else 0.01 * trace["base_loss"]
    assert abs(loss - trace["base_loss"]) <= close
    model.load_adapter(load_file(folder / "adapter_init" / "adapter_model.safetensors"))
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    names = ("grads_step0.safetensors", "lora_grads.safetensors")
    expected = load_file(next(folder / n for n in names if (folder / n).exists()))
    assert set(gradients) == set(expected)
    worst = max(
        difference(gradients[name], array)
        for name, array in expected.items()
        if np.linalg.norm(array) > 0
    )
    assert worst <= (2e-5 if exact else 0.04), worst  # measured 5.5e-6 and 0.021

    losses = trace.get("losses") or trace["train_losses"]
    assert abs(loss - losses[0]) <= (1e-5 if exact else 0.01 * losses[0])
    rows = [
        {"input_ids": i, "labels": t, "attention_mask": m}
        for i, t, m in zip(ids, labels, mask, strict=True)
    ]
    config = Config(
        model={"path": str(base)},
        data={"max_seq_length": ids.shape[1]},
        train={
            "max_steps": steps,
            "per_device_train_batch_size": len(ids),
            "gradient_accumulation_steps": 1,
        },
        optim={"learning_rate": rate, "lr_scheduler_type": "constant", "weight_decay": 0.01},
        output={"dir": str(tmp_path / "run"), "save_steps": 1000},
    )
    Trainer(model, config).train(rows)
    logged = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    ours = np.array([row["loss"] for row in logged])
    assert len(ours) == steps
    bound = 1e-4 if exact else 0.01 * np.array(losses)  # measured 1.6e-6, and 0.14 %
    assert np.all(np.abs(ours - losses) <= bound), np.abs(ours - losses).max()
    if "grad_norms_before_clip" in trace and exact:
        norms = [row["grad_norm"] for row in logged]
        assert np.allclose(norms, trace["grad_norms_before_clip"], rtol=1e-3, atol=0)
    if "final_logits_row0_first16" in io:
        final_logits = model.logits(ids, mask)[0, :16]
        worst = np.abs(final_logits - io["final_logits_row0_first16"]).max()
        assert worst <= (5e-3 if exact else 0.5), worst
    if (folder / "adapter_final").exists() and exact:
        final = load_file(folder / "adapter_final" / "adapter_model.safetensors")
        ours_final = model.adapter_state_dict()
        assert set(ours_final) == set(final)
        worst = max(difference(ours_final[name], array) for name, array in final.items())
        assert worst <= 1e-3, worst  # measured 1.1e-4


def test_four_bit_folder_is_the_same_base(device):
    stored = QLoRAModel.from_pretrained(f"{BASE}-bnb-nf4-dq", device=device).base_state_dict()
    ours = QLoRAModel.from_pretrained(BASE, device=device).base_state_dict()
    assert set(stored) == set(ours)
    for name, array in ours.items():
        assert np.array_equal(array, stored[name]), name


@pytest.mark.quick
def test_the_device_holds_the_bytes_of_bitsandbytes(device):
    """Packed codes and 8-bit scales, read back from the device's own buffers."""
    stored = load_file(Path(f"{BASE}-bnb-nf4-dq") / "model.safetensors")
    model = QLoRAModel.from_pretrained(BASE, device=device)
    assert len(model.layout.modules.linears) == 14
    for name, layer in model.layout.modules.linears.items():
        weight = layer.weight
        for tensor, key in ((weight.codes, ""), (weight.absmax, ".absmax")):
            expected = stored[f"{name}.weight{key}"].reshape(-1)
            place = tensor.storage.whole.buffer, expected.nbytes, tensor.storage.first_byte
            held = np.frombuffer(device.read(*place), np.uint8)
            assert expected.dtype == np.uint8 and np.array_equal(held, expected), (name, key)
