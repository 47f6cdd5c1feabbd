"""Records what PEFT makes of starts that are parts of the base: PiSSA and OLoRA.

usage: python tests/references/record_starts.py

Needs torch, transformers and peft. Writes tests/fixtures/starts.npz: of each kind the pairs, the
logits and the gradients that an adapter begins with; and what PEFT saves, as plain LoRA for the
base as it was, of one that has moved; and the pairs of one layer whose singular values lie far from
each other.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from record import HERE, SHOWN, make, peft_name
from safetensors.numpy import load_file
from seeded import adapter, batch, separated_weight

TARGETS = ["q_proj", "down_proj"]


def started(kind):
    model = make("llama")[0].float()
    config = LoraConfig(r=5, lora_alpha=15, target_modules=TARGETS, init_lora_weights=kind)
    return get_peft_model(model, config).eval()


def separated(kind):
    """A and B that PEFT begins with beside it."""
    layer = torch.nn.Sequential(torch.nn.Linear(100, 72, bias=False))
    layer[0].weight.data = torch.from_numpy(separated_weight())
    config = LoraConfig(r=5, lora_alpha=15, target_modules=["0"], init_lora_weights=kind)
    pair = get_peft_model(layer, config).base_model.model[0]
    return {
        f"{kind}:separated:A": pair.lora_A["default"].weight.detach().numpy(),
        f"{kind}:separated:B": pair.lora_B["default"].weight.detach().numpy(),
    }


def main():
    recorded = {}
    ids, mask, labels = (torch.from_numpy(array) for array in batch())
    for kind in ("pissa", "olora"):
        recorded |= separated(kind)
        model = started(kind)
        pairs = {peft_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        recorded |= {f"{kind}:pair:{n}": p.detach().numpy().copy() for n, p in pairs.items()}
        found = model(input_ids=ids, attention_mask=mask, labels=labels)
        found.loss.backward()
        recorded[f"{kind}:logits"] = found.logits.detach()[..., :SHOWN].numpy()
        recorded |= {f"{kind}:grad:{n}": p.grad.numpy() for n, p in pairs.items()}
        with tempfile.TemporaryDirectory() as folder:
            # As it is written for a conversion, it began as any adapter does.
            model.peft_config["default"].init_lora_weights = True
            model.save_pretrained(f"{folder}/start")
            model.peft_config["default"].init_lora_weights = kind
            with torch.no_grad():
                for name, array in adapter({n: list(p.shape) for n, p in pairs.items()}).items():
                    pairs[name].add_(torch.from_numpy(array))
                moved = model(input_ids=ids, attention_mask=mask).logits
            model.save_pretrained(
                folder, path_initial_model_for_weight_conversion=f"{folder}/start"
            )
            saved = load_file(f"{folder}/adapter_model.safetensors")
            config = json.loads(Path(folder, "adapter_config.json").read_text())
        recorded[f"{kind}:moved"] = moved[..., :SHOWN].numpy()
        recorded |= {f"{kind}:saved:{n}": a for n, a in saved.items()}
        recorded[f"{kind}:config"] = json.dumps(config)
    np.savez_compressed(HERE.parent / "fixtures/starts.npz", **recorded)


if __name__ == "__main__":
    main()
