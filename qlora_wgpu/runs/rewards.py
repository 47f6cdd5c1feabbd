"""Rewards of a trained reward model, for training with rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import Config, DeviceConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.generation.scores import scoring_of_model
from qlora_wgpu.grpo.rewards import built_in
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.runs.opening import OpenedModel, configs_of
from qlora_wgpu.runs.placement import kept_dequantized
from qlora_wgpu.runs.resolve import adapter_in, open_adapter, settings_of_adapter
from qlora_wgpu.runs.workload import DeviceSpec, LossWorkload
from qlora_wgpu.training.observers import Unwatched

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
    require_one_score(path, scoring_of_model(model).classes)

    def rewards(inputs: Sequence[str | Sequence[Mapping[str, Any]]]) -> npt.NDArray[np.float32]:
        made: npt.NDArray[np.float32] = model.score(
            list(inputs), batch_size=batch_size, max_length=max_length
        )
        return made

    return rewards


def require_one_score(path: str | PathLike[str], classes: int) -> None:
    """Refuses language models and classifiers."""
    if classes != 1:
        kind = "classifier" if classes else "language model"
        raise ConfigError(f"{path} is a {kind}: a reward model has one score per sequence")


class RewardModel:
    """A reward model of ``grpo.reward_funcs``, with TRL's signature for reward functions.

    It is loaded by ``open``, after the model that it rewards has been placed.
    """

    def __init__(
        self, path: str, batch_size: int, max_length: int | None, memory: str | int | None,
        device: DeviceConfig,
    ) -> None:  # fmt: skip
        """Finds the model and checks that it is one; no weights are read."""
        self._path, self._memory, self._device = path, memory, device
        self._batch_size, self._max_length = batch_size, max_length
        self._adapter = adapter_in(path) or path
        given = {"device": {"gpu": device.gpu, "backend": device.backend, "memory": memory}}
        self._settings = settings_of_adapter(self._adapter, None, Unwatched(), given)
        self._source = OpenedModel.open(self._settings.model.path).for_adapter(self._adapter)
        require_one_score(path, self._source.architecture.classes)
        self._rewards: RewardFunction | None = None

    def nbytes(self, device: DeviceSpec, length: int) -> int:
        """Bytes that it needs on a GPU for inputs of at most ``length`` tokens."""
        settings, base = self._settings, self._source.pretrained
        (lora,) = configs_of(self._source, [self._adapter])
        layout = ModelPlan(
            base, lora, settings.quant, settings.train.compute_dtype, profile=device.profile,
            max_binding=device.max_binding, keep=settings.model.cache,
        )  # fmt: skip
        length = min(length, self._max_length or length)
        workload = LossWorkload.of_scores(base, self._batch_size, length)

        def planned(layout: ModelPlan) -> int:
            return workload.memory(layout, workload.plans(layout)).total()

        keep, limit = settings.device.keep_dequantized, settings.device.memory_bytes
        if keep is True or device.is_cpu or limit is not None:
            layout = kept_dequantized(layout, keep, planned, limit=limit, is_cpu=device.is_cpu)
        total = planned(layout)
        return total if limit is None else min(total, limit)

    def load(self) -> None:
        """Loads it."""
        self._rewards = reward_model(
            self._path, batch_size=self._batch_size, max_length=self._max_length,
            memory=self._memory, device=self._device,
        )  # fmt: skip

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """The rewards of prompts with their completions."""
        assert self._rewards is not None
        made: list[float] = self._rewards([
            prompt + completion if isinstance(prompt, str) else [*prompt, *completion]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]).tolist()  # fmt: skip
        return made


def reward_models(device: DeviceConfig) -> Callable[..., RewardModel]:
    """Finds reward models for a run's GPU, by the options of their entries."""

    def found(
        path: str, batch_size: int = 8, max_length: int | None = None,
        memory: str | int | None = None,
    ) -> RewardModel:  # fmt: skip
        return RewardModel(path, batch_size, max_length, memory, device)

    return found


def reward_model_bytes(settings: Config, device: DeviceSpec) -> int:
    """Bytes that the reward models of a run need on its GPU."""
    known = {"reward_model": reward_models(settings.device)}
    length = settings.data.max_seq_length + settings.grpo.max_completion_length
    given: list[Any] = [each for each in settings.grpo.reward_funcs if isinstance(each, dict)]
    models: list[Any] = [
        built_in("reward_model", each["reward_model"], known)
        for each in given
        if "reward_model" in each
    ]
    return sum(model.nbytes(device, length) for model in models)
