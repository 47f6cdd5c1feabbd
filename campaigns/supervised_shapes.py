"""Supervised losses at random shapes, each computed here and by TRL's code or PyTorch's.

Models are those of ``model_shapes.py``. A step's rows, of random lengths and masks, perhaps each
with a weight of its own, are batched as a run does: nll or dft, with smoothing of labels, z-loss
and the loss that balances experts. Without weights and z-loss TRL's ``SFTTrainer.compute_loss`` is
what is exact, else its formula in PyTorch, both over transformers and PEFT in float64 on the
weights that our device holds. Compared are the loss, the share of labels that are hit, the held-out
loss of the same rows and the gradient of all that is trained. Needs torch, transformers, peft, trl.

``python -m campaigns.supervised_shapes --count N --seed S``, with FAMILIES=MODEL_TYPE,...
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from campaigns.answer_steps import Result, scaled, with_head
from campaigns.drawn_models import Drawn, Errors, drawn, errors
from campaigns.drawn_models import Result as Whole
from campaigns.drawn_texts import Learnt, learnt
from campaigns.model_shapes import (
    SENSITIVE,
    Campaign,
    Trial,
    described,
    judged,
    met,
    try_all,
)
from campaigns.support import Tally, campaign
from campaigns.text_steps import blocks_of, ours
from campaigns.torch_models import TorchModel
from campaigns.trl_losses import Texts, supervised_loss
from qlora_wgpu.data import Example


def theirs(
    trial: Trial, step: Learnt, dtype: torch.dtype = torch.float64, *, autocast: bool = False
) -> Result:
    """TRL's loss where it has one, else PyTorch's."""
    policy = trial.theirs().cast(dtype)
    texts = Texts(policy, autocast=autocast)
    formula, figures = by_formula(step, policy, autocast=autocast)
    loss = formula
    if step.is_plain:
        loss, told = supervised_loss(step.config.train, texts, step.rows)
        apart = told["mean_token_accuracy"] - figures["mean_token_accuracy"]
        assert abs(apart) < 1e-6, (told, figures)
    if step.coefficient:
        loss = loss + step.coefficient * balance(step, policy, autocast=autocast)
    if loss.requires_grad:
        loss.backward()
    gradients = {
        name: np.zeros(tuple(p.shape)) if p.grad is None else p.grad.double().numpy().copy()
        for name, p in policy.trained.items()
    }
    return Result(float(loss.detach()), figures, gradients)


def by_formula(
    step: Learnt, policy: TorchModel, *, autocast: bool
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss without that of experts, label by label; and the figures."""
    given = step.config.train
    losses, weights, plain, hits = [], [], [], []
    for row in step.rows:
        targets = torch.from_numpy(row.labels[1:].astype(np.int64))
        known = targets != -100
        if not known.any():
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = policy.logits_of(row.input_ids).logits[0, :-1][known]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logs = torch.log_softmax(logits, -1)
        nll = -logs.gather(-1, targets[known][:, None])[:, 0]
        epsilon, zeta = given.label_smoothing_factor, given.z_loss_weight
        bent = (1 - epsilon) * nll - epsilon * logs.mean(-1)
        bent = bent + zeta * torch.logsumexp(logits, -1) ** 2
        losses.append(bent * torch.exp(-nll).detach() if given.loss == "dft" else bent)
        weights.append(torch.full_like(nll, row.weight))
        plain.append(nll.detach())
        hits.append((logits.argmax(-1) == targets[known]).to(nll.dtype))
    weight, hit = torch.cat(weights), torch.cat(hits)
    loss = (weight * torch.cat(losses)).sum() / weight.sum()
    return loss, {
        "mean_token_accuracy": float((weight * hit).sum() / weight.sum()),
        "eval_loss": float(torch.cat(plain).mean()),
        "eval_mean_token_accuracy": float(hit.mean()),
    }


