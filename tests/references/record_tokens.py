"""Records what PEFT computes where rows of the embedding, or of the head, are trained.

usage: python tests/references/record_tokens.py [case ...]

Needs torch, transformers and peft; tests/references/README has the versions. Writes
tokens/CASE.npz: config.json, shapes, logits, gradients of A, B and the rows, ten losses of AdamW,
and the names and adapter_config.json that PEFT saves. Weights and adapters follow from their names.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from case_parts import ODD
from peft import LoraConfig, get_peft_model
from record import peft_name
from safetensors.numpy import save_file
from safetensors.torch import load_file
from seeded import adapter, norm_offset, weights
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from references.token_cases import ALPHA, CASES, TARGETS, R, inputs  # noqa: E402

STEPS, RATE, SHOWN = 10, 5e-3, 40


def model_of(case):
    return base_model(*CASES[case][:2])


def base_model(model_type, changes):
    """The model, its config.json as it is saved, and its tensors' shapes."""
    config = AutoConfig.for_model(model_type, **{**ODD, **changes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shapes = {n: list(t.shape) for n, t in load_file(f"{folder}/model.safetensors").items()}
        saved = json.loads(Path(folder, "config.json").read_text())
        save_file(
            weights(shapes, norm_offset(model_type)),
            f"{folder}/model.safetensors",
            {"format": "pt"},
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval().double(), saved, shapes


def adapted(case, dtype):
    model, _, _ = model_of(case)
    lora = LoraConfig(
        r=R, lora_alpha=ALPHA, target_modules=TARGETS, trainable_token_indices=CASES[case][2]
    )
    model = get_peft_model(model, lora).to(dtype).eval()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = adapter({peft_name(n): list(p.shape) for n, p in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(start[peft_name(name)]))
    return model, trained


def train(case, dtype):
    ids, mask, labels = map(torch.from_numpy, inputs())
    model, trained = adapted(case, dtype)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.01)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        if step == 0:
            gradients = {
                f"grad:{peft_name(n)}": p.grad.float().numpy().copy() for n, p in trained.items()
            }
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return np.array(losses), gradients


def saved(model):
    """What PEFT writes: names with shapes, and its config."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        names = {
            n: list(t.shape) for n, t in load_file(f"{folder}/adapter_model.safetensors").items()
        }
        return names, json.loads(Path(folder, "adapter_config.json").read_text())


def record(case):
    _, config, shapes = model_of(case)
    ids, mask, _ = map(torch.from_numpy, inputs())
    model, _ = adapted(case, torch.float64)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    names, peft_config = saved(model)
    losses, gradients = train(case, torch.float64)
    assert {f"grad:{name}" for name in names} == set(gradients), (names, gradients.keys())
    (HERE / "tokens").mkdir(exist_ok=True)
    file = HERE / "tokens" / f"{case}.npz"
    np.savez_compressed(
        file, config=json.dumps(config), shapes=json.dumps(shapes),
        norm_offset=norm_offset(CASES[case][0]),
        adapter_config=json.dumps(peft_config, default=str),
        logits=logits[..., :SHOWN].float().numpy(), last=logits[..., -1].float().numpy(),
        lse=torch.logsumexp(logits, -1).numpy(), losses=losses,
        losses_float32=train(case, torch.float32)[0], **gradients,
    )  # fmt: skip
    print(f"{case}: {len(gradients)} gradients, {file.stat().st_size // 1024} KiB, {losses[:2]}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        record(case)
