"""In which types an adapter's training state is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qlora_wgpu.config import Config

OptimizerKind = Literal["adamw", "adamw_8bit", "lion"]


@dataclass(frozen=True)
class AdapterForms:
    """What changes an update's numbers, and so is chosen by the user alone.

    Attributes:
        optimizer: ``"adamw"``, whose moments are float32, ``"adamw_8bit"``, or ``"lion"``, which
            has one moment, in float32.
        gradient: What micro-batches' gradients are summed in, each of them made in float32.
        updates: Whether there are moments: a worker of a cluster never updates.
    """

    optimizer: OptimizerKind = "adamw"
    gradient: Literal["float32", "bfloat16"] = "float32"
    updates: bool = True

    @classmethod
    def of(cls, settings: Config) -> AdapterForms:
        """Those of a run."""
        return cls(settings.optim.name, settings.train.gradient_dtype)


FLOAT32 = AdapterForms()
