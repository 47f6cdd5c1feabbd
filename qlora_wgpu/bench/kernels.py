"""The launches of a step, summed up by kernel: time, operations, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qlora_wgpu.graph.graph import Launch


@dataclass(frozen=True)
class KernelTime:
    """All launches of one label in a step.

    Attributes:
        label: The launches' label.
        launches: How many there are.
        seconds: Time of all launches, each timed alone.
        share: Part of the seconds of all kernels; 0 where no time was seen at all.
        flops: Floating-point operations, of products only.
        nbytes: Bytes of the tensors they are bound to, each counted once a launch.
    """

    label: str
    launches: int
    seconds: float
    share: float
    flops: int
    nbytes: int

    @property
    def flops_per_second(self) -> float:
        """Achieved operations; 0 where the clock was too coarse."""
        return self.flops / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Achieved bytes; 0 where the clock was too coarse."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """All figures, rates included."""
        row = {"bytes" if key == "nbytes" else key: value for key, value in asdict(self).items()}
        return {
            **row,
            "flops_per_second": self.flops_per_second,
            "bytes_per_second": self.bytes_per_second,
        }


def launch_bytes(launch: Launch) -> int:
    """Estimates the bytes that a launch reads and writes: those of each bound tensor, once.

    What a kernel reads several times, or adds to, moves more; what stays in a cache moves less.
    """
    whole: dict[int, int] = {}
    tables = 0
    for name, tensor in launch.tensors.items():
        if launch.shader.bindings[name].table:
            tables += 1
        else:
            whole[id(tensor)] = tensor.nbytes
    # As much of a table is reached as there is to put it, or to take it from.
    return sum(whole.values()) + tables * max(whole.values(), default=0)


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
                nbytes=sum(launch_bytes(launch) for launch, _ in timed),
            )
        )
    return sorted(table, key=lambda row: -row.seconds)
