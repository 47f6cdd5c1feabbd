"""How transformers holds a layer's experts together, and what files call each of them.

PEFT adapts what is held so as one parameter (``target_parameters``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Stacking:
    """The parameters ``{held}.gate_up_proj`` and ``{held}.down_proj`` of a layer's experts.

    Attributes:
        leaves: An expert's names of gate, up and down.
        named: How files' name of the module of experts ends.
        held: How transformers' does, if otherwise.
        in_turns: Whether rows of gate and up take turns; else gate's come first.
    """

    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    named: str = "experts"
    held: str = "experts"
    in_turns: bool = False

    def in_files(self, at: str) -> str:
        """What files call a module of experts, by transformers' name."""
        return at.removesuffix(self.held) + self.named if at.endswith(self.held) else at

    def in_memory(self, at: str) -> str:
        """What transformers calls it, by files' name."""
        return at.removesuffix(self.named) + self.held if at.endswith(self.named) else at

    def to_json(self) -> str:
        """It as a text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Stacking:
        """It of ``to_json``'s text.

        Raises:
            ValueError: If the text is none.
        """
        try:
            told = json.loads(text)
            gate, up, down = map(str, told["leaves"])
            ends = str(told["named"]), str(told["held"])
            return cls((gate, up, down), *ends, bool(told["in_turns"]))
        except (TypeError, KeyError) as err:
            raise ValueError(f"no stacking of experts: {err}") from err


PLAIN = Stacking()
"""What most have."""
