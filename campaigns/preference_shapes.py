"""Objectives over answers at random shapes, each computed here and by TRL's own code.

Models are those of ``model_shapes.py``. A step's answers, of random lengths, in pairs or judged,
are batched as a run does, with what the reference says; TRL's losses read transformers and PEFT in
float64 on the weights that our device holds. Compared are the loss, TRL's metrics and the gradient
of all that is trained. Needs torch, transformers, peft and trl.

``python -m campaigns.preference_shapes --count N --seed S``, with FAMILIES=MODEL_TYPE,...
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

from campaigns.drawn_answers import OTHER, Asked, Result, asked, ours, scaled, with_head
from campaigns.drawn_models import EXACT, Drawn, drawn, met
from campaigns.model_shapes import Campaign, Trial, described, try_all
from campaigns.support import Tally, campaign
from campaigns.torch_models import TorchModel
from campaigns.trl_losses import Texts, trl_loss

SENSITIVE = 0.2
COUNTED = ("rewards/accuracies", "mean_token_accuracy")


def theirs(
    trial: Trial, step: Asked, dtype: torch.dtype = torch.float64, *, autocast: bool = False
) -> Result:
    """TRL's."""
    case = trial.case
    policy = trial.theirs().cast(dtype)
    other = {name: OTHER * a for name, a in trial.adapter.items()} if step.from_adapter else {}
    reference = TorchModel(trial.place / "held", case.lora, other).cast(dtype)
    texts = Texts(policy, autocast=autocast), Texts(reference, autocast=autocast)
    loss, metrics = trl_loss(step.given, *texts, step.answers, step.longest)
    loss.backward()
    gradients = {
        name: np.zeros(tuple(p.shape)) if p.grad is None else p.grad.double().numpy().copy()
        for name, p in policy.trained.items()
    }
    return Result(float(loss.detach()), metrics, gradients)


def with_hits(rng: random.Random, trial: Trial, step: Asked) -> Asked:
    """The same, in half of DPO's with a chosen answer that the model would have said in part."""
    if step.given.objective != "dpo" or rng.random() < 0.5:
        return step
    answers = list(step.answers)
    at = rng.randrange(0, len(answers), 2)
    prompt, ids = answers[at].prompt, np.array(answers[at].prompt + answers[at].answer)
    places = range(max(len(prompt), 1), len(ids))
    policy = trial.theirs().cast(torch.float64)
    said = policy.speaking(ids, rng.sample(places, min(3, len(places)))).tolist()
    answers[at] = replace(answers[at], answer=said[len(prompt) :])
    return replace(step, answers=answers)


@dataclass
class Errors:
    """How far a result is off.

    Attributes:
        loss: Of the loss, of it or of 1.
        metrics: Of the metric that is furthest off, of the largest log probability, times β where
            it is a reward.
        whole: Of the whole gradient.
    """

    loss: float
    metrics: float
    whole: float
    name: str = ""

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, {self.name} {self.metrics:.1e}, gradient {self.whole:.1e}"


def errors(got: Result, exact: Result, step: Asked, *, counted: bool = True) -> Errors:
    """How far a result is off; shares of what is counted only if rounding moves none."""
    assert got.gradients.keys() == exact.gradients.keys()
    size = sum(float(np.linalg.norm(a)) ** 2 for a in exact.gradients.values()) ** 0.5
    off = sum(float(np.linalg.norm(got.gradients[n] - a)) ** 2 for n, a in exact.gradients.items())
    most = max(abs(exact.metrics.get(f"logps/{n}", 0.0)) for n in ("chosen", "rejected"))
    far, name = 0.0, ""
    for key, value in got.metrics.items():
        if key in COUNTED and not counted:
            continue
        scale = max(most, 1.0) * (step.given.beta if key.startswith("rewards/") else 1.0)
        if key == "rewards/accuracies" and step.has_ties:
            continue
        scale = 1.0 if key in COUNTED else scale
        each = abs(value - exact.metrics[key]) / scale
        if not each <= far:
            far, name = each, key
    loss = abs(got.loss - exact.loss) / max(abs(exact.loss), 1.0)
    return Errors(loss, far, off**0.5 / max(size, 1e-30), name)


