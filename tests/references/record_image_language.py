"""Records what PyTorch computes of the language models of vision-language models with images.

usage: python tests/references/record_image_language.py [CASE ...]

Needs torch, transformers and peft; tests/references/README has the versions. Features are random
and given to the model in place of what its tower makes. Writes image_language.npz: of each case
(``image_cases.py``) config.json and shapes, projections of logits and gradients, the loss,
and a few greedy tokens. Weights and adapter follow from their names.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from references.image_cases import (  # noqa: E402
    ALPHA,
    CASES,
    GRIDS,
    IMAGE,
    NEW_TOKENS,
    R,
    batch,
    features,
)  # fmt: skip
from references.projections import projections  # noqa: E402
from references.seeded import adapter, norm_offset, weights  # noqa: E402

TOWERS = ("vision", "visual", "projector", "connector")


def base_model(model_type, changes):
    """The model with seeded weights of its language model, its config.json and their shapes."""
    config = AutoConfig.for_model(model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads(Path(folder, "config.json").read_text())
        file = Path(folder, "model.safetensors")
        tensors = load_file(file)
        shapes = {
            n: list(t.shape) for n, t in tensors.items() if not any(each in n for each in TOWERS)
        }
        made = weights(shapes, norm_offset(model_type))
        tensors |= {n: torch.from_numpy(a) for n, a in made.items()}
        save_file(tensors, file, {"format": "pt"})
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
    return model.eval().double(), saved, shapes


def adapted(model, model_type, targets):
    inner = "text_model" if model_type in ("smolvlm", "idefics3") else "language_model"
    pattern = rf"model\.{inner}\.(?:.*\.)?(?:{'|'.join(targets)})"
    model = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, target_modules=pattern)).eval()
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    # PEFT saves an embedding's pair by other names.
    start = adapter({name: list(p.shape) for name, p in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(start[name]))
    return model, trained


def inputs(model_type, deepstack, ids, rows):
    """The keywords for some rows of the batch with these ids."""
    given = [torch.from_numpy(f).double() for row in rows for f in features(deepstack)[row]]
    width = given[0].shape[1] // (1 + deepstack) if given else 0
    grids = [grid for row in rows for grid in GRIDS[row]]
    told = {}
    if given:
        parts = [[f[:, i * width : (i + 1) * width] for f in given] for i in range(1 + deepstack)]
        pooled = torch.cat(parts[0])[None] if model_type == "gemma3" else parts[0]
        told["mm_encoder_outputs"] = {
            "image": SimpleNamespace(pooler_output=pooled, deepstack_features=parts[1:])
        }
    types = (ids == IMAGE).long()
    if model_type == "gemma3":
        told["token_type_ids"] = types
    if model_type == "gemma4":
        told["mm_token_type_ids"] = types
    if model_type.startswith("qwen") and given:
        told["mm_token_type_ids"] = types
        told["image_grid_thw"] = torch.tensor([[1, 2 * h, 2 * w] for h, w in grids])
    return told


def continued(model, model_type, deepstack, ids, row):
    """The most likely tokens after a row, each from a pass over everything before."""
    ids = ids[None]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            out = model(input_ids=ids, **inputs(model_type, deepstack, ids, [row]))
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
    return ids[0, -NEW_TOKENS:].numpy()


def record(case):
    model_type, changes, targets = CASES[case]
    model, config, shapes = base_model(model_type, changes)
    deepstack = len((changes["vision_config"] or {}).get("deepstack_visual_indexes", ()))
    model, trained = adapted(model, model_type, targets)
    ids, mask, labels = map(torch.from_numpy, batch())
    out = model(
        input_ids=ids, attention_mask=mask, labels=labels,
        **inputs(model_type, deepstack, ids, range(len(ids))),
    )  # fmt: skip
    out.loss.backward()
    logits = out.logits.detach().numpy()[mask.numpy() == 1]
    names = sorted(trained)
    tokens = [
        continued(model, model_type, deepstack, ids[row, : mask[row].sum()], row)
        for row in range(len(ids))
    ]
    gradients = {n: trained[n].grad.numpy() for n in names}
    print(case, out.loss.item(), [t.tolist() for t in tokens], flush=True)
    return {
        "config": json.dumps(config), "shapes": json.dumps(shapes), "deepstack": deepstack,
        "norm_offset": norm_offset(model_type), "loss": out.loss.item(), "tokens": np.stack(tokens),
        "logits": projections("logits", logits), "logits_norm": np.linalg.norm(logits),
        "names": np.array(names),
        "adapter": json.dumps({n: list(g.shape) for n, g in gradients.items()}),
        "norms": np.array([np.linalg.norm(gradients[n]) for n in names]),
        "gradients": np.stack([projections(n, gradients[n]) for n in names]),
    }  # fmt: skip


def main():
    torch.set_num_threads(1)
    cases, path = sys.argv[1:] or CASES, HERE / "image_language.npz"
    made = dict(np.load(path)) if sys.argv[1:] else {}
    for case in cases:
        made |= {f"{case}/{key}": value for key, value in record(case).items()}
    np.savez_compressed(path, **made)


if __name__ == "__main__":
    main()
