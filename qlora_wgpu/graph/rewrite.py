"""Rewriting of a traced graph: rules put one launch in place of several that it does at once.

Rules look at the end of what has been taken over so far, so that each sees what another made. Ops
know nothing of them. An intermediate may go where its writer and its reader are fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import Tensor

if TYPE_CHECKING:
    from qlora_wgpu.graph.graph import Graph


class Uses:
    """How often launches bind each tensor, and which tensors now stand for others."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        """Counts what the traced launches bind."""
        self._bound = Counter(t for launch in launches for t in launch.tensors.values())
        self.replaced: dict[Tensor, Tensor] = {}

    def single(self, *tensors: Tensor) -> bool:
        """Whether each is written once and read once."""
        return all(self._bound[tensor] == 2 for tensor in tensors)

    def renamed(self, launch: Launch) -> Launch:
        """A launch that reads what stands for its tensors."""
        if self.replaced.keys().isdisjoint(launch.tensors.values()):
            return launch
        tensors = {name: self.replaced.get(t, t) for name, t in launch.tensors.items()}
        return replace(launch, tensors=tensors)


Rule = Callable[["Graph", Uses], None]
"""Looks at the last launches of a graph, and may put one in their place."""


def rewrite(graph: Graph, rules: Sequence[Rule]) -> None:
    """Applies rules after each launch of a traced graph."""
    traced, graph.launches = graph.launches, []
    uses = Uses(traced)
    for launch in traced:
        graph.launches.append(uses.renamed(launch))
        for rule in rules:
            rule(graph, uses)
