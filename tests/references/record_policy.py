"""Records steps of GRPO and its kin as TRL's trainer computes them.

usage: python tests/references/record_policy.py

Needs torch, transformers, peft and trl. Writes tests/references/policy.npz: of the recorded Llama
with its seeded adapter (record.py), three steps of AdamW over the same completions, whose log
probabilities are those before the first; by case losses, metrics, and of each gradient and of the
last adapter its norm and projections (``projections.py``).
"""

import json
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from record import ALPHA, adapted, peft_name  # noqa: E402

from references.policy_cases import (  # noqa: E402
    CASES,
    MAX_COMPLETION_LENGTH,
    RATE,
    STEPS,
    advantages,
    completions,
)  # fmt: skip
from references.projections import projections  # noqa: E402


def logps_and_entropies(model, ids, mask, count, temperature):
    """Of each row by itself: padding on the left would move its positions."""
    rows = []
    for row, own in zip(ids, mask, strict=True):
        logits = model(input_ids=row[own == 1][None]).logits[0, :-1] / temperature
        logps = logits.log_softmax(-1)
        made = logps.gather(-1, row[own == 1][1:, None])[:, 0]
        entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()
        answer = int(own[-count:].sum())
        pair = torch.stack([made, entropies])[:, -answer:]
        rows.append(torch.nn.functional.pad(pair, (0, count - answer)))
    return torch.stack(rows, 1)


def logps_of(*given):
    return logps_and_entropies(*given)[0]


def trainer(case):
    """What ``_compute_loss`` looks at of a trainer."""
    options = {
        "loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None,
        "sequence_level": False, "temperature": 1.0,
        "use_bias_correction_kl": True, "top_entropy_quantile": 1.0, **CASES[case],
    }  # fmt: skip
    high = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    same = SimpleNamespace(
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        num_processes=1,
        sync_gradients=True,
    )
    made = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=same,
        loss_type=options["loss_type"], beta=options["beta"],
        epsilon_low=options["epsilon"], epsilon_high=high,
        importance_sampling_level="sequence" if options["sequence_level"] else "token",
        top_entropy_quantile=options["top_entropy_quantile"], use_vllm=False,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False, _entropy_bonus_enabled=False,
        max_completion_length=MAX_COMPLETION_LENGTH,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(
            delta=options["delta"], steps_per_generation=1,
            use_bias_correction_kl=options["use_bias_correction_kl"],
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        ),
    )  # fmt: skip

    def logps(model, ids, mask, count, **_):
        return *logps_and_entropies(model, ids, mask, count, options["temperature"]), None

    made._get_per_token_logps_and_entropies = logps
    made.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, made)
    return made, options


def batch():
    """Prompts padded on their left, completions on their right."""
    prompts, answers = completions()
    p, c = max(map(len, prompts)), max(map(len, answers))
    ids = torch.zeros(2, len(prompts), max(p, c), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[0, row, p - len(prompt) : p] = torch.tensor(prompt)
        mask[0, row, p - len(prompt) : p] = 1
        ids[1, row, : len(answer)] = torch.tensor(answer)
        mask[1, row, : len(answer)] = 1
    return {
        "prompt_ids": ids[0, :, :p], "prompt_mask": mask[0, :, :p],
        "completion_ids": ids[1, :, :c], "completion_mask": mask[1, :, :c],
    }  # fmt: skip


def record(case):
    model, trained = adapted("llama", torch.float64)
    self, options = trainer(case)
    inputs = batch()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    count = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        old = logps_of(model, ids, mask, count, options["temperature"])
        with model.disable_adapter():
            reference = logps_of(model, ids, mask, count, options["temperature"])
    inputs |= {
        "advantages": torch.from_numpy(advantages()), "old_per_token_logps": old,
        "ref_per_token_logps": reference, "num_items_in_batch": inputs["completion_mask"].sum(),
    }  # fmt: skip
    inputs["old_logps"] = (old * inputs["completion_mask"]).sum(1)
    kind = RLOOTrainer if options["loss_type"] == "rloo" else GRPOTrainer
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)
    losses, gradients, names = [], [], sorted(trained, key=peft_name)
    for _ in range(STEPS):
        self._metrics["train"].clear()
        loss = kind._compute_loss(self, model, inputs)
        loss.backward()
        losses.append(loss.item())
        gradients.append([
            (np.linalg.norm(g), *projections(peft_name(n), g))
            for n, g in ((n, trained[n].grad.numpy()) for n in names)
        ])  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    last = [projections(peft_name(n), trained[n].detach().numpy()) for n in names]
    metrics = {k: v[0] for k, v in self._metrics["train"].items()}
    print(case, losses, metrics, flush=True)
    return {
        f"{case}:losses": losses, f"{case}:gradients": gradients, f"{case}:adapter": last,
        f"{case}:metrics": json.dumps(metrics), "names": [peft_name(n) for n in names],
    }  # fmt: skip


def main():
    torch.set_num_threads(1)
    assert ALPHA == 10
    arrays = {}
    for case in CASES:
        arrays |= record(case)
    np.savez_compressed(HERE / "policy.npz", **arrays)


if __name__ == "__main__":
    main()
