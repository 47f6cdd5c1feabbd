"""Objectives whose completions are sampled: their formula, their plan, and who samples them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import Config
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.data import Dataset, epoch_order
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.limits import STEPS
from qlora_wgpu.ops.policy import Policy
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.executor import MicroBatch


def policy_of(config: Config) -> Policy | None:
    """The objective over sampled completions (GRPO or RLOO), or None."""
    objective = config.train.objective
    if objective not in POLICY_OBJECTIVES:
        return None
    given = config.grpo
    return Policy(
        "rloo" if objective == "rloo" else given.loss_type,
        given.kl_weight(objective),
        given.epsilon,
        given.epsilon_high,
        given.delta,
        given.importance_sampling_level == "sequence",
        given.temperature,
        given.use_bias_correction_kl,
        given.sapo_temperature_pos,
        given.sapo_temperature_neg,
        given.top_entropy_quantile,
        given.num_iterations == 1
        and given.steps_per_generation in (None, config.train.gradient_accumulation_steps),
    )


@dataclass(frozen=True, eq=False)
class RolloutPlan:
    """The division of prompts into generations, and of their completions into optimizer steps.

    A generation samples completions of some prompts, which some consecutive steps train on. The
    prompts are those of one epoch after the other, in an order that depends on the seed alone.
    """

    lengths: npt.NDArray[np.int64]  # tokens of each prompt
    max_completion_length: int
    batch_size: int  # completions of a micro-batch
    accumulation: int  # micro-batches of a step
    num_prompts: int  # prompts of a generation
    num_generations: int  # completions of each
    steps: int  # optimizer steps of a generation
    num_iterations: int  # how often each completion is trained on in these
    seed: int
    total_steps: int  # optimizer steps of the run
    sides: int = 1

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], config: Config) -> RolloutPlan:
        """Counts steps; ``max_steps`` overrides the epochs."""
        train, given = config.train, config.grpo
        blocks = given.steps_per_generation or train.gradient_accumulation_steps
        size = given.group_size(train.objective)
        prompts = blocks * train.per_device_train_batch_size // size
        steps = blocks // train.gradient_accumulation_steps * given.num_iterations
        total = math.ceil(train.num_train_epochs * len(lengths) / prompts) * steps
        if train.max_steps < 0 and total > STEPS:
            raise ConfigError(
                f"train.num_train_epochs = {train.num_train_epochs:g} makes {total:.3g} steps, "
                f"more than {STEPS:,}: lower it, or set train.max_steps"
            )
        return cls(
            lengths, given.max_completion_length, train.per_device_train_batch_size,
            train.gradient_accumulation_steps, prompts, size, steps, given.num_iterations,
            train.seed, train.max_steps if train.max_steps > 0 else total,
        )  # fmt: skip

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt with its completion."""
        return int(self.lengths.max()) + self.max_completion_length

    @property
    def steps_per_epoch(self) -> int:
        """About how many steps visit each prompt once."""
        return math.ceil(len(self.lengths) / self.num_prompts) * self.steps

    def generation_of(self, step: int) -> tuple[int, int]:
        """The generation of a step, and the step's index in it; steps count from 1."""
        return divmod(step - 1, self.steps)

    def blocks_of(self, index: int) -> range:
        """The micro-batches that the step of an index within a generation trains on."""
        first = index % (self.steps // self.num_iterations) * self.accumulation
        return range(first, first + self.accumulation)

    def prompts_of(self, generation: int) -> list[int]:
        """The prompts of a generation, by their indices in the data."""
        size, first = len(self.lengths), generation * self.num_prompts
        places = [divmod(place, size) for place in range(first, first + self.num_prompts)]
        orders = {epoch: epoch_order(size, self.seed, epoch) for epoch, _ in places}
        return [int(orders[epoch][within]) for epoch, within in places]

    def examples_until(self, step: int) -> tuple[int, npt.NDArray[np.int64]]:
        """The complete epochs of the first steps, and the prompts of an incomplete one."""
        places = math.ceil(step / self.steps) * self.num_prompts
        epochs, within = divmod(places, len(self.lengths))
        return epochs, epoch_order(len(self.lengths), self.seed, epochs)[:within]

    def dropout_key(self, step: int, block: int) -> int:
        """The 32-bit key of a micro-batch's dropout masks."""
        return zlib.crc32(np.array([self.seed, step, block], np.uint64).tobytes())


def plan_of(lengths: npt.NDArray[np.int64], config: Config) -> BatchSampler | RolloutPlan:
    """How a run's data is divided into steps."""
    if config.train.objective in POLICY_OBJECTIVES:
        return RolloutPlan.of(lengths, config)
    return BatchSampler.of(lengths, config)


def refuse_long_completions(
    settings: Config, train: Dataset, held_out: Dataset | None, base: Mapping[str, Any]
) -> None:
    """Refuses completions that may exceed the maximum of a model with this config.json."""
    limit = longest_text(base)
    if settings.train.objective not in POLICY_OBJECTIVES or limit is None:
        return
    longest = max(train.longest, 0 if held_out is None else held_out.longest)
    if longest + settings.grpo.max_completion_length > limit:
        raise ConfigError(
            f"the longest prompt has {longest:,} tokens; with grpo.max_completion_length "
            f"({settings.grpo.max_completion_length:,}) that exceeds the model's maximum of "
            f"{limit:,}: lower grpo.max_completion_length or data.max_seq_length"
        )


class Rollouts(Protocol):
    """Samples and scores the completions that a run's steps train on."""

    @property
    def seconds(self) -> float:
        """The time that sampling and scoring have taken since the first step."""

    def begin(self, step: int) -> bool:
        """Samples and scores a step's completions if they are not there; False if stopped."""

    def batches(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of a step, after ``begin``."""

    def metrics(self, step: int) -> Mapping[str, float]:
        """TRL's metrics of the completions that were sampled for this step; empty for none."""

    def close(self) -> None:
        """Frees what it has opened."""

    def evaluate(self, step: int) -> Mapping[str, float]:
        """TRL's metrics of completions of the held-out prompts."""

    def tensors(self, step: int) -> Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
        """What later steps need of the completions after this one; empty if that is nothing."""

    def restore(
        self, step: int, tensors: Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.int32]]
    ) -> None:
        """Restores what ``tensors`` has returned after this step."""
