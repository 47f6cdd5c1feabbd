"""Records what PEFT computes with an adapter on the parameters that hold gpt-oss's experts.

usage: python tests/references/record_parameters.py

Needs torch, transformers and peft. Writes tests/fixtures/gpt_oss_parameters.npz: the shapes of the
adapter's tensors, whose values follow from their names, its adapter_config.json, and logits.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from record import HERE, SHOWN, make, peft_name
from seeded import adapter, batch

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def main():
    model = make("gpt_oss")[0]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], target_parameters=PARAMETERS)
    model = get_peft_model(model, config).double().eval()
    trained = {peft_name(n): p for n, p in model.named_parameters() if "lora_" in n}
    shapes = {name: list(p.shape) for name, p in trained.items()}
    with torch.no_grad():
        for name, array in adapter(shapes).items():
            trained[name].copy_(torch.from_numpy(array))
        ids, mask, _ = (torch.from_numpy(a) for a in batch())
        logits = model(input_ids=ids, attention_mask=mask).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads(Path(folder, "adapter_config.json").read_text())
    np.savez_compressed(
        HERE.parent / "fixtures/gpt_oss_parameters.npz", shapes=json.dumps(shapes),
        adapter=json.dumps(written), logits=logits[..., :SHOWN].float().numpy(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
