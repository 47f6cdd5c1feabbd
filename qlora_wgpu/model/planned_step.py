"""A step traced for its options: where its inputs are written, what runs, what can be read."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.model.network import Network
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.ops.adamw import SATURATED_OFFSET, STATS_LENGTH
from qlora_wgpu.ops.batch import BatchBuffers, RouterSums, make_batch_buffers


@dataclass(frozen=True)
class PlannedStep:
    """A traced step.

    Attributes:
        batch: Where its inputs are written.
        plan: What runs.
        sums: What can be read of it, of the kind ``sums``.
    """

    batch: BatchBuffers
    plan: Plan
    sums: Tensor | None = None


def trace_step(graph: Graph, network: Network, options: StepOptions, stats: Tensor) -> PlannedStep:
    """Traces a step.

    Args:
        graph: An empty graph.
        network: The network.
        options: What the step is.
        stats: What its loss, tokens and norm are summed into.
    """
    trains = options.kind == "train"
    coefficient = network.architecture.balance_coefficient(options.router_aux_loss_coef)
    batch = make_batch_buffers(
        options.batch,
        options.seq,
        noise=options.noise,
        weighted=options.objective.weighted,
        routers=RouterSums() if coefficient else None,
        drops=trains,
        sampled=options.is_sampled,
    )
    if options.kind == "sums":
        sums = network.trace_sums(graph, batch)
        return PlannedStep(batch, make_plan(graph), sums)
    if options.kind == "divergence":
        network.trace_divergence(graph, batch, stats)
        return PlannedStep(batch, make_plan(graph))
    network.trace_loss(
        graph,
        batch,
        stats,
        gradient=trains,
        checkpointing=options.checkpointing,
        objective=options.objective,
        router_aux_loss_coef=coefficient,
    )
    return PlannedStep(batch, make_plan(graph))


def make_sums(*, counts: bool) -> tuple[Tensor, Tensor | None]:
    """What micro-batches are summed into, and what kernels count in, read back as one.

    Args:
        counts: Whether kernels have a type whose ends values may be held at.
    """
    nbytes = SATURATED_OFFSET + 16 if counts else 4 * STATS_LENGTH
    storage = Storage("stats", "inputs", nbytes)
    saturated = vector("saturated", 4, "uint32", storage, SATURATED_OFFSET) if counts else None
    return vector("stats", STATS_LENGTH, "float32", storage), saturated
