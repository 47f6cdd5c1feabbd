"""The section of the training loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import Float, MaxSteps, PositiveInt


class TrainConfig(Section):
    """The training loop."""

    num_train_epochs: Annotated[float, FREE_ON_RESUME] = Field(
        1.0, gt=0.0, description="Number of passes over the training data; may be a fraction."
    )
    max_steps: Annotated[MaxSteps, FREE_ON_RESUME] = Field(
        -1, description="Number of optimizer steps, which overrides num_train_epochs; -1 for none."
    )
    per_device_train_batch_size: PositiveInt = Field(1, description="Rows in a micro-batch.")
    gradient_accumulation_steps: PositiveInt = Field(
        16, description="Micro-batches whose gradients are summed for one optimizer step."
    )
    gradient_checkpointing: Annotated[bool, FREE_ON_RESUME] = Field(
        True, description="Whether layers are recomputed in the backward pass to save memory."
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Type of matmul operands; sums are float32 in either case."
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type that the adapter's gradient is kept in; with bfloat16 it takes half the "
        "memory, and each micro-batch's is added in float32 and rounded.",
    )
    label_smoothing_factor: Float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each label that is spread over the whole vocabulary; the held-out "
        "loss stays without.",
    )
    z_loss_weight: Float = Field(
        0.0,
        ge=0.0,
        description="Weight of the squared logarithm of the softmax's normalizer, added to the "
        "loss in training; 1e-4 is usual, 0 turns it off.",
    )
    router_aux_loss_coef: Float | None = Field(
        None,
        ge=0.0,
        description="Factor of the loss that balances a mixture's experts, as transformers has "
        "it, added in training and logged as aux_loss; 0 turns it off, null leaves it to "
        "config.json, which asks for it by output_router_logits: true.",
    )
    neftune_noise_alpha: Float = Field(
        0.0,
        ge=0.0,
        description="Strength of the noise that is added to embeddings in training (NEFTune); 5 is "
        "usual, 0 turns it off.",
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="Seed of data order, dropout and adapter initialization."
    )
