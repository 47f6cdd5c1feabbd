"""What PyTorch and PEFT have to do with the walk; run by a Python that has them.

usage: python tests/references/walked_adapters.py make|check FOLDER
"""

import json
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

warnings.filterwarnings("ignore")


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def make(place, task):
    """An adapter of random numbers, as PEFT saves it."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **task["peft"])
    model = get_peft_model(opened(place / task["base"]), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(place / task["out"] / "adapter")


def check(place, task):
    """The logits of a base with an adapter, or of a model."""
    model = opened(place / task["model"])
    if task.get("adapter"):
        if rows := task.get("rows"):
            model.resize_token_embeddings(rows)
        model = PeftModel.from_pretrained(model, place / task["adapter"]).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(task["ids"])).logits
    np.save(place / f"{task['case']}.npy", logits.numpy())


def main(verb, folder):
    place, answers = Path(folder), {}
    for task in json.loads((place / "tasks.json").read_text()):
        try:
            {"make": make, "check": check}[verb](place, task)
        except Exception:
            answers[f"{task['case']} error"] = traceback.format_exc()[-1500:]
    (place / "answers.json").write_text(json.dumps(answers))
    if verb == "make" and answers:
        sys.exit("\n".join(answers.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
