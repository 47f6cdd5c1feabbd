"""The launches of a step, summed up by kernel: time, operations, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qlora_wgpu.bench.ceilings import Ceilings
from qlora_wgpu.graph.graph import Launch


@dataclass(frozen=True)
class KernelTime:
    """All launches of one label in a step.

    Attributes:
        label: The launches' label.
        launches: How many there are.
        seconds: Time of all launches, each timed by itself.
        share: Part of the seconds of all kernels; 0 where no time was seen at all.
        flops: Floating-point operations, of products only.
        nbytes: Bytes of the tensors they are bound to, each counted once a launch.
        on_matrix_units: Whether matrix units make their products.
    """

    label: str
    launches: int
    seconds: float
    share: float
    flops: int
    nbytes: int
    on_matrix_units: bool = False

    @property
    def flops_per_second(self) -> float:
        """Achieved operations; 0 where the clock was too coarse."""
        return self.flops / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Achieved bytes; 0 where the clock was too coarse."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def flops_ceiling(self, ceilings: Ceilings) -> float:
        """The most operations a second of what makes its products."""
        most = ceilings.matrix_flops_per_second if self.on_matrix_units else 0.0
        return most or ceilings.flops_per_second

    def of_nearest(self, ceilings: Ceilings) -> tuple[str, float]:
        """The ceiling that it is nearest to, ``"operations"`` or ``"bytes"``, and its share."""
        shares = {
            "operations": self.flops_per_second / self.flops_ceiling(ceilings),
            "bytes": self.bytes_per_second / ceilings.bytes_per_second,
        }
        return max(shares.items(), key=lambda pair: pair[1])

    def to_json(self, ceilings: Ceilings) -> dict[str, Any]:
        """All figures, rates included, beside the GPU's ceilings."""
        row = {"bytes" if key == "nbytes" else key: value for key, value in asdict(self).items()}
        nearest, share = self.of_nearest(ceilings)
        return {
            **row,
            "flops_per_second": self.flops_per_second,
            "bytes_per_second": self.bytes_per_second,
            "nearest_ceiling": nearest,
            "of_nearest_ceiling": share,
        }


def sum_up(launches: Sequence[Launch], seconds: Sequence[float]) -> list[KernelTime]:
    """One row per label, the slowest first.

    Args:
        launches: The launches of a step.
        seconds: The time of each launch.
    """
    total = sum(seconds)
    rows: dict[str, list[tuple[Launch, float]]] = {}
    for launch, took in zip(launches, seconds, strict=True):
        rows.setdefault(launch.label, []).append((launch, took))
    table = []
    for label, timed in rows.items():
        took = sum(seconds for _, seconds in timed)
        table.append(
            KernelTime(
                label=label,
                launches=len(timed),
                seconds=took,
                share=took / total if total > 0 else 0.0,
                flops=sum(launch.flops for launch, _ in timed),
                nbytes=sum(launch.nbytes for launch, _ in timed),
                on_matrix_units=any("subgroup_matrix" in launch.shader.code for launch, _ in timed),
            )
        )
    return sorted(table, key=lambda row: -row.seconds)
