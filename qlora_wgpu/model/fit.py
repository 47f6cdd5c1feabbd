"""A training step that keeps a budget: what it takes, what waits, and what that costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qlora_wgpu.limits import MIB
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.planned_step import PlannedStep
from qlora_wgpu.model.residency import Residency

LINK = 5e9  # bytes a second between host and device, measured for uploads to a card
_MADE_AGAIN = "what norms and gated units make is made again in the backward"
IN_BUFFERS = "intermediates lie in buffers instead of textures, which is slower here"
_ALONE = {"the input embedding", "lm_head"}  # of which one thing alone is said


@dataclass(frozen=True)
class Fit:
    """A step within a budget.

    Attributes:
        layout: The model, laid out so.
        options: The step's; layers may be recomputed that were not to be.
        memory: Bytes on the device by kind.
        host_memory: Bytes of host memory that wait, by kind.
        moved: Bytes that pass between host and device in an optimizer step.
    """

    layout: ModelLayout
    options: StepOptions
    memory: Counter[str]
    host_memory: Counter[str]
    moved: int

    @property
    def residency(self) -> Residency:
        """What waits in host memory."""
        return self.layout.residency

    @property
    def seconds(self) -> float:
        """What the traffic of an optimizer step takes, if nothing hides it."""
        return self.moved / LINK

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.memory.values())

    def in_words(self) -> str:
        """What is recomputed, what waits in host memory and what that costs, for a sentence."""
        again = self._again_in_words()
        words = waiting_in_words(self.residency, self.layout.num_layers)
        if not words:
            return again or "nothing is recomputed, and nothing waits in host memory"
        waiting, mapped = sum(self.host_memory.values()), self.layout.mapped_bytes
        on_disk = f", {mapped / MIB:,.0f} MiB on disk" if mapped else ""
        return (
            f"{words} in host memory ({waiting / MIB:,.0f} MiB{on_disk}); {self.moved / 1e9:,.2g} "
            f"GB a step pass between the two, about {self.seconds:,.2g} s at {LINK / 1e9:g} GB/s"
            + (again and f"; {again}")
        )

    @property
    def recomputed(self) -> str:
        """Which layers are recomputed, where layers are: for a table, and a sentence."""
        layers, kept = self.layout.num_layers, self.residency.kept_layers
        return f"{layers - kept} of {layers} layers" if kept else "layers"

    def _again_in_words(self) -> str:
        residency, parts = self.residency, []
        if self.options.checkpointing:
            together = residency.layers_together
            few = "" if together == 1 else f", {together} at a time"
            verb = "is" if residency.kept_layers == self.layout.num_layers - 1 > 0 else "are"
            parts.append(f"{self.recomputed} {verb} recomputed in the backward{few}")
        if residency.remakes:
            parts.append(_MADE_AGAIN)
        if residency.in_buffers:
            parts.append(IN_BUFFERS)
        return ", and ".join(parts)


def waiting_in_words(residency: Residency, layers: int) -> str:
    """What waits of a model with so many layers, and the verb; empty where nothing does."""
    named = [sentence for _, sentence in residency.waiting(layers)]
    if not named:
        return ""
    listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
    return f"{listed} {'waits' if len(named) == 1 and named[0] in _ALONE else 'wait'}"


def planned(
    layout: ModelLayout, options: StepOptions, accumulation: int, step: PlannedStep | None = None
) -> Fit:
    """A layout's step, or this one of it, with what it takes and moves."""
    step = step or layout.step(options)
    moved = accumulation * (step.plan.moved_bytes + step.batch.embedded_bytes)
    if layout.residency.host_moments:
        moved += 2 * layout.adapter.moments.nbytes  # there and back
    memory, on_host = (of(options, step.plan) for of in (layout.memory, layout.host_memory))
    return Fit(layout, options, memory, on_host, moved)
