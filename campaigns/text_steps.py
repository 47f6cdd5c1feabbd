"""A step over rows that are learnt as they are, as a run computes it."""

from __future__ import annotations

from campaigns.answer_steps import Result
from campaigns.drawn_models import Arrays
from campaigns.drawn_texts import Learnt
from qlora_wgpu import QLoRAModel
from qlora_wgpu.ops.adamw import STATS_BALANCE, STATS_CORRECT, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.training.batching import BatchPlan, padded_batch
from qlora_wgpu.training.evaluation import held_out_loss
from qlora_wgpu.training.objectives import training_options

Blocks = list[list[tuple[int, ...]]]


def blocks_of(step: Learnt) -> Blocks:
    """The rows of each micro-batch that has a label, as a run's first step takes them."""
    plan = BatchPlan.of(step.dataset.lengths, step.config)
    return [
        block
        for block in plan.blocks(0)
        if any(step.rows[i].num_label_tokens for row in block for i in row)
    ]


def ours(model: QLoRAModel, step: Learnt, adapter: Arrays) -> Result:
    """The first step of a run, as its loop computes it; and the rows as held-out data."""
    config, dataset = step.config, step.dataset
    plan, weighted = BatchPlan.of(dataset.lengths, config), config.data.has_weights
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
