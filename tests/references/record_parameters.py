"""Records what PEFT computes with adapters on the experts and on the routers of mixtures.

usage: python tests/references/record_parameters.py [kind/case ...]

Needs torch, transformers and peft. Writes tests/references/KIND/CASE.npz for the cases with
experts: the shapes of the adapter's tensors, whose values follow from their names, its
adapter_config.json, logits, the loss, and gradients of the first layer that has experts. Kinds are
``parameters``, of experts that are held together, ``routers``, and ``all_linear``, which takes both
where PEFT knows them.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from cases import CASES
from peft import LoraConfig, get_peft_model
from record import HERE, SHOWN, make, peft_name
from seeded import adapter, batch

PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
UNGATED = ["experts.up_proj", "experts.down_proj"]
ALL_LINEAR = ("qwen3_moe-experts", "gemma4-experts", "hunyuan_moe-experts", "mixtral-experts")


def routers_of(model):
    """The names of the routers' weights."""
    ends = ("gate.weight", "gate.wg.weight", "router.weight", "router.proj.weight")
    return [name for name, _ in model.named_parameters() if name.endswith(ends)]


def config_of(kind, case, model):
    if kind == "all_linear":
        return LoraConfig(r=2, lora_alpha=3, target_modules="all-linear")
    modules = ["o_proj" if "deepseek" in case or "lite" in case else "q_proj"]
    if kind == "parameters":
        names = UNGATED if model.config.model_type == "nemotron_h" else PARAMETERS
        return LoraConfig(r=2, lora_alpha=3, target_modules=modules, target_parameters=names)
    weights = routers_of(model)
    names = [name.removesuffix(".weight") for name in weights]
    if all(isinstance(model.get_submodule(name), torch.nn.Linear) for name in names):
        return LoraConfig(r=2, lora_alpha=3, target_modules=modules + names)
    return LoraConfig(r=2, lora_alpha=3, target_modules=modules, target_parameters=weights)


def record(kind, case):
    model = make(case)[0]
    routers = [name.removesuffix(".weight") for name in routers_of(model)]
    model = get_peft_model(model, config_of(kind, case, model)).double().eval()
    trained = {peft_name(n): p for n, p in model.named_parameters() if "lora_" in n}
    shapes = {name: list(p.shape) for name, p in trained.items()}
    with torch.no_grad():
        for name, array in adapter(shapes).items():
            trained[name].copy_(torch.from_numpy(array))
    ids, mask, labels = (torch.from_numpy(a) for a in batch())
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    output.loss.backward()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads(Path(folder, "adapter_config.json").read_text())
    if kind == "parameters":
        first = next(name for name in shapes if ".experts." in name).partition("experts.")[0]
        shown = f"{first}experts."
    else:
        shown = f"base_model.model.{routers[0]}."
    gradients = {
        f"grad:{name}": parameter.grad.float().numpy()
        for name, parameter in trained.items()
        if name.startswith(shown)
    }
    np.savez_compressed(
        HERE / f"{kind}/{case}.npz", shapes=json.dumps(shapes), adapter=json.dumps(written),
        logits=output.logits.detach()[..., :SHOWN].float().numpy(), loss=output.loss.item(),
        **gradients,
    )  # fmt: skip


def main():
    every = [case for case in CASES if case.endswith("-experts") and "balanced" not in case]
    names = {"parameters": every, "routers": every, "all_linear": ALL_LINEAR}
    chosen = [f"{kind}/{case}" for kind, cases in names.items() for case in cases]
    for each in sys.argv[1:] or chosen:
        kind, _, case = each.partition("/")
        (HERE / kind).mkdir(exist_ok=True)
        record(kind, case)
        print(each, flush=True)


if __name__ == "__main__":
    main()
