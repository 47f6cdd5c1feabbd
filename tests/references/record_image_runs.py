"""Records what transformers and PEFT make of rows with pictures, from the processor to gradients.

usage: python tests/references/record_image_runs.py [case ...]

Needs torch, transformers, peft and Pillow; tests/references/README has the versions. Writes
image_runs.npz: of each case (``image_run_cases.py``) config.json and shapes, the ids of each row,
projections of the tower's features, of logits and of gradients in float64, how far PyTorch's own
bfloat16 is off, ten losses of AdamW, and a few greedy tokens. Weights and adapter follow from their
names.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from references.image_run_cases import (  # noqa: E402
    ALPHA,
    CASES,
    MODULES,
    NEW_TOKENS,
    RATE,
    ROWS,
    R,
    messages,
    pictures,
    written,
)  # fmt: skip
from references.projections import projections  # noqa: E402
from references.record_image_prompts import processor_of  # noqa: E402
from references.seeded import adapter, norm_offset, weights  # noqa: E402

# ---- rows ----------------------------------------------------------------------------------------


def encoded(family, processor, row, prompt_only=False):
    """Ids of a row, or of its prompt, and the inputs of the tower."""
    given = messages(row)[: 1 if prompt_only else 2]
    template = processor.tokenizer.apply_chat_template
    text = template(given, tokenize=False, add_generation_prompt=prompt_only)
    images = [Image.fromarray(rgb) for rgb in pictures(row)]
    inputs = {}
    if images:
        is_nested = family in ("smolvlm", "gemma3")
        more = {"return_row_col_info": True} if family == "smolvlm" else {}
        inputs = dict(processor.image_processor([images] if is_nested else images, **more))
        parts = text.split(processor.image_token)
        text = parts[0]
        for number, part in enumerate(parts[1:]):
            text += processor.replace_image_token(inputs, number) + part
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    kept = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    return ids, {key: np.asarray(inputs[key]) for key in kept if key in inputs}


def labelled(family, processor, row):
    """Ids, and labels of all that follows the prompt."""
    ids, inputs = encoded(family, processor, row)
    prompt, _ = encoded(family, processor, row, prompt_only=True)
    assert ids[: len(prompt)] == prompt
    return ids, [-100] * len(prompt) + ids[len(prompt) :], inputs


def keywords(case, config, ids, inputs, dtype):
    """All that a model's forward takes besides ids."""
    told = {key: torch.from_numpy(array) for key, array in inputs.items()}
    told = {key: a.to(dtype) if a.is_floating_point() else a for key, a in told.items()}
    types = (ids == config.image_token_id).long()
    if case == "gemma3":
        told["token_type_ids"] = types
    if case.startswith("qwen"):
        told["mm_token_type_ids"] = types
    return told


# ---- models --------------------------------------------------------------------------------------


def base_folder(case, ids, folder):
    """A folder of the model with seeded weights; returns its config.json and shapes."""
    kind, changes = case, {**CASES[case][2], **ids}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **changes)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    file = Path(folder, "model.safetensors")
    shapes = {
        name: list(tensor.shape)
        for name, tensor in load_file(file).items() if ".vision_model.head." not in name
    }  # fmt: skip
    made = weights(shapes, norm_offset(kind))
    save_file({n: torch.from_numpy(a) for n, a in made.items()}, file, {"format": "pt"})
    return json.loads(Path(folder, "config.json").read_text()), shapes


def adapted(case, folder, dtype):
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    inner = "text_model" if case == "smolvlm" else "language_model"
    pattern = rf"model\.{inner}\.(?:.*\.)?(?:{'|'.join(MODULES)})"
    model = get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, target_modules=pattern)).eval()
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    start = adapter({name: list(p.shape) for name, p in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(start[name]))
    return model.to(dtype), trained


def computed(case, folder, rows, dtype):
    """Logits of all tokens, the loss and gradients by name, from one row after another.

    PyTorch computes NaN of padding that sees nothing within a sliding window.
    """
    model, trained = adapted(case, folder, dtype)
    logits, loss = backward(case, model, rows, dtype)
    return logits, loss, {name: p.grad.double().numpy() for name, p in trained.items()}


def losses_of(case, folder, rows, dtype):
    """Ten losses of AdamW, each of all rows."""
    model, trained = adapted(case, folder, dtype)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(backward(case, model, rows, dtype)[1])
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    return np.array(losses)


def backward(case, model, rows, dtype):
    """Logits of all tokens and the loss, whose gradients are added up."""
    count = sum(label != -100 for _, labels, _ in rows for label in labels)
    made, total = [], 0.0
    for ids, labels, inputs in rows:
        ids, labels = torch.tensor([ids]), torch.tensor(labels)
        told = keywords(case, model.config, ids, inputs, dtype)
        logits = model(input_ids=ids, **told).logits[0].double()
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
        )
        (losses / count).backward()
        made.append(logits.detach().numpy())
        total += losses.item() / count
    return np.concatenate(made), total


