"""Tensors that wait in host memory between the launches that make them and those that read them.

Copies stand in between: one launch puts a tensor into a buffer that the host reads, another takes
it from one that the host has written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qlora_wgpu.graph.tensor import Storage

PLACES = 2  # buffers that the host writes in turns


@dataclass(eq=False)
class Parked:
    """A tensor's bytes while it waits.

    Attributes:
        name: The tensor's.
        nbytes: Their number.
        data: The bytes themselves.
        lasts: Whether they outlive the run: they are all there at its end.
    """

    name: str
    nbytes: int
    data: npt.NDArray[np.uint8] | None = None
    lasts: bool = False


@dataclass
class Parking:
    """The buffers that a model's parked tensors pass through, whatever the shape of its steps.

    Attributes:
        outgoing: What the host reads.
        incoming: What it writes, in turns.
    """

    outgoing: Storage | None = None
    incoming: list[Storage] = field(default_factory=list)

    def way_out(self, nbytes: int) -> Storage:
        """The buffer through which a tensor goes to the host."""
        if self.outgoing is None or self.outgoing.nbytes < nbytes:
            self.outgoing = Storage("what goes to the host", "staging", nbytes)
        return self.outgoing

    def way_back(self, nbytes: int, turn: int) -> Storage:
        """The buffer through which the tensor of a turn comes back."""
        if not self.incoming or self.incoming[0].nbytes < nbytes:
            self.incoming = [
                Storage("what comes from the host", "staging", nbytes) for _ in range(PLACES)
            ]
        return self.incoming[turn % PLACES]


@dataclass(frozen=True)
class Recomputation:
    """What is computed again in the backward, and how.

    Attributes:
        together: How many layers at once, where they are recomputed; the first one's input is kept.
        kept: How many layers, the last, are not, whose results are free before others are made.
        parking: What these inputs pass through to wait in host memory; None where they stay.
        remakes: Whether what a cheap launch makes from tensors that are kept anyway is made again.
    """

    together: int = 1
    kept: int = 0
    parking: Parking | None = None
    remakes: bool = False
