"""Rewards of a trained reward model, for training with rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.generation.scores import scoring_of_model
from qlora_wgpu.runs.resolve import open_adapter

RewardFunction = Callable[[Sequence[str | Sequence[Mapping[str, Any]]]], npt.NDArray[np.float32]]
"""Returns a float32 reward (inputs) for each text, or conversation, of a prompt with its answer."""


def reward_model(
    path: str | PathLike[str],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    memory: str | int | None = None,
) -> RewardFunction:
    """Opens a reward model, and returns a function of text or messages.

    Args:
        path: Folder of a run with ``train.objective: reward``, or of such an adapter.
        batch_size: Number of inputs that are computed at a time.
        max_length: Maximum number of tokens of an input, whose start is kept.
        memory: Device memory to use, such as ``"8GiB"``.

    Raises:
        ConfigError: If the adapter does not give one score per sequence.
        CheckpointError: If the adapter is missing or damaged.
    """
    model = open_adapter(path, memory=memory)
    if scoring_of_model(model).classes != 1:
        raise ConfigError(f"{path} is a classifier: a reward model has one score per sequence")

    def rewards(inputs: Sequence[str | Sequence[Mapping[str, Any]]]) -> npt.NDArray[np.float32]:
        made: npt.NDArray[np.float32] = model.score(
            list(inputs), batch_size=batch_size, max_length=max_length
        )
        return made

    return rewards
