"""Records a folder that bitsandbytes quantized but for a few layers, and what it computes.

usage: python tests/references/record_mixed.py

Needs torch, transformers, accelerate and bitsandbytes; tests/references/README has the versions.
Writes mixed/llama.npz: the config.json that transformers wrote, checksums of all tensors in the
file, and logits of the dequantized weights in float32. Weights follow from their names.
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from safetensors.torch import load_file, save_file
from seeded import VOCAB, batch, weights
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

HERE = Path(__file__).parent
KEPT = ["lm_head", "o_proj", "model.layers.1.mlp"]
# Multiples of 64: bitsandbytes 0.50 dequantizes others wrongly on a CPU.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def base(folder):
    config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    shapes = {name: list(p.shape) for name, p in model.state_dict().items()}
    arrays = weights(shapes, 0.0)
    tensors = {name: torch.from_numpy(a).to(torch.bfloat16) for name, a in arrays.items()}
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return shapes


def dequantized(tensors):
    """Every weight in float32, by bitsandbytes itself."""
    plain = {}
    for name, tensor in tensors.items():
        if ".weight." in name:
            continue
        parts = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if f"{name}." in n}
        if parts:
            state = QuantState.from_dict(parts, device=torch.device("cpu"))
            state.dtype = torch.float32
            tensor = dequantize_4bit(tensor, state)
        plain[name] = tensor.float()
    return plain


def offset(tensors, name):
    state = tensors[f"{name}.quant_state.bitsandbytes__nf4"]
    return json.loads(bytes(state.tolist()))["nested_offset"]


def record():
    with tempfile.TemporaryDirectory() as place:
        plain, quantized = Path(place) / "base", Path(place) / "mixed"
        plain.mkdir()
        shapes = base(plain)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=KEPT,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=quantization, attn_implementation="eager"
        )
        # Before any forward: bitsandbytes 0.50 repacks weights for inference and saves them so.
        model.save_pretrained(quantized)
        tensors = load_file(quantized / "model.safetensors")
        reference = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        reference.load_state_dict(dequantized(tensors))
        ids, mask, _ = (torch.from_numpy(a) for a in batch())
        with torch.no_grad():
            logits = reference(input_ids=ids, attention_mask=mask).logits
        again = AutoModelForCausalLM.from_pretrained(
            quantized, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            own = again(input_ids=ids, attention_mask=mask).logits.float()
        print("transformers' own 4-bit forward is", (own - logits).abs()[mask == 1].max().item())
        config = json.loads((quantized / "config.json").read_text())
    sums = {
        name: zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
        if "quant_state" not in name
    }
    offsets = {n: offset(tensors, n) for n in tensors if f"{n}.absmax" in tensors}
    (HERE / "mixed").mkdir(exist_ok=True)
    np.savez_compressed(
        HERE / "mixed" / "llama.npz", config=json.dumps(config), shapes=json.dumps(shapes),
        checksums=json.dumps(sums), offsets=json.dumps(offsets), logits=logits[..., :40].numpy(),
    )  # fmt: skip
    print(f"{len(offsets)} of {len(shapes)} tensors in 4 bits, largest logit", logits.abs().max())


if __name__ == "__main__":
    record()
