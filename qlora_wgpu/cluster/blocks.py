"""What goes to a worker and comes back: arrays and numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Asked:
    """What a worker is asked a block as.

    Attributes:
        version: The number of the parameters to compute with.
        nonce: A number of its own, which comes back with the answer to this block alone.
    """

    version: int
    nonce: int


@dataclass(frozen=True, eq=False)
class Sums:
    """What a block gives.

    Attributes:
        loss: Summed over its label tokens; a float32.
        tokens: Its label tokens; a float32.
        saturated: Values that kernels held at the end of their type.
        seconds: What the worker computed for, compiling not counted.
        gradient: Flat, summed over its label tokens; None where only the loss was asked for.
        correct: Label tokens whose logit is the largest; a float32.
        balance: The loss that balances experts, times the label tokens; a float32.
        metrics: What an objective over answers sums up beside its loss, in the order of
            ``ops.preference.METRICS``; of the divergence only what the block itself adds.
        answers: The summed log probability of each of its answers, where that was asked for.
        nonce: As it was asked.
    """

    loss: float
    tokens: float
    saturated: int
    seconds: float
    gradient: FloatArray | None = None
    correct: float = 0.0
    balance: float = 0.0
    metrics: FloatArray | None = None
    answers: FloatArray | None = None
    nonce: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether there is no NaN and no infinity in it."""
        if not np.isfinite([self.loss, self.correct, self.balance]).all():
            return False
        for few in (self.metrics, self.answers):
            if few is not None and not np.isfinite(few).all():
                return False
        if self.gradient is None:
            return True
        with np.errstate(all="ignore"):
            square = np.dot(self.gradient, self.gradient)  # fast; it may overflow by itself
        return bool(np.isfinite(square)) or bool(np.isfinite(self.gradient).all())


@dataclass(frozen=True)
class Identity:
    """What a worker is, once it has opened the model.

    Attributes:
        device: Its GPU's name.
        driver: Its driver.
        kernels: How its kernels are cut; workers that differ may differ in the last bits.
        memory: Bytes on its device.
        version: The package's.
        base: Hashes of the base's config.json and weights.
        adapter: Names and shapes of the adapter's tensors.
        notes: What it has to say.
    """

    device: str
    driver: str
    kernels: str
    memory: int
    version: str
    base: dict[str, str]
    adapter: dict[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Specification:
    """What a worker opens.

    Attributes:
        settings: The run's, as plain data.
        length: Tokens of its longest row.
        version: The owner's version of the package.
        shapes: All that the run computes, as plain data, from which its memory is planned.
        gpu: The worker's GPU; None where it decides itself.
    """

    settings: dict[str, Any]
    length: int
    version: str
    shapes: dict[str, Any]
    gpu: str | None = None


class RemoteWorker(Protocol):
    """What a worker does; one instance of a class of this form lives in each worker process."""

    def __init__(self, specification: Specification) -> None:
        """Opens the model."""

    def identity(self) -> Identity:
        """What it is."""

    def refused(self, sentence: str) -> None:
        """Is told why it gets nothing to do."""

    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing."""

    def write(self, version: int, parameters: FloatArray) -> None:
        """Takes the adapter's parameters."""

    def gradient(self, asked: Asked, *arrays: Any) -> Sums:
        """Computes a micro-batch: ids, targets, mask, the dropout key, weights.

        Of answers also their samples, and the divergence so far and over how many it is summed.
        """

    def loss(self, asked: Asked, *arrays: Any) -> Sums:
        """Computes the loss of a batch: ids, labels and mask."""

    def divergence(self, asked: Asked, *arrays: Any) -> Sums:
        """Computes how far answers are from the reference: ids, targets, mask, samples."""

    def answer_loss(self, asked: Asked, *arrays: Any) -> Sums:
        """Computes the loss over answers: as ``divergence``, and the divergence so far."""

    def answer_logps(self, asked: Asked, *arrays: Any) -> Sums:
        """Computes log probabilities of answers: ids, targets, mask, how many answers."""

    def text(self, version: int, *details: Any) -> list[int]:
        """Continues a text: its ids, how many more, what ends it, and the longest."""