def balance(step: Learnt, policy: TorchModel, *, autocast: bool) -> torch.Tensor:
    """The mean of the micro-batches', weighted by what their labels weigh."""
    total, count = torch.zeros(()), 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for block in blocks_of(step):
            rows = [step.rows[i] for row in block for i in row]
            keys = {"output_router_logits": True}
            outputs = [policy.logits_of(row.input_ids, **keys) for row in rows]
            if not outputs[0].router_logits:
                return total
            own: Any = policy._balance(outputs) / policy.causal.router_aux_loss_coef
            weight = sum(row.weight * row.num_label_tokens for row in rows)
            total, count = total + weight * own, count + weight
    return total / count


def with_hits(rng: random.Random, trial: Trial, step: Learnt) -> Learnt:
    """The same, with some tokens that the model would have said itself."""
    policy, rows = trial.theirs().cast(torch.float64), list(step.rows)
    for number in rng.sample(range(len(rows)), min(2, len(rows))):
        row = rows[number]
        if len(row) < 2 or rng.random() < 0.3:
            continue
        ids = policy.speaking(row.input_ids, rng.sample(range(1, len(row)), min(3, len(row) - 1)))
        labels = np.where(row.labels == -100, -100, ids)
        rows[number] = Example(ids, labels, row.weight)
    return replace(step, rows=rows)


def compared(got: Result, exact: Result, *, counted: bool) -> Errors:
    """How far a result is off; of what is counted only where rounding moves none."""
    names = [n for n in exact.metrics if counted or not n.endswith("accuracy")]
    made = [
        Whole(r.loss, [np.array([r.metrics[n] for n in names])], r.gradients) for r in (got, exact)
    ]
    return errors(*made)


class Supervised(Campaign):
    """Trials of supervised losses."""

    def _drawn(self, rng: random.Random, model_type: str) -> Drawn:
        return with_head(rng, drawn(rng, model_type))

    def _compare(self, trial: Trial, rng: random.Random, how: str) -> None:
        step = learnt(rng, trial.case)
        if not any(row.num_label_tokens and row.weight for row in step.rows):
            self.tally.add("nothing to learn")
            return
        # With the seeded adapter most labels have a probability of 0, which is their weight in dft.
        trial.adapter = scaled(trial.adapter, rng.choice((0.3, 0.1, 0.03)))
        step = with_hits(rng, trial, step)
        exact = theirs(trial, step)
        if sum(float(np.square(a).sum()) for a in exact.gradients.values()) < 1e-12:
            self.tally.add("nothing is learnt any more")
            return
        way = rng.choice(sorted(self.ways))
        kinds = (("float32", torch.float32, False), ("bfloat16", torch.float32, True))
        for dtype, plain, autocast in kinds[: 2 if rng.random() < 0.5 else 1]:
            counted = dtype == "float32"
            told_by = theirs(trial, step, plain, autocast=autocast)
            like = compared(told_by, exact, counted=counted)
            model = trial.opened(dtype, self.ways[way], fresh=True)
            result = ours(model, step, trial.adapter)
            model.close()
            got = compared(result, exact, counted=counted)
            self._note(f"{dtype}, {way}", got, trial.case, how)
            kind = f"{dtype}, {step.config.train.loss}"
            kind += ", weights" if step.config.data.has_weights else ""
            if dtype == "bfloat16" and like.whole > SENSITIVE:
                self.tally.add(f"{dtype}, PyTorch is too far off to tell")
            elif judged(got, like, dtype, rerouted=met(trial.case.config)):
                self.tally.add(kind)
            else:
                what = f"{got}; PyTorch's own {like}; {told(step, trial.case)}"
                self.tally.fail(f"differs: {kind}", f"{how}: {way}: {what}")


def told(step: Learnt, case: Drawn) -> str:
    """All that was drawn."""
    rows = [(len(row), row.num_label_tokens, row.weight) for row in step.rows]
    train = step.config.train.model_dump(exclude_defaults=True)
    data = step.config.data.model_dump(exclude_defaults=True)
    return f"{rows} {train} {data} {step.coefficient}; {described(case)}"


def run(count: int, seed: int, tally: Tally) -> None:
    """So many trials of every family."""
    try_all(Supervised(seed, tally), count, tally)


if __name__ == "__main__":
    campaign("supervised losses at random shapes", run, 1)
