"""Training from Python, also with objectives whose completions are sampled and scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qlora_wgpu import training
from qlora_wgpu.config import Config
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.grpo.sampler import RolloutSampler
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.training.callbacks import TrainerCallback
from qlora_wgpu.training.policies import Rollouts
from qlora_wgpu.training.run import Run


class Trainer(training.Trainer):
    """Trains the adapter of an open model on a configuration's data or on your own rows.

    It prints nothing; warnings are ``QLoRAWarning``s.
    """

    def __init__(
        self,
        model: AdapterModel,
        config: Config,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        overwrite: bool = False,
        resume: bool = False,
        reward_funcs: Sequence[Callable[..., Any]] = (),
        allow_code: bool = False,
    ) -> None:
        """Uses all sections but ``model``, ``lora``, ``quant``, ``device`` and ``cluster``.

        Args:
            model: A ``QLoRAModel`` whose adapter is trained, with its own LoraConfig and
                QuantConfig.
            config: The settings.
            callbacks: ``TrainerCallback`` objects that watch and steer the run.
            overwrite: Whether a run in ``output.dir`` may be replaced.
            resume: Whether to continue the run in ``output.dir`` from its latest complete
                checkpoint, or to start it if there is none.
            reward_funcs: Reward functions of GRPO and RLOO with TRL's signature, in addition to
                those of ``grpo.reward_funcs``.
            allow_code: Whether ``grpo.reward_funcs`` may name functions in files, which run with
                your rights.

        Raises:
            ConfigError: If an argument has another type, or a reward function is not valid.
        """
        super().__init__(model, config, callbacks=callbacks, overwrite=overwrite, resume=resume)
        self._functions, self._allow_code = tuple(reward_funcs), allow_code
        if reward_funcs and config.train.objective not in POLICY_OBJECTIVES:
            raise ConfigError(
                f"reward_funcs is not used by train.objective: {config.train.objective}: set it to "
                "grpo or rloo"
            )

    def _rollouts(self, prompt: PromptFormat | None) -> Callable[[Run], Rollouts] | None:
        if self.config.train.objective not in POLICY_OBJECTIVES:
            return None
        if prompt is None:
            raise DataError(
                f"train.objective: {self.config.train.objective} requires prompts: pass a path, or "
                "rows with a prompt, not token ids"
            )
        rewards = RewardSet.of(self.config, self._functions, allow_code=self._allow_code)
        return partial(
            RolloutSampler, rewards=rewards, tokenizer=prompt.tokenizer, stop_ids=prompt.stop_ids
        )
