"""Rewards of a trained reward model, for training with rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import DeviceConfig
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
    device: DeviceConfig | None = None,
) -> RewardFunction:
    """Opens a reward model, and returns a function of text or messages.

    Args:
        path: Folder of a run with ``train.objective: reward``, or of such an adapter.
        batch_size: Number of inputs that are computed at a time.
        max_length: Maximum number of tokens of an input, whose start is kept.
        memory: Device memory to use, such as ``"8GiB"``.
        device: The GPU and backend; by default those of the reward model's run.

    Raises:
        ConfigError: If the adapter does not give one score per sequence.
        CheckpointError: If the adapter is missing or damaged.
    """
    gpu, backend = (None, None) if device is None else (device.gpu, device.backend)
    model = open_adapter(path, gpu=gpu, backend=backend, memory=memory)
    if scoring_of_model(model).classes != 1:
        raise ConfigError(f"{path} is a classifier: a reward model has one score per sequence")

    def rewards(inputs: Sequence[str | Sequence[Mapping[str, Any]]]) -> npt.NDArray[np.float32]:
        made: npt.NDArray[np.float32] = model.score(
            list(inputs), batch_size=batch_size, max_length=max_length
        )
        return made

    return rewards


def reward_models(device: DeviceConfig) -> Callable[..., Callable[..., list[float]]]:
    """Opens reward models on a run's GPU, as reward functions with TRL's signature."""

    def opened(
        path: str, batch_size: int = 8, max_length: int | None = None,
        memory: str | int | None = None,
    ) -> Callable[..., list[float]]:  # fmt: skip
        rewards = reward_model(
            path, batch_size=batch_size, max_length=max_length, memory=memory, device=device
        )

        def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
            made: list[float] = rewards([
                prompt + completion if isinstance(prompt, str) else [*prompt, *completion]
                for prompt, completion in zip(prompts, completions, strict=True)
            ]).tolist()  # fmt: skip
            return made

        return reward

    return opened
