"""What a family of kernels is: a problem, variants that solve it, and what a tuner may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import GraphError, Launch

ProblemT = TypeVar("ProblemT")
_Contra = TypeVar("_Contra", contravariant=True)
Change = Mapping[str, Any]


class Variant(Protocol[_Contra]):
    """One way of solving a problem."""

    def fits(self, problem: _Contra, profile: Profile) -> bool:
        """Whether it solves this problem on a GPU of this profile."""

    def launch(self, g: Graph, problem: _Contra) -> None:
        """Adds the launches that solve it."""


@dataclass(frozen=True)
class Kernel(Generic[ProblemT]):
    """A family of kernels.

    Attributes:
        name: Shown to users; its shaders' folder.
        variants: The first that fits runs.
    """

    name: str
    variants: tuple[Variant[ProblemT], ...]

    def launch(self, g: Graph, problem: ProblemT) -> None:
        """Solves a problem.

        Raises:
            GraphError: If no variant fits.
        """
        for variant in self.variants:
            if variant.fits(problem, g.profile):
                variant.launch(g, problem)
                return
        raise GraphError(f"{self.name}: no variant fits {problem}")


@dataclass(frozen=True)
class Tunable:
    """A choice of a tuner about some kernels.

    Attributes:
        name: Shown to users.
        concerns: Whether a launch depends on it.
        changes: Fields of a profile to try; the profile as it is is always tried too.
    """

    name: str
    concerns: Callable[[Launch], bool]
    changes: Callable[[Profile], tuple[Change, ...]]
