"""Whether the programs that results are meant for open them, and compute the same.

usage: python tests/references/exports.py make FOLDER [CASE]    with this project
       python tests/references/exports.py check FOLDER          with torch, transformers, peft,
                                                                bitsandbytes and gguf

A model and an adapter of the recorded CASE (llama by default) are made in bfloat16; the adapter,
the merged models, the 4-bit folder and the GGUF are each opened by their own program, and its
logits compared with this project's. tests/references/README.md has the figures.
"""

import json
import sys
from pathlib import Path

import numpy as np
from seeded import adapter, batch, weights

HERE = Path(__file__).parent


def make(folder, case="llama"):
    from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
    from qlora_wgpu.checkpoint.safetensors_file import Entry, write_stream
    from qlora_wgpu.exporting import export_gguf, merge, quantize_folder
    from qlora_wgpu.exporting.folders import as_dtype

    recorded = np.load(HERE / f"{case}.npz")
    base = folder / "base"
    base.mkdir(parents=True)
    config = {**json.loads(str(recorded["config"])), "dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(config))
    arrays = weights(json.loads(str(recorded["shapes"])), float(recorded["norm_offset"]))
    entries = {name: Entry("BF16", array.shape) for name, array in arrays.items()}
    write_stream(base / "model.safetensors", entries, lambda n: as_dtype(arrays[n], "BF16"))
    names = [n.split(".") for n in recorded.files if n.startswith("grad:")]
    lora = LoraConfig(
        r=5,
        lora_alpha=10,
        use_rslora=True,
        use_dora=case.endswith("-dora"),
        target_modules=sorted(
            {
                ".".join(n[-4:-2] if n[-3].isdigit() else n[-3:-2])
                for n in names
                if n[-1] == "weight"
            }
        ),
    )
    ids, mask, _ = batch()

    def logits(path, scheme, adapted):
        model = QLoRAModel.from_pretrained(path, lora, QuantConfig(scheme=scheme), "float32")
        if adapted:
            model.load_adapter(adapter({n: a.shape for n, a in model.adapter_state_dict().items()}))
            model.save_adapter(folder / "adapter")
        return model.logits(ids, mask)

    results = {
        "base": logits(base, "none", False),
        "adapter": logits(base, "none", True),
        "adapter on NF4": logits(base, "nf4", True),
    }
    merge(base, folder / "adapter", folder / "merged")
    merge(base, folder / "adapter", folder / "merged-dq", base="dequantized")
    quantize_folder(base, folder / "q4")
    results["merged"] = logits(folder / "merged", "none", False)
    results["merged-dq"] = logits(folder / "merged-dq", "none", False)
    results["q4"] = logits(folder / "q4", "nf4", False)
    if not lora.use_dora:
        export_gguf(base, folder / "adapter", folder / "adapter.gguf")
    np.savez(folder / "logits.npz", **results)


def check(folder):
    import torch
    from peft import PeftModel

    ours = np.load(folder / "logits.npz")
    ids, mask, _ = (torch.from_numpy(a) for a in batch())
    seen = mask.numpy() == 1

    def compare(name, model):
        with torch.no_grad():
            theirs = model(input_ids=ids, attention_mask=mask).logits.float().numpy()
        apart = np.abs(theirs - ours[name])[seen].max()
        print(f"{name}: largest logit {np.abs(theirs[seen]).max():.2f}, differ by {apart:.2e}")

    compare("base", load_plain(folder / "base"))
    compare(
        "adapter", PeftModel.from_pretrained(load_plain(folder / "base"), folder / "adapter").eval()
    )
    compare("merged", load_plain(folder / "merged"))
    compare("merged-dq", load_plain(folder / "merged-dq"))
    moved = np.abs(ours["adapter on NF4"] - ours["merged-dq"])[seen].max()
    print(
        f"merged-dq is {moved:.2e} from NF4 base and adapter: its weights are rounded to bfloat16"
    )
    compare_4bit(folder)
    if (folder / "adapter.gguf").exists():
        check_gguf(folder)


def load_plain(path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def compare_4bit(folder):
    """transformers reads the 4-bit folder, and finds what bitsandbytes itself makes of the base."""
    import torch
    from bitsandbytes.functional import quantize_4bit
    from transformers import AutoModelForCausalLM

    plain = dict(load_plain(folder / "base").named_modules())
    model = AutoModelForCausalLM.from_pretrained(folder / "q4", attn_implementation="eager")
    count, equal = 0, True
    for name, module in model.named_modules():
        if type(module).__name__ != "Linear4bit":
            continue
        codes_read, state = module.weight.data, module.weight.quant_state
        codes, own = quantize_4bit(
            plain[name].weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        pairs = [
            (codes_read, codes), (state.absmax, own.absmax), (state.code, own.code),
            (state.state2.absmax, own.state2.absmax), (state.state2.code, own.state2.code),
            (state.offset, own.offset),
        ]  # fmt: skip
        equal &= all(torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in pairs)
        equal &= state.shape == own.shape and state.blocksize == own.blocksize
        count += 1
    print(f"q4: {count} layers of bitsandbytes, bits equal to its own: {equal}")


def check_gguf(folder):
    """llama.cpp's layout, undone, is the adapter: alpha / r · B·A of each tensor."""
    import gguf
    from safetensors.numpy import load_file

    reader = gguf.GGUFReader(folder / "adapter.gguf")
    fields = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF")}
    tensors = {t.name: np.asarray(t.data) for t in reader.tensors}
    if fields["general.architecture"] != "llama":
        print(f"gguf: {fields}; {len(tensors)} tensors, of another layout than is compared here")
        return
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    heads = json.loads((folder / "base" / "config.json").read_text())
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, heads["num_hidden_layers"])
    worst = 0.0
    for name in stored:
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b = stored[name.replace("lora_A", "lora_B")]
        product = config["lora_alpha"] / np.sqrt(config["r"]) * (b @ stored[name])
        at = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        a, b = tensors[f"{at}.lora_a"], tensors[f"{at}.lora_b"]
        exported = fields["adapter.lora.alpha"] / len(a) * (b @ a)
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        if (leaf := module.rpartition(".")[2]) in key:
            count = heads[key[leaf]]
            rows = product.reshape(count, 2, -1, product.shape[1]).swapaxes(1, 2)
            product = rows.reshape(exported.shape)
        worst = max(worst, float(np.abs(exported - product).max() / np.abs(product).max()))
    print(f"gguf: {fields}; {len(tensors)} tensors, products differ by {worst:.2e} (relative)")


if __name__ == "__main__":
    verb, path, *rest = sys.argv[1:]
    {"make": make, "check": check}[verb](Path(path), *rest)
