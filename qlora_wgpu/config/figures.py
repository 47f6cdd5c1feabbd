"""What an evaluation gives, by the names that ``eval.metric_for_best_model`` may have."""

from __future__ import annotations

LOSS = "loss"
_ANSWERS = (
    "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected",
)  # fmt: skip
_PAIRS = ("rewards/accuracies", *_ANSWERS)
_OF_OBJECTIVES = {
    "sft": (LOSS, "mean_token_accuracy"),
    "dpo": (LOSS, *_PAIRS, "mean_token_accuracy"),
    "orpo": (LOSS, *_PAIRS, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    "kto": (LOSS, *_ANSWERS),
}


def figures_of(objective: str, loss_type: str | None) -> tuple[str, ...]:
    """The figures of evaluations, without the ``eval_`` in front of their names.

    Args:
        objective: ``train.objective``.
        loss_type: ``train.loss_type``, null for the objective's default.
    """
    own = _OF_OBJECTIVES[objective]
    has_divergence = objective == "kto" and loss_type in (None, "kto")
    return (*own, "kl") if has_divergence else own
