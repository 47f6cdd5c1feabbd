"""What the settings ask a training step to compute."""

from __future__ import annotations

from qlora_wgpu.config.schema import TrainConfig
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.preference import Preference


def training_options(settings: TrainConfig, *, weighted: bool = False) -> TrainingOptions:
    """Options of training steps, from the ``train`` section.

    Args:
        settings: The section.
        weighted: Whether rows have weights: ``DataConfig.has_weights``.
    """
    preference = preference_of(settings)
    return TrainingOptions(
        checkpointing=settings.gradient_checkpointing,
        objective=Objective(
            settings.label_smoothing_factor,
            settings.z_loss_weight,
            weighted=weighted,
            confidence=settings.loss == "dft",
            preference=preference,
        ),
        noise=settings.neftune_noise_alpha,
        router_aux_loss_coef=0.0 if preference else settings.router_aux_loss_coef,
    )


def preference_of(settings: TrainConfig) -> Preference | None:
    """The objective over answers, if it is one."""
    if settings.objective == "sft":
        return None
    return Preference(
        settings.objective,
        settings.loss,
        settings.beta,
        settings.label_smoothing,
        settings.desirable_weight,
        settings.undesirable_weight,
    )
