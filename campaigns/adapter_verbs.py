"""The verbs that an adapter is taken through, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from campaigns.adapter_handing_on import HandingOn
from campaigns.adapter_opening import Opening
from campaigns.adapter_training import Training


class Walk(Training, Opening, HandingOn):
    """A kind of adapter, and all that is done with it."""

    chosen: ClassVar[list[str]] = []

    def verbs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """All of them, in an order in which each has what it needs."""
        trained = ["estimate", "data", "train", "kill", "init_from", "eval", "evaluate", "watch"]
        first = [] if self.kind.peft else trained
        rest = [
            "python", "second", "retrain", "generate", "chat", "serve", "push",
            "merge", "gguf", "gguf_adapter", "merge_nf4", "web",
        ]  # fmt: skip
        if self.kind.peft:
            rest.remove("web")
        for name in [*first, *rest]:
            if not self.chosen or name in self.chosen or name == "train":
                yield name, getattr(self, f"_{name}")
