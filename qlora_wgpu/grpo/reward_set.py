"""The reward functions of a run: those of its configuration and of its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qlora_wgpu.config import Config
from qlora_wgpu.errors import ConfigError, QLoRAError, brief, command
from qlora_wgpu.grpo.advantages import AdvantageConfig
from qlora_wgpu.grpo.reward_failures import limited
from qlora_wgpu.grpo.reward_process import RewardProcess
from qlora_wgpu.grpo.rewards import RewardFunction, built_in


class RewardModel(Protocol):
    """A trained reward model as a reward function."""

    def load(self) -> None:
        """Loads it, before it is called."""

    def __call__(self, *args: Any, **batch: Any) -> Sequence[float | None]:
        """The rewards of a batch."""


@dataclass(frozen=True, eq=False)
class RewardSet:
    """Reward functions by name, with their weights."""

    functions: Mapping[str, RewardFunction]
    weights: Sequence[float]
    advantages: AdvantageConfig
    models: Sequence[RewardModel] = ()  # the trained reward models among them

    @classmethod
    def of(
        cls,
        config: Config,
        functions: Sequence[Callable[..., Any]] = (),
        *,
        allow_code: bool,
        reward_model: Callable[..., RewardModel] | None = None,
    ) -> RewardSet:
        """The functions of ``grpo.reward_funcs``, then the caller's.

        Args:
            config: The settings.
            functions: The caller's own functions, with TRL's signature.
            allow_code: Whether functions of files may run, with the user's rights.
            reward_model: Finds a reward model, by the options of its entry; None if the caller
                cannot.

        Raises:
            ConfigError: If a function is unknown, not allowed or cannot be imported, or if there
                is none.
        """
        named: dict[str, RewardFunction] = {}
        models: list[RewardModel] = []
        try:
            for given in config.grpo.reward_funcs:
                if isinstance(given, Mapping) and "reward_model" in given:
                    name, model = _found_model(given["reward_model"], reward_model)
                    models.append(model)
                    named[_unique(name, named)] = model
                else:
                    timeout = config.grpo.reward_timeout
                    name, function = _opened(given, timeout, allow_code=allow_code)
                    named[_unique(name, named)] = function
            for own in functions:
                name = _unique(_name_of(own), named)
                named[name] = limited(own, name, config.grpo.reward_timeout)
        except QLoRAError:
            _close(named)
            raise
        if not named:
            raise ConfigError(
                f"train.objective: {config.train.objective} requires reward functions: set "
                "grpo.reward_funcs, such as [exact_match]"
            )
        weights = config.grpo.reward_weights or [1.0] * len(named)
        if len(weights) != len(named):
            _close(named)
            raise ConfigError(
                f"grpo.reward_weights has {len(weights)} weights for {len(named)} reward functions "
                f"({', '.join(named)})"
            )
        return cls(named, weights, _advantages(config), models)

    def load_models(self) -> None:
        """Loads the reward models."""
        for model in self.models:
            model.load()

    def close(self) -> None:
        """Ends the processes of functions in files."""
        _close(self.functions)


def _opened(given: Any, timeout: float, *, allow_code: bool) -> tuple[str, RewardFunction]:
    if isinstance(given, Mapping):
        name, options = next(iter(given.items()))
        return name, built_in(name, options)
    path, colon, function = given.rpartition(":")
    if not colon or not path.endswith(".py"):
        return given, built_in(given, {})
    if not allow_code:
        allowed = "--allow-code" if command() else "allow_code=True"
        raise ConfigError(
            f"grpo.reward_funcs: {given} is code that runs with your rights: read it and pass "
            f"{allowed}"
        )
    return function, RewardProcess(path, function, timeout)


def _found_model(options: Any, found: Callable[..., RewardModel] | None) -> tuple[str, RewardModel]:
    """A reward model as a function, whose name is that of its folder, as in TRL."""
    if found is None:
        raise ConfigError(
            "grpo.reward_funcs: reward_model is not supported by Trainer: use qlora_wgpu.train, or "
            "pass a function to reward_funcs"
        )
    model: Any = built_in("reward_model", options, {"reward_model": found})
    return Path(options["path"]).resolve().name, model


def _advantages(config: Config) -> AdvantageConfig:
    given, objective = config.grpo, config.train.objective
    bounds = given.reward_clip_range
    return AdvantageConfig(
        given.group_size(objective),
        given.scale_rewards,
        given.multi_objective_aggregation,
        objective == "rloo",
        given.normalize_advantages,
        None if bounds is None else (bounds[0], bounds[1]),
    )


def _name_of(function: Callable[..., Any]) -> str:
    if not callable(function):
        raise ConfigError(
            f"reward_funcs must be a list of functions, got {brief(function)}: built-in ones are "
            "named in grpo.reward_funcs"
        )
    return str(getattr(function, "__name__", type(function).__name__))


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    number, made = 1, name
    while made in taken:
        number += 1
        made = f"{name}_{number}"
    return made


def _close(functions: Mapping[str, RewardFunction]) -> None:
    for function in functions.values():
        if isinstance(function, RewardProcess):
            function.close()
