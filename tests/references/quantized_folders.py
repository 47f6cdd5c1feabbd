"""Whether transformers opens the 4-bit folders of mixtures and of models with images, and agrees.

usage: python tests/references/quantized_folders.py images FOLDER   with torch and transformers
       python tests/references/quantized_folders.py make FOLDER     with this project
       python tests/references/quantized_folders.py check FOLDER    also with bitsandbytes

Gemma 3 with images is made by transformers, mixtures from recorded cases; each is quantized, opened
by transformers, and its logits compared with this project's, on the weights that bitsandbytes
dequantizes. tests/references/README.md has the figures.
"""

import json
import sys
from pathlib import Path

import numpy as np
from seeded import VOCAB, batch, weights

HERE = Path(__file__).parent
CASES = ("llama", "qwen3_moe", "qwen3_moe-experts", "mixtral-experts")
# Multiples of 64: bitsandbytes 0.50 dequantizes others wrongly on a CPU.
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def images(folder):
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        **SIZES, "vocab_size": VOCAB, "num_hidden_layers": 2, "sliding_window": 16,
        "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "image_size": 28,
        "num_attention_heads": 2, "patch_size": 14,
    }  # fmt: skip
    for name, tied in (("gemma3", True), ("gemma3-untied", False)):
        config = Gemma3Config(
            text_config={**text, "tie_word_embeddings": tied}, vision_config=vision,
            mm_tokens_per_image=4, tie_word_embeddings=tied, image_token_index=VOCAB - 1,
            boi_token_index=VOCAB - 3, eoi_token_index=VOCAB - 2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        model.to(torch.bfloat16).save_pretrained(folder / name / "base")


def write_base(folder, case):
    from qlora_wgpu.checkpoint.safetensors_file import Entry, write_stream
    from qlora_wgpu.exporting.folders import as_dtype
    from qlora_wgpu.model.pretrained import Pretrained

    recorded = json.loads(str(np.load(HERE / f"{case}.npz")["config"]))
    config = {**recorded, **SIZES, "dtype": "bfloat16"}
    model = Pretrained.from_config(config).architecture
    shapes = {f"{s.name}.weight": (s.out_features, s.in_features) for s in model.every_linear}
    shapes |= {**model.norm_shapes, **model.router_shapes}
    for name in (model.embed_name, *([] if model.tied else [model.head_name])):
        shapes[name] = (model.vocab_size, model.hidden_size)
    arrays = weights(shapes, model.norm_offset)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries = {name: Entry("BF16", array.shape) for name, array in arrays.items()}
    write_stream(folder / "model.safetensors", entries, lambda n: as_dtype(arrays[n], "BF16"))


def make(folder):
    from qlora_wgpu import LoraConfig, QLoRAModel
    from qlora_wgpu.exporting import quantize_folder

    for case in CASES:
        write_base(folder / case / "base", case)
    for model in sorted(folder.iterdir()):
        quantize_folder(model / "base", model / "q4")
        opened = QLoRAModel.from_pretrained(model / "q4", LoraConfig(r=2), None, "float32")
        np.save(model / "logits.npy", opened.logits(*batch()[:2]))


def check(folder):
    import torch

    ids, mask, _ = (torch.from_numpy(a) for a in batch())
    seen = mask.numpy() == 1
    for place in sorted(folder.iterdir()):
        model, count, report = load(place / "q4")
        with torch.no_grad():
            theirs = model(input_ids=ids, attention_mask=mask).logits.numpy()
        ours = np.load(place / "logits.npy")
        apart, largest = np.abs(theirs - ours)[seen].max(), np.abs(theirs[seen]).max()
        print(f"{place.name}: {count} layers in 4 bits, differ by {apart:.1e} of {largest:.2f}")
        assert not report["missing_keys"] and not report["unexpected_keys"], report


def load(path):
    """The folder in transformers, each 4-bit layer as what bitsandbytes dequantizes it to."""
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    images = "vision_config" in json.loads((path / "config.json").read_text())
    model, report = (
        AutoModelForImageTextToText if images else AutoModelForCausalLM
    ).from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    layers = [n for n, m in model.named_modules() if type(m).__name__ == "Linear4bit"]
    for name in layers:
        module = model.get_submodule(name)
        state = module.weight.quant_state
        state.dtype = torch.float32
        plain = torch.nn.Linear(module.in_features, module.out_features, bias=False)
        plain.weight.data = dequantize_4bit(module.weight.data, state)
        model.set_submodule(name, plain)
    return torch.nn.Module.float(model).eval(), len(layers), report


if __name__ == "__main__":
    verb, path = sys.argv[1:]
    {"images": images, "make": make, "check": check}[verb](Path(path))