class Preferences(Campaign):
    """Trials of objectives."""

    def _drawn(self, rng: random.Random, model_type: str) -> Drawn:
        return with_head(rng, drawn(rng, model_type))

    def _compare(self, trial: Trial, rng: random.Random, how: str) -> None:
        step = asked(rng, trial.case)
        if not step.answers:
            self.tally.add("nothing to learn")
            return
        factor = rng.choice((1.0, 0.3, 0.1))
        trial.adapter = scaled(trial.adapter, factor)
        step = with_hits(random.Random(how), trial, step)
        exact = theirs(trial, step)
        size = sum(float(np.linalg.norm(a)) ** 2 for a in exact.gradients.values()) ** 0.5
        way = rng.choice(sorted(self.ways))
        kinds = (("float32", torch.float32, False), ("bfloat16", torch.float32, True))
        for dtype, plain, autocast in kinds[: 2 if rng.random() < 0.4 else 1]:
            counted = dtype == "float32"
            told_by = theirs(trial, step, plain, autocast=autocast)
            like = errors(told_by, exact, step, counted=counted)
            model = trial.opened(dtype, self.ways[way], fresh=True)
            got_result = ours(model, step, trial.adapter)
            model.close()
            got = errors(got_result, exact, step, counted=counted)
            self._note(f"{dtype}, {way}", got.whole, size, how)
            what = f"{how}: {dtype}, {way}: {got}; PyTorch's own {like}; {told(step, trial.case)}"
            missing = exact.metrics.keys() - got_result.metrics.keys()
            missing = {m for m in missing if not m.startswith(("entropy", "num_t", "logits", "kl"))}
            if missing:
                self.tally.fail(f"misses {sorted(missing)}", what)
            self._judge(got, like, dtype, step, size, met(trial.case.config), what)

    def _judge(
        self, got: Errors, like: Errors, dtype: str, step: Asked, size: float, rerouted: bool,
        what: str,
    ) -> None:  # fmt: skip
        kind = f"{dtype}, {step.given.objective} {step.given.loss_type}"
        if size < 1e-9:
            self.tally.add(f"{dtype}, nothing is learnt any more")
            return
        if dtype == "bfloat16" and max(like.whole, like.loss) > SENSITIVE:
            self.tally.add(f"{dtype}, PyTorch is too far off to tell")
            return
        bound = max(EXACT, 4 * like.whole)
        others = max(EXACT, 4 * like.loss), max(EXACT, 4 * like.metrics)
        if dtype == "bfloat16":
            bound = 0.05 + 2 * like.whole
            others = 0.05 + 2 * like.loss, 0.05 + 2 * like.metrics
            if rerouted:
                bound = max(bound, 0.7)
                others = max(others[0], 0.3), max(others[1], 0.3)
        if got.whole <= bound and got.loss <= others[0] and got.metrics <= others[1]:
            self.tally.add(kind)
        else:
            self.tally.fail(f"differs: {kind}", what)

    def _note(self, way: str, whole: float, size: float, how: str) -> None:  # type: ignore[override]
        if size > 1e-9:
            self.worst[way] = max(self.worst.get(way, (0.0, "")), (whole, how))


def told(step: Asked, case: Drawn) -> str:
    """All that was drawn."""
    train, data = step.config.train, step.config.data
    lengths = [(len(a.prompt), len(a.answer), a.is_good) for a in step.answers]
    return (
        f"{step.given} {lengths} rows {train.per_device_train_batch_size} x "
        f"{train.gradient_accumulation_steps}, packing {data.packing}, "
        f"longest {data.max_seq_length}, from an adapter {step.from_adapter}; {described(case)}"
    )


def run(count: int, seed: int, tally: Tally) -> None:
    """So many trials of every family."""
    try_all(Preferences(seed, tally), count, tally)


if __name__ == "__main__":
    campaign("preferences at random shapes", run, 1)
