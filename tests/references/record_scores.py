"""Records what transformers, PEFT and TRL compute for reward models and classifiers.

usage: python tests/references/record_scores.py [case ...]

Needs torch, transformers, peft and trl; tests/references/README has the versions. Writes
scores/CASE.npz: config.json, shapes, scores, gradients of all that is trained, three losses of
AdamW with TRL's metrics, the adapter after them, and the names and adapter_config.json that PEFT
saves. Weights and adapters follow from their names.
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from case_parts import ODD
from peft import LoraConfig, get_peft_model
from record_heads import file_name, saved
from safetensors.numpy import save_file
from safetensors.torch import load_file
from seeded import adapter, norm_offset, weights
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import RewardTrainer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from references.score_cases import (  # noqa: E402
    ALPHA,
    CASES,
    CENTER,
    CLASS_WEIGHTS,
    MARGINS,
    R,
    inputs,
    targets,
)

STEPS, RATE = 3, 5e-3
PROBLEMS = {"multi": "multi_label_classification", "regression": "regression"}


def base_model(case):
    """The classifier on a language model's files, its config.json, and its tensors' shapes."""
    model_type, changes, _, classes, kind = CASES[case]
    config = AutoConfig.for_model(model_type, **{**ODD, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = f"{folder}/model.safetensors"
        shapes = {n: list(t.shape) for n, t in load_file(file).items()}
        saved_config = json.loads(Path(folder, "config.json").read_text())
        save_file(weights(shapes, norm_offset(model_type)), file, {"format": "pt"})
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", num_labels=classes,
            problem_type=PROBLEMS.get(kind, "single_label_classification"),
        )  # fmt: skip
    return model.eval(), saved_config, shapes


def adapted(case):
    model, config, shapes = base_model(case)
    lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=CASES[case][2], task_type="SEQ_CLS")
    model = get_peft_model(model, lora).double().eval()
    trained = {file_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    start = adapter({name: list(p.shape) for name, p in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(start[name]))
    return model, trained, config, shapes


def loss_of(case, model, ids, mask, given):
    """The loss, and TRL's metrics of a reward model."""
    kind = CASES[case][4]
    if not kind.startswith("reward"):
        labels = given[:, 0].long() if kind in ("single", "weighted") else given
        if kind == "weighted":
            logits = model(input_ids=ids, attention_mask=mask).logits
            weight = torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
            return cross_entropy(logits, labels, weight=weight), {}
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss, {}
    order = [0, 2, 4, 1, 3, 5]  # TRL has all chosen in front
    batch = {"input_ids": ids[order], "attention_mask": mask[order]}
    has_margin = kind == "reward-margin"
    if has_margin:
        batch["margin"] = torch.tensor(MARGINS, dtype=torch.float64)
    own = SimpleNamespace(
        model=model, _total_train_tokens=0, _tp_size=1,
        args=SimpleNamespace(center_rewards_coefficient=CENTER if has_margin else None),
        accelerator=SimpleNamespace(gather=lambda t: t, gather_for_metrics=lambda t: t),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )  # fmt: skip
    loss = RewardTrainer.compute_loss(own, model, batch)
    return loss, {n: v[-1] for n, v in own._metrics["eval"].items() if n != "num_tokens"}


def record(case):
    ids, mask = map(torch.from_numpy, inputs())
    given = torch.from_numpy(targets(case))
    model, trained, config, shapes = adapted(case)
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=mask).logits.numpy()
    names, peft_config = saved(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.01)
    losses, metrics, gradients = [], [], {}
    for step in range(STEPS):
        loss, found = loss_of(case, model, ids, mask, given)
        loss.backward()
        if step == 0:
            gradients = {f"grad:{n}": p.grad.float().numpy().copy() for n, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        metrics.append(found)
    after = {f"after:{n}": p.detach().float().numpy() for n, p in trained.items()}
    (HERE / "scores").mkdir(exist_ok=True)
    file = HERE / "scores" / f"{case}.npz"
    np.savez_compressed(
        file, config=json.dumps(config), shapes=json.dumps(shapes),
        norm_offset=norm_offset(CASES[case][0]), names=json.dumps(names),
        adapter_config=json.dumps(peft_config, default=str), scores=scores,
        losses=np.array(losses), metrics=json.dumps(metrics), **gradients, **after,
    )  # fmt: skip
    print(f"{case}: {len(gradients)} gradients, {file.stat().st_size // 1024} KiB, {losses}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        record(case)
