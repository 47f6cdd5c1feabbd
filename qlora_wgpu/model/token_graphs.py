"""The graphs of texts that go on: their hidden states, and what chooses their next tokens."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.sampling import Choices


@dataclass(frozen=True)
class TokenGraphs:
    """What chooses the next tokens of texts.

    Attributes:
        batch: The inputs of the hidden states.
        next: What the choice reads of each text.
        choices: What tokens are chosen by, and the tokens.
        hidden: Computes the hidden states.
        head: The logits and the choice.
        kept: A copy of the logits, where they are told.
    """

    batch: BatchBuffers
    next: BatchBuffers
    choices: Choices
    hidden: Graph
    head: Graph
    kept: Tensor | None

    @property
    def apart(self) -> bool:
        """Whether it may run while a prompt pauses: new tokens, where there are other texts."""
        cache = self.batch.cache
        return self.batch.decodes and cache is not None and cache.texts > 1
