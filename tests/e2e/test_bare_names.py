"""Bases whose files lack the ``model.`` of names, as ``AutoModel`` saves them."""

import numpy as np
from safetensors.numpy import load_file, save_file

from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.exporting import merge, quantize_folder

IDS = np.arange(1, 9).reshape(1, 8)
EXACT = {"quant": QuantConfig(scheme="none"), "compute_dtype": "float32"}


def bare_model(folder):
    write_model(folder)
    path = folder / "model.safetensors"
    save_file({n.removeprefix("model."): a for n, a in load_file(path).items()}, path)
    return folder


def test_they_open_and_become_others(tmp_path, device):
    write_model(tmp_path / "plain")
    bare = bare_model(tmp_path / "bare")
    lora = LoraConfig(r=2, lora_alpha=4)
    plain = QLoRAModel.from_pretrained(tmp_path / "plain", lora, device=device, **EXACT)
    opened = QLoRAModel.from_pretrained(bare, lora, device=device, **EXACT)
    assert np.array_equal(opened.logits(IDS), plain.logits(IDS))
    rng = np.random.default_rng(0)
    opened.load_adapter(
        {n: 0.1 * rng.standard_normal(a.shape, np.float32)
         for n, a in opened.adapter_state_dict().items()}
    )  # fmt: skip
    opened.save_adapter(tmp_path / "adapter")
    merge(bare, tmp_path / "adapter", tmp_path / "merged")
    merged = QLoRAModel.from_pretrained(tmp_path / "merged", device=device, **EXACT)
    np.testing.assert_allclose(merged.logits(IDS), opened.logits(IDS), atol=1e-4)
    for source in ("plain", "bare"):
        quantize_folder(tmp_path / source, tmp_path / f"{source}-4")
    in_4_bits = [
        QLoRAModel.from_pretrained(tmp_path / f"{source}-4", device=device).logits(IDS)
        for source in ("plain", "bare")
    ]
    assert np.array_equal(*in_4_bits)
