"""What KTO's good and bad answers in some data are to its settings."""

from __future__ import annotations

from qlora_wgpu.config.schema import Config, TrainConfig
from qlora_wgpu.data import Dataset
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.observer import Observer

_SHARES = (1.0, 1.33)  # of good to bad, weights times numbers: equation 8 of arXiv 2402.01306


def tell_of_weights(rows: Dataset, settings: TrainConfig, observer: Observer) -> None:
    """Says what is not learnt from, and which weights would balance what is unbalanced.

    Args:
        rows: The training data.
        settings: The ``train`` section; nothing is said with another objective.
        observer: Told so.

    Raises:
        ConfigError: If all answers have the weight 0.
    """
    if settings.objective != "kto":
        return
    good, bad = _good_and_bad(rows)
    sides = (
        (good, settings.desirable_weight, "desirable_weight", "good"),
        (bad, settings.undesirable_weight, "undesirable_weight", "bad"),
    )
    if all(not number or not weight for number, weight, _, _ in sides):
        names = " and ".join(f"train.{key}" for number, _, key, _ in sides if number)
        raise ConfigError(f"{names} is 0 for all answers there are: nothing would be learnt")
    for number, weight, key, kind in sides:
        if number and not weight:
            observer.warning(
                f"train.{key} is 0: nothing is learnt from the {number:,} {kind} answers, which "
                "count in the loss's mean and, with loss_type kto, in its KL term"
            )
    if not all(number and weight for number, weight, _, _ in sides) or good == bad:
        return
    found = good * settings.desirable_weight / (bad * settings.undesirable_weight)
    least, most = _SHARES
    if not least - 0.005 <= found <= most + 0.005:
        one = bad * settings.undesirable_weight / good
        other = good * settings.desirable_weight / bad
        observer.warning(
            f"{good:,} good and {bad:,} bad answers: KTO's authors advise train.desirable_weight "
            f"from {least * one:.3g} to {most * one:.3g}, or train.undesirable_weight from "
            f"{other / most:.3g} to {other / least:.3g}"
        )


def require_both_kinds(held_out: Dataset | None, config: Config) -> None:
    """Refuses to look for the best by a figure that comes of answers which are not there.

    Raises:
        ConfigError: If that is so.
    """
    if held_out is None or config.train.objective != "kto":
        return
    name = config.eval.metric_for_best_model
    good, bad = _good_and_bad(held_out)
    for number, kind, side in ((good, "good", "chosen"), (bad, "bad", "rejected")):
        if not number and name.endswith((f"/{side}", "/margins")):
            raise ConfigError(
                f"eval.metric_for_best_model is {name}, but there is no {kind} answer among the "
                "held-out rows to measure it on: hold out some, or name another figure"
            )


def _good_and_bad(rows: Dataset) -> tuple[int, int]:
    good, bad = (rows.lengths.reshape(-1, 2) > 0).sum(axis=0)
    return int(good), int(bad)
