"""mlx-lm's learning rate: a schedule of MLX by its name and arguments, counted in updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.config.dialects.draft import Draft

_RATE = 1e-5
_ENDING = {"cosine": ("cosine_with_min_lr", "min_lr"), "linear": ("polynomial", "lr_end")}


@dataclass(frozen=True)
class _Shape:
    """A schedule, after its warm-up.

    Attributes:
        name: MLX's.
        first: The rate that it begins with.
        last: The rate that it ends with.
        updates: How many it takes to get there.
    """

    name: str
    first: float
    last: float
    updates: int

    @classmethod
    def of(cls, name: str, arguments: Sequence[Any]) -> _Shape | None:
        """A schedule by MLX's arguments; None of one that ends nowhere, such as step_decay."""
        if name == "cosine_decay":
            first, updates, *end = arguments
            return cls(name, first, end[0] if end else 0.0, updates)
        if name == "linear_schedule":
            first, last, updates = arguments
            return cls(name, first, last, updates)
        return None


def convert_schedule(draft: Draft, steps: int) -> None:
    """The rate's shape.

    Args:
        draft: The draft.
        steps: Updates of the whole run.
    """
    rate, schedule = draft.take("learning_rate", _RATE), draft.take("lr_schedule")
    if not isinstance(schedule, Mapping):
        _set(draft, rate, "constant", "mlx-lm's default", 0)
        return
    name, arguments = str(schedule.get("name")), schedule.get("arguments") or [rate]
    warmup, origin = schedule.get("warmup") or 0, f"lr_schedule: {name}"
    begin = schedule.get("warmup_init")
    if warmup and begin:
        draft.leave_out("lr_schedule.warmup_init", begin, "a warm-up begins at zero")
    shape = _Shape.of(name, arguments)
    if shape is None:
        reason = "the rate stays as it begins: there is no such shape"
        draft.leave_out("lr_schedule", name, reason)
        _set(draft, arguments[0], "constant", origin, warmup)
    elif shape.last > shape.first:  # it is a warm-up itself
        _set(draft, shape.last, "constant", origin, warmup + shape.updates)
    elif shape.last == shape.first:
        _set(draft, shape.first, "constant", origin, warmup)
    else:
        if warmup + shape.updates != steps:
            end = f"{shape.last:g}" if shape.last else "zero"
            draft.notes.append(
                f"the learning rate falls to {end} at the last of {steps} updates; {name} would "
                f"bring it to {shape.last:g} after {warmup + shape.updates}"
            )
        kind = "cosine" if name == "cosine_decay" else "linear"
        if shape.last:
            kind, key = _ENDING[kind]
            draft.set("optim.lr_scheduler_kwargs", {key: shape.last}, origin)
        _set(draft, shape.first, kind, origin, warmup)


def _set(draft: Draft, rate: float, shape: str, origin: str, warmup: int) -> None:
    if warmup:
        draft.set("optim.warmup_steps", warmup, "lr_schedule, in updates")
        shape = "constant_with_warmup" if shape == "constant" else shape
    else:
        draft.set("optim.warmup_ratio", 0.0, "without lr_schedule.warmup")
    draft.set("optim.learning_rate", rate, "learning_rate")
    draft.set("optim.lr_scheduler_type", shape, origin)
