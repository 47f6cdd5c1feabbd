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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from campaigns.drawn_answers import Result, scaled, with_head
from campaigns.drawn_models import Arrays, Drawn, Errors, drawn, errors
from campaigns.drawn_models import Result as Whole
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
from campaigns.torch_models import TorchModel
from campaigns.trl_losses import Texts, supervised_loss
from qlora_wgpu import QLoRAModel
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.ops.optimizers import STATS_BALANCE, STATS_CORRECT, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.training.batching import BatchSampler, padded_batch
from qlora_wgpu.training.evaluation import held_out_loss
from qlora_wgpu.training.preferences import training_options


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


LENGTHS = (1, 2, 3, 7, 16, 17, 33, 65, 130)
WEIGHTS = (1.0, 1.0, 0.5, 0.25, 3.0, 1e-3, 40.0)


@dataclass(frozen=True)
class Learnt:
    """A step over rows that are learnt as they are.

    Attributes:
        rows: Tokens, labels and weight of each; the weights are 1 where data has no column of them.
        config: How they are batched, and the loss.
        coefficient: That of the loss that balances experts.
    """

    rows: list[Example]
    config: Config
    coefficient: float

    @property
    def is_plain(self) -> bool:
        """Whether a trainer of TRL's computes its loss: without weights and z-loss."""
        return not self.config.data.has_weights and not self.config.train.z_loss_weight

    @property
    def dataset(self) -> Dataset:
        """What data files with these rows become."""
        return Dataset(self.rows)


def learnt(rng: random.Random, case: Drawn) -> Learnt:
    """A step over rows of a drawn model's tokens."""
    longest, weighted = rng.choice((8, 24, 65, 130)), rng.random() < 0.5
    count = rng.choice((1, 2, 3, 5, 9))
    rows = [_row(rng, case.config["vocab_size"], longest, weighted=weighted) for _ in range(count)]
    if weighted and count > 2 and rng.random() < 0.3:  # of the engine's; data leaves such rows out
        rows[0] = Example(rows[0].input_ids, rows[0].labels, 0.0)
    size = rng.choice((1, 2, 3, 8))
    train: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": -(-count // size),
        "gradient_checkpointing": rng.random() < 0.5,
        "seed": rng.randrange(100),
    }
    if rng.random() < 0.5:
        train["loss_type"] = "dft"
    else:
        train["label_smoothing_factor"] = rng.choice((0.0, 0.0, 0.1, 0.6))
        train["z_loss_weight"] = rng.choice((0.0, 0.0, 1e-4, 0.05))
    balanced = bool(case.config.get("output_router_logits"))
    if balanced and rng.random() < 0.6:
        train["router_aux_loss_coef"] = rng.choice((0.0, 0.2))
    data: dict[str, Any] = {"max_seq_length": longest, "packing": rng.random() < 0.4}
    data["group_by_length"] = rng.random() < 0.5
    if weighted:
        data["columns"] = {"weight": "w"}
    config = {"model": {"path": "unused"}, "data": {"train": "unused", **data}, "train": train}
    own = case.config.get("router_aux_loss_coef", 0.001) if balanced else 0.0
    return Learnt(rows, Config.model_validate(config), train.get("router_aux_loss_coef", own))


def _row(rng: random.Random, vocab: int, longest: int, *, weighted: bool) -> Example:
    length = min(rng.choice(LENGTHS), longest)
    ids = np.array([rng.randrange(vocab) for _ in range(length)], np.int32)
    labels, kind = ids.copy(), rng.choice(("all", "prompt", "prompt", "holes", "none"))
    if kind == "prompt":
        labels[: rng.randrange(length)] = -100
    if kind == "holes":
        labels[[rng.random() < 0.3 for _ in labels]] = -100
    if kind == "none" and rng.random() < 0.5:
        labels[:] = -100
    return Example(ids, labels, rng.choice(WEIGHTS) if weighted else 1.0)


Blocks = list[list[tuple[int, ...]]]


def blocks_of(step: Learnt) -> Blocks:
    """The rows of each micro-batch that has a label, as a run's first step takes them."""
    plan = BatchSampler.of(step.dataset.lengths, step.config)
    return [
        block
        for block in plan.blocks(0)
        if any(step.rows[i].num_label_tokens for row in block for i in row)
    ]


def ours(model: QLoRAModel, step: Learnt, adapter: Arrays) -> Result:
    """The first step of a run, as its loop computes it; and the rows as held-out data."""
    config, dataset = step.config, step.dataset
    plan, weighted = BatchSampler.of(dataset.lengths, config), config.data.has_weights
    longest = max(config.data.max_seq_length, plan.longest)
    model.load_adapter(adapter)
    model.options = training_options(config.train, weighted=weighted)
    model.zero_gradient()
    model.zero_stats()
    for block in blocks_of(step):
        rows = [[dataset[i] for i in row] for row in block]
        batch = padded_batch(rows, plan.batch_size, longest)
        model.accumulate(
            *model.checked(batch.input_ids, batch.labels, batch.attention_mask),
            weights=batch.weights if weighted else None,
        )
    stats = [float(value) for value in model.read_stats()]
    count = stats[STATS_TOKENS]
    gradients = model.adapter.split(model.read_flat(model.adapter.gradient) / count)
    loss = stats[STATS_LOSS] + model.router_aux_loss_coef * stats[STATS_BALANCE]
    model.zero_gradient()
    model.zero_stats()
    held_out = held_out_loss(model, dataset, plan.batch_size, longest)
    figures = {
        "mean_token_accuracy": stats[STATS_CORRECT] / count,
        "eval_loss": held_out.loss / held_out.tokens,
        "eval_mean_token_accuracy": held_out.correct / held_out.tokens,
    }
    return Result(loss / count, figures, gradients)


if __name__ == "__main__":
    campaign("supervised losses at random shapes", run, 1)
