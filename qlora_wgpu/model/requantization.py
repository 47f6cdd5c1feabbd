"""Weights that are quantized anew, because no kernel has the form in which they are stored."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import QuantConfig
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4


@dataclass
class Requantization:
    """Quantizes weights to NF4 and measures how far they move.

    Attributes:
        count: Number of weights so far.
        moved: Sum of the squares of their movements.
        whole: Sum of their own squares.
    """

    count: int = 0
    moved: float = 0.0
    whole: float = 0.0

    def since(self, before: Requantization) -> Requantization:
        """What was added to what there was."""
        return Requantization(
            self.count - before.count, self.moved - before.moved, self.whole - before.whole
        )

    def add(self, other: Requantization) -> None:
        """Counts what was quantized elsewhere."""
        self.count += other.count
        self.moved += other.moved
        self.whole += other.whole

    def quantize(self, weight: npt.NDArray[np.float32], quant: QuantConfig) -> QuantizedWeight:
        """A weight in NF4; errors as for ``quantize_nf4``."""
        quantized = quantize_nf4(weight, quant.blocksize, quant.double_quant)
        difference = (quantized.dequantize() - weight).reshape(-1)
        self.count += 1
        self.moved += float(np.dot(difference, difference))
        self.whole += float(np.dot(weight.reshape(-1), weight.reshape(-1)))
        return quantized

    @property
    def relative_rms(self) -> float:
        """Root of the mean square of all movements, relative to that of the weights."""
        return math.sqrt(self.moved / self.whole) if self.whole else 0.0

    def warn(self) -> None:
        """Says once how far all of them moved, if there were any."""
        if self.count:
            warnings.warn(
                f"{self.count} linear layers are stored in a form that no kernel reads, and were "
                f"quantized anew to NF4: their weights moved by {100 * self.relative_rms:.2g} % "
                "(root mean square, of theirs), so this adapter belongs to NF4 weights",
                stacklevel=2,
            )
            self.count = 0
