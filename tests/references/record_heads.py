"""Records what PEFT computes where the head or the embedding is trained, as a pair or whole.

usage: python tests/references/record_heads.py [case ...]

Needs torch, transformers and peft; tests/references/README has the versions. Writes
heads/CASE.npz: config.json, shapes, logits, gradients of all that is trained, ten losses of AdamW,
and the names and adapter_config.json that PEFT saves. Weights and adapters follow from their names.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from record_tokens import HERE, RATE, SHOWN, STEPS, base_model
from safetensors.torch import load_file
from seeded import adapter, norm_offset

sys.path.insert(0, str(HERE.parent))
from references.head_cases import ALPHA, CASES, R, inputs


def file_name(parameter):
    """What a parameter is called in the files, adapters' names left out."""
    return parameter.replace(".modules_to_save.default", "").replace(".default", "")


def adapted(case, dtype):
    model, _, _ = base_model(*CASES[case][:2])
    model = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, **CASES[case][2]))
    model = model.to(dtype).eval()
    trained = {file_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    start = adapter({name: list(p.shape) for name, p in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(start[name]))
    return model, trained


def rounded_off(case, exact):
    """How far PyTorch's own bfloat16 is off: of the loss, and of the gradient that is furthest."""
    ids, mask, labels = map(torch.from_numpy, inputs())
    model, trained = adapted(case, torch.bfloat16)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    off = []
    for name, parameter in trained.items():
        g = exact[f"grad:{name}"]
        off.append(np.linalg.norm(parameter.grad.float().numpy() - g) / np.linalg.norm(g))
    return loss.item(), max(off)


def train(case, dtype):
    ids, mask, labels = map(torch.from_numpy, inputs())
    model, trained = adapted(case, dtype)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.01)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        if step == 0:
            gradients = {f"grad:{n}": p.grad.float().numpy().copy() for n, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return np.array(losses), gradients


def saved(model):
    """What PEFT writes: names with shapes, and its config."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder, "adapter_model.safetensors")
        names = {n: list(t.shape) for n, t in load_file(file).items()}
        return names, json.loads(Path(folder, "adapter_config.json").read_text())


def record(case):
    _, config, shapes = base_model(*CASES[case][:2])
    ids, mask, _ = map(torch.from_numpy, inputs())
    model, _ = adapted(case, torch.float64)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    names, peft_config = saved(model)
    losses, gradients = train(case, torch.float64)
    (HERE / "heads").mkdir(exist_ok=True)
    file = HERE / "heads" / f"{case}.npz"
    np.savez_compressed(
        file, config=json.dumps(config), shapes=json.dumps(shapes),
        norm_offset=norm_offset(CASES[case][0]), names=json.dumps(names),
        adapter_config=json.dumps(peft_config, default=str),
        logits=logits[..., :SHOWN].float().numpy(), last=logits[..., -1].float().numpy(),
        lse=torch.logsumexp(logits, -1).numpy(), losses=losses,
        bfloat16=np.array(rounded_off(case, gradients)),
        losses_float32=train(case, torch.float32)[0], **gradients,
    )  # fmt: skip
    print(
        f"{case}: {len(gradients)} gradients, {file.stat().st_size // 1024} KiB, {losses[:2]}",
        rounded_off(case, gradients),
    )
    print("  saved besides:", {n: s for n, s in names.items() if f"grad:{n}" not in gradients})
    print("  not saved:", [n for n in gradients if n[5:] not in names])


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        record(case)
