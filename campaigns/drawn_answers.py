"""Answers of random lengths, an objective over them and how they are batched, drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from campaigns.drawn_models import Arrays, Drawn, drawn
from qlora_wgpu import QLoRAModel
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.ops.optimizers import STATS_LOSS, STATS_METRICS, STATS_TOKENS
from qlora_wgpu.ops.preference import METRICS, PAIR_LOSSES, Preference, means
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.preferences import PreferenceData, training_options
from qlora_wgpu.training.references import ReferenceModel

LENGTHS = (1, 1, 2, 3, 7, 16, 17, 33)
Ids = list[int]


@dataclass(frozen=True)
class Answer:
    """A prompt with an answer, and which of a pair it is, or whether it is good."""

    prompt: Ids
    answer: Ids
    is_good: bool


@dataclass(frozen=True)
class Asked:
    """An objective and the answers of a step.

    Attributes:
        given: The objective.
        answers: Pairs, chosen before rejected; or each by itself. None is longer than rows may be.
        config: How they are batched.
        from_adapter: Whether the reference is another adapter, not the base alone.
    """

    given: Preference
    answers: list[Answer]
    config: Config
    from_adapter: bool

    @property
    def longest(self) -> int:
        """Tokens of a row at most."""
        return self.config.data.max_seq_length

    @property
    def has_ties(self) -> bool:
        """Whether both answers of a pair are the same, so that rounding says which is better."""
        pairs = zip(self.answers[::2], self.answers[1::2], strict=False)
        return self.given.is_paired and any(a.answer == b.answer for a, b in pairs)

    @property
    def dataset(self) -> Dataset:
        """What data files with these answers become."""
        examples = []
        for each in self.answers:
            ids = np.array(each.prompt + each.answer, np.int32)
            labels = ids.copy()
            labels[: len(each.prompt)] = -100
            example, nothing = Example(ids, labels), Example(ids[:0], labels[:0])
            if self.given.is_paired:
                examples.append(example)
            else:
                examples += [example, nothing] if each.is_good else [nothing, example]
        dataset = Dataset(examples)
        dataset.unit = 2
        return dataset


def objective(rng: random.Random) -> Preference:
    """An objective with its options."""
    kind = rng.choice(("dpo", "dpo", "dpo", "orpo", "kto", "kto"))
    beta = rng.choice((0.01, 0.1, 0.1, 0.5, 1.0, 5.0))
    if kind == "orpo":
        return Preference("orpo", "orpo", beta)
    if kind == "dpo":
        loss = rng.choice(PAIR_LOSSES)
        smoothing = {"robust": (0.0, 0.1, 0.45), "exo_pair": (1e-3, 0.3, 0.9)}.get(loss, (0.0,))
        return Preference("dpo", loss, beta, rng.choice(smoothing))
    weights = [rng.choice((1.0, 1.0, 0.0, 0.3, 4.0)), rng.choice((1.0, 1.0, 0.0, 0.3, 4.0))]
    weights = weights if any(weights) else [1.0, 0.0]
    return Preference("kto", rng.choice(("kto", "kto", "apo_zero_unpaired")), beta, 0.0, *weights)


def asked(rng: random.Random, case: Drawn) -> Asked:
    """A step over answers of a drawn model's tokens."""
    given, vocab = objective(rng), case.config["vocab_size"]
    longest = rng.choice((8, 24, 65))
    side = rng.choice(("keep_start", "keep_end"))
    rows = pairs(rng, vocab) if given.is_paired else singles(rng, vocab)
    cut = [[_cut(each, longest, side) for each in row] for row in rows]
    kept = [each for row in cut for each in row if all(_learns(other) for other in row)]
    size = rng.choice((1, 2, 3, 8))
    steps = -(-len(kept) // (size * (2 if given.is_paired else 1)))
    config: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"train": "unused", "max_seq_length": longest, "packing": rng.random() < 0.4},
        "train": {
            "objective": given.objective, "beta": given.beta,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": max(steps, 1),
            "gradient_checkpointing": rng.random() < 0.5, "seed": rng.randrange(100),
        },
    }  # fmt: skip
    train = config["train"]
    if given.objective != "orpo":
        train["loss_type"] = given.loss_type
    if given.label_smoothing:
        train["label_smoothing"] = given.label_smoothing
    if given.objective == "kto":
        train["desirable_weight"] = given.desirable_weight
        train["undesirable_weight"] = given.undesirable_weight
    return Asked(given, kept, Config.model_validate(config), rng.random() < 0.4)


def pairs(rng: random.Random, vocab: int) -> list[list[Answer]]:
    """Pairs; some share a prompt, some an answer, of some one begins as the other."""
    prompts = _prompts(rng, vocab)
    rows = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        prompt, chosen, rejected = rng.choice(prompts), _ids(rng, vocab), _ids(rng, vocab)
        kind = rng.random()
        if kind < 0.1:
            rejected = list(chosen)
        elif kind < 0.2:
            rejected = chosen[: rng.randint(1, len(chosen))]
        rows.append([Answer(prompt, chosen, True), Answer(prompt, rejected, False)])
    return rows


