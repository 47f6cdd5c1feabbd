"""The sections of the base model and of the adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from qlora_wgpu.config.names import PEFT_DEFAULTS
from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import (
    ALL_LINEAR,
    Blocksize,
    FileName,
    Float,
    InitLoraWeights,
    Pattern,
    PositiveNumber,
    Rank,
    TargetModules,
    Text,
    TokenIndices,
)


class ModelConfig(Section):
    """The base model."""

    path: Annotated[FileName, FREE_ON_RESUME]
    """Folder of the base model or its name on the Hugging Face Hub, optionally with a revision
    (owner/name@REVISION); or a GGUF file (on the Hub: owner/name/FILE.gguf)."""
    cache: Annotated[bool, FREE_ON_RESUME] = True
    """Whether offloaded layers that were quantized here are cached on disk instead of in host
    memory, so that the next run does not quantize them again."""
    add_tokens: list[Text] = Field([])
    """Tokens to add to the tokenizer if it lacks them (tokenizer.add_tokens); their embedding rows
    start as the mean of all others and are trained."""
    add_special_tokens: list[Text] = Field([])
    """Special tokens to add in the same way, such as those of a chat template: ['<|im_start|>',
    '<|im_end|>']."""

    @property
    def adds_tokens(self) -> bool:
        """Whether any tokens are added."""
        return bool(self.add_tokens or self.add_special_tokens)


class QuantConfig(Section):
    """Quantization of the frozen base weights."""

    scheme: Literal["nf4", "none"] = "nf4"
    """Format of the frozen linear weights: nf4 (4-bit NormalFloat, load_in_4bit in transformers) or
    none (unquantized); with nf4, a base that is already quantized keeps its own format."""
    blocksize: Blocksize = 64
    """Number of weights that share one absmax scale, as in bitsandbytes."""
    double_quant: bool = True
    """Whether the absmax scales are themselves quantized to 8 bits (bnb_4bit_use_double_quant)."""


class LoraConfig(Section):
    """The trained low-rank adapter, with PEFT's names."""

    r: Rank = 16
    """Rank of the adapter matrices."""
    lora_alpha: PositiveNumber = 32
    """Numerator of the adapter's scaling, lora_alpha / r."""
    lora_dropout: Float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability of the adapter's inputs."""
    target_modules: TargetModules = ALL_LINEAR
    """Modules that get an adapter: a list of names (of linear layers, lm_head, embed_tokens), a
    regular expression that matches whole names, or all-linear for every linear layer except the
    output head and experts."""
    use_rslora: bool = False
    """Whether the scaling is lora_alpha / sqrt(r) (rank-stabilized LoRA)."""
    use_dora: bool = False
    """Whether each output's magnitude is trained separately (DoRA); not supported for experts, as
    in PEFT, and with dropout it adds a second product to each layer."""
    rank_pattern: dict[Pattern, Rank] = Field({})
    """Ranks of modules that differ from r, by patterns of their names."""
    alpha_pattern: dict[Pattern, PositiveNumber] = Field({})
    """Alphas of modules that differ from lora_alpha, by patterns of their names."""
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Indices of the layers that get an adapter; null for all."""
    init_lora_weights: InitLoraWeights = "default"
    """Initialization of A and B: default (A uniform as in PEFT, B zero), gaussian (A normal with a
    standard deviation of 1 / r), or pissa, pissa_niter_N (faster) or olora, which take them from
    the base's weights and subtract them there."""
    trainable_token_indices: TokenIndices = None
    """Token ids whose embedding rows are trained: a list, or lists by matrix such as {embed_tokens:
    [0], lm_head: [0]}; null for none (a tied head shares the rows)."""
    modules_to_save: list[Text] | None = Field(None, min_length=1)
    """Which of lm_head and embed_tokens are trained in full, in float32, as in PEFT; null for none
    (16 bytes per parameter, in addition to the base's)."""
    ensure_weight_tying: bool = False
    """Whether a tied embedding and head are trained as one matrix; required if modules_to_save
    names either of them."""
    init_from: Annotated[FileName | None, FREE_ON_RESUME] = None
    """Folder of an adapter of the same shape to continue training; null starts a new one."""

    @model_validator(mode="before")
    @classmethod
    def _without_peft_defaults(cls, values: Any) -> Any:
        """Ignores arguments of PEFT's LoraConfig whose value changes nothing."""
        if not isinstance(values, Mapping):
            return values
        return {
            key: value for key, value in values.items() if value not in PEFT_DEFAULTS.get(key, ())
        }

    @field_validator("init_from")
    @classmethod
    def _excludes_initializers(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("init_lora_weights", "default")
        if value is not None and kind not in ("default", "gaussian"):
            raise ValueError(
                f"and init_lora_weights: {kind} are mutually exclusive: remove one of them"
            )
        return value

    @property
    def changes_base(self) -> bool:
        """Whether the adapter is initialized from the base's weights, which keep the remainder."""
        return self.init_lora_weights not in ("default", "gaussian")

    @property
    def scaling(self) -> float:
        """Factor of the adapter's product: alpha / r, or alpha / sqrt(r) (arXiv 2312.03732)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
