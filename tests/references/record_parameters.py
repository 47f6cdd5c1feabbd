"""Records what PEFT computes with adapters on the parameters that hold mixtures' experts.

usage: python tests/references/record_parameters.py [case ...]

Needs torch, transformers and peft. Writes tests/references/parameters/CASE.npz for the cases whose
experts have adapters: the shapes of the adapter's tensors, whose values follow from their names,
its adapter_config.json, logits, the loss, and gradients of the first layer that has experts.
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


def record(case):
    model = make(case)[0]
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=PARAMETERS)
    if "deepseek" in case or "lite" in case:
        config.target_modules = {"o_proj"}
    model = get_peft_model(model, config).double().eval()
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
    first = next(name for name in shapes if ".experts." in name).partition("experts.")[0]
    gradients = {
        f"grad:{name}": parameter.grad.float().numpy()
        for name, parameter in trained.items()
        if name.startswith(f"{first}experts.")
    }
    np.savez_compressed(
        HERE / f"parameters/{case}.npz", shapes=json.dumps(shapes), adapter=json.dumps(written),
        logits=output.logits.detach()[..., :SHOWN].float().numpy(), loss=output.loss.item(),
        **gradients,
    )  # fmt: skip


def main():
    (HERE / "parameters").mkdir(exist_ok=True)
    every = [case for case in CASES if case.endswith("-experts") and "balanced" not in case]
    for case in sys.argv[1:] or every:
        record(case)
        print(case, flush=True)


if __name__ == "__main__":
    main()
