"""Rewriting of a traced graph: fusion rules replace several launches by one.

A rule looks at the last rewritten launches, and so sees the results of other rules. Ops do not
know of rules.
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
    """How often launches bind each tensor, and which tensors replace others."""

    def __init__(self, launches: Sequence[Launch], outputs: Sequence[Tensor]) -> None:
        self._bound = Counter(t for launch in launches for t in launch.tensors.values())
        self._bound.update(outputs)
        self._outputs = frozenset(outputs)
        self._replaced: dict[Tensor, Tensor] = {}

    def single(self, *tensors: Tensor) -> bool:
        """Whether each is an intermediate that is written once and read once."""
        return all(t.storage is None and self._bound[t] == 2 for t in tensors)

    def replace(self, tensor: Tensor, other: Tensor) -> bool:
        """Replaces a tensor in later launches; returns whether it may be dropped."""
        if tensor is other or tensor in self._outputs or tensor.storage is not None:
            return tensor is other
        self._replaced[tensor] = other
        return True

    def renamed(self, launch: Launch) -> Launch:
        if self._replaced.keys().isdisjoint(launch.tensors.values()):
            return launch
        tensors = {name: self._replaced.get(t, t) for name, t in launch.tensors.items()}
        return replace(launch, tensors=tensors)


Rule = Callable[["Graph", Uses], None]
"""Looks at the last launches of a graph, and may replace them by one."""


def rewrite(graph: Graph, rules: Sequence[Rule], outputs: Sequence[Tensor] = ()) -> None:
    """Applies rules after each launch of a traced graph, whose outputs are read after the run."""
    traced, graph.launches = graph.launches, []
    uses = Uses(traced, outputs)
    for launch in traced:
        graph.launches.append(uses.renamed(launch))
        for rule in rules:
            rule(graph, uses)