def features(case, folder, rows):
    """The tower's features of all pictures in float64, with DeepStack's next to them."""
    model, _ = adapted(case, folder, torch.float64)
    inner, made = model.get_base_model().model, []
    for _, _, inputs in rows:
        if not inputs:
            continue
        told = keywords("", model.config, torch.zeros(1), inputs, torch.float64)
        with torch.no_grad():
            out = inner.get_image_features(**told)
        parts = [out.pooler_output, *(out.deepstack_features if case == "qwen3_vl" else ())]
        of_all = [torch.cat(list(p)) if isinstance(p, list | tuple) else p for p in parts]
        flat = [each.reshape(-1, each.shape[-1]) for each in of_all]
        made.append(torch.cat(flat, dim=1).numpy())
    return np.concatenate(made)


def continued(case, folder, family, processor, row):
    """The most likely tokens after a row's prompt, each from a pass over everything before."""
    model, _ = adapted(case, folder, torch.float64)
    ids, inputs = encoded(family, processor, row, prompt_only=True)
    ids = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            told = keywords(case, model.config, ids, inputs, torch.float64)
            out = model(input_ids=ids, **told)
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
    return ids[0, -NEW_TOKENS:].numpy()


def off(theirs, exact):
    """The distance of gradients, relative to the norm of all."""
    differences = sum(np.sum((theirs[n] - exact[n]) ** 2) for n in exact)
    return np.sqrt(differences / sum(np.sum(g**2) for g in exact.values()))


def record(case):
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as files:
        family, ids = written(case, Path(files))
        processor = processor_of(family, Path(files))
        rows = [labelled(family, processor, row) for row in range(len(ROWS))]
        config, shapes = base_folder(case, ids, place)
        logits, loss, exact = computed(case, place, rows, torch.float64)
        rounded_logits, _, rounded = computed(case, place, rows, torch.bfloat16)
        made = features(case, place, rows)
        losses = {t: losses_of(case, place, rows, t) for t in (torch.float64, torch.float32)}
        tokens = [continued(case, place, family, processor, row) for row in range(len(ROWS))]
    names = sorted(exact)
    apart = np.linalg.norm(rounded_logits - logits) / np.linalg.norm(logits)
    print(case, [len(ids) for ids, *_ in rows], made.shape, loss, apart, off(rounded, exact))
    return {
        "config": json.dumps(config), "shapes": json.dumps(shapes),
        "norm_offset": norm_offset(case), "loss": loss, "tokens": np.stack(tokens),
        "losses": losses[torch.float64], "losses_float32": losses[torch.float32],
        **{f"ids{row}": np.array(ids) for row, (ids, *_) in enumerate(rows)},
        **{f"labels{row}": np.array(labels) for row, (_, labels, _) in enumerate(rows)},
        "features": projections("features", made), "features_norm": np.linalg.norm(made),
        "logits": projections("logits", logits), "logits_norm": np.linalg.norm(logits),
        "names": np.array(names),
        "adapter": json.dumps({n: list(exact[n].shape) for n in names}),
        "norms": np.array([np.linalg.norm(exact[n]) for n in names]),
        "gradients": np.stack([projections(n, exact[n]) for n in names]),
        "bfloat16": np.array([apart, off(rounded, exact)]),
    }  # fmt: skip


def main():
    torch.set_num_threads(1)
    path = HERE / "image_runs.npz"
    made = dict(np.load(path)) if path.exists() else {}
    for case in sys.argv[1:] or CASES:
        made = {key: value for key, value in made.items() if key.split("/")[0] != case}
        made |= {f"{case}/{key}": value for key, value in record(case).items()}
    np.savez_compressed(path, **made)


if __name__ == "__main__":
    main()