def singles(rng: random.Random, vocab: int) -> list[list[Answer]]:
    """Answers that are judged by themselves, perhaps all alike."""
    prompts = _prompts(rng, vocab)
    share = rng.choice((0.0, 0.5, 0.5, 0.8, 1.0))
    count = rng.choice((1, 2, 3, 5, 8))
    return [
        [Answer(rng.choice(prompts), _ids(rng, vocab), rng.random() < share)] for _ in range(count)
    ]


def mismatched(answers: list[Answer], longest: int) -> list[Answer]:
    """Each prompt with the nearest earlier answer of another prompt, round the data."""
    made = []
    for at, each in enumerate(answers):
        others = [answers[at - back] for back in range(1, len(answers))]
        joined = [
            _cut(replace(other, prompt=each.prompt), longest, "keep_start")
            for other in others
            if other.prompt != each.prompt
        ]
        made.append(next((both for both in joined if _learns(both)), each))
    return made


def _prompts(rng: random.Random, vocab: int) -> list[Ids]:
    return [_ids(rng, vocab) for _ in range(rng.choice((1, 2, 4)))]


def _ids(rng: random.Random, vocab: int) -> Ids:
    return [rng.randrange(vocab) for _ in range(rng.choice(LENGTHS))]


def _cut(answer: Answer, longest: int, side: str) -> Answer:
    over = len(answer.prompt) + len(answer.answer) - longest
    if over <= 0:
        return answer
    if side == "keep_end":
        gone = max(over - len(answer.prompt), 0)
        return replace(answer, prompt=answer.prompt[over:], answer=answer.answer[gone:])
    left = longest - len(answer.prompt)
    return replace(answer, prompt=answer.prompt[:longest], answer=answer.answer[: max(left, 0)])


def _learns(answer: Answer) -> bool:
    """Whether a token of it is predicted from one before."""
    return len(answer.answer) > (0 if answer.prompt else 1)


OTHER = 0.8  # of the adapter, that which the reference has instead of none


@dataclass
class Result:
    """What a step gives."""

    loss: float
    metrics: dict[str, float]
    gradients: Arrays


def with_head(rng: random.Random, case: Drawn) -> Drawn:
    """Now and then the head is trained, too: as a pair, whole, or some of its rows."""
    kind = rng.choice(("", "", "", "pair", "whole", "tokens"))
    lora, vocab = case.lora, case.config["vocab_size"]
    if kind == "pair" and not lora.use_dora:
        targets = [*(lora.target_modules or []), "lm_head"]
        return replace(case, lora=lora.model_copy(update={"target_modules": targets}))
    if kind == "whole" and not case.config["tie_word_embeddings"]:
        return replace(case, lora=lora.model_copy(update={"modules_to_save": ["lm_head"]}))
    if kind == "tokens":
        rows = rng.sample(range(vocab), 5)
        return replace(case, lora=lora.model_copy(update={"trainable_token_indices": rows}))
    return case


def ours(model: QLoRAModel, step: Asked, adapter: Arrays) -> Result:
    """The first step of a run, as its loop computes it."""
    config, dataset, given = step.config, step.dataset, step.given
    if step.from_adapter:
        model.load_adapter({name: OTHER * a for name, a in adapter.items()})
    else:
        model.write_parameters(model.adapter.initial(0) + model.neutral)
    plan = BatchSampler.of(dataset.lengths, config)
    longest = max(config.data.max_seq_length, plan.longest)
    asked = model, LocalExecutor(model), dataset
    reference = ReferenceModel(*asked, given, config.rows_at_once, longest)
    says = reference.logps(keep=False, progress=lambda text: None)
    model.load_adapter(adapter)
    answers = PreferenceData(dataset, given, says, longest)
    model.options = training_options(config.train)
    model.zero_gradient()
    model.zero_stats()
    for made in answers.batches(plan.blocks(0), plan.batch_size):
        batch = model.checked(made.batch.input_ids, made.batch.labels, made.batch.attention_mask)
        if made.kind == "divergence":
            model.measure("divergence", *batch, made.samples)
        else:
            model.accumulate(*batch, samples=made.samples)
    stats = [float(value) for value in model.read_stats()]
    sums = dict(zip(METRICS, stats[STATS_METRICS:], strict=True))
    count = stats[STATS_TOKENS]
    gradients = model.adapter.split(model.read_flat(model.adapter.gradient) / count)
    model.zero_gradient()
    model.zero_stats()
    return Result(stats[STATS_LOSS] / count, means(sums, given), gradients)


def drawn_step(rng: random.Random, model_type: str) -> tuple[Drawn, Asked, float]:
    """A model, a step over answers, and what the adapter's numbers are multiplied by."""
    case = with_head(rng, drawn(rng, model_type))
    return case, asked(rng, case), rng.choice((1.0, 0.3, 0.1))


def scaled(adapter: Arrays, factor: float) -> Arrays:
    """An adapter that changes the model less; DoRA's magnitudes stay."""
    return {n: a if n.endswith("magnitude_vector") else factor * a for n, a in adapter.items()}
