"""What a run's memory plan becomes where a cluster computes its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping


def in_cluster(memory: Mapping[str, int]) -> tuple[int, int]:
    """Bytes on the GPU of each worker, and on that of the owner.

    A worker has no moments: it never updates. The owner has the adapter, its gradient and moments,
    and room for one gradient that has come from a worker; no base and no activations.

    Args:
        memory: Of the same run on one GPU, bytes by kind.
    """
    moments, gradient = memory.get("optimizer", 0), memory.get("gradients", 0)
    worker = sum(memory.values()) - moments
    return worker, memory.get("adapter", 0) + 2 * gradient + moments
