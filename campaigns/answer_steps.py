"""A step over answers as a run computes it, and how far results of one are apart."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from campaigns.drawn_answers import Asked, asked
from campaigns.drawn_models import Arrays, Drawn, drawn
from qlora_wgpu import QLoRAModel
from qlora_wgpu.ops.adamw import STATS_LOSS, STATS_METRICS, STATS_TOKENS
from qlora_wgpu.ops.preference import METRICS, means
from qlora_wgpu.training.answers import Answers
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.computing import OwnDevice
from qlora_wgpu.training.objectives import training_options
from qlora_wgpu.training.references import references_of

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
    plan = BatchPlan.of(dataset.lengths, config)
    longest = max(config.data.max_seq_length, plan.longest)
    asked = model, OwnDevice(model), dataset
    says = references_of(*asked, given, config.rows_at_once, longest, keep=False)
    model.load_adapter(adapter)
    answers = Answers(dataset, given, says, longest)
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
