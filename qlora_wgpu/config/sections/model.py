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

    path: Annotated[FileName, FREE_ON_RESUME] = Field(
        description="Folder of the base model, or its name on the Hugging Face Hub, with a "
        "revision as owner/name@REVISION; or a GGUF file, on the Hub as owner/name/FILE.gguf."
    )
    cache: Annotated[bool, FREE_ON_RESUME] = Field(
        True,
        description="Whether layers that are quantized here, and wait outside the device, are kept "
        "on disk: they take no host memory, and the next run need not quantize them again.",
    )
    add_tokens: list[Text] = Field(
        [],
        description="Texts that become tokens of their own if the tokenizer lacks them; their "
        "rows begin as the mean of all others and are trained.",
    )
    add_special_tokens: list[Text] = Field(
        [],
        description="The same for special tokens, such as those of a chat template: "
        "['<|im_start|>', '<|im_end|>'].",
    )

    @property
    def adds_tokens(self) -> bool:
        """Whether any are named."""
        return bool(self.add_tokens or self.add_special_tokens)


class QuantConfig(Section):
    """Storage of the frozen base weights."""

    scheme: Literal["nf4", "none"] = Field(
        "nf4",
        description="Storage of the frozen linear weights: 4-bit NormalFloat, or none to leave "
        "them unquantized. A base that is quantized already keeps its own format with nf4.",
    )
    blocksize: Blocksize = Field(
        64, description="Number of weights that share one absmax scale, as in bitsandbytes."
    )
    double_quant: bool = Field(
        True, description="Whether the absmax scales are quantized to 8 bits themselves."
    )


class LoraConfig(Section):
    """The trained low-rank adapter, with PEFT's names."""

    r: Rank = Field(16, description="Rank of the adapter matrices.")
    lora_alpha: PositiveNumber = Field(
        32, description="Numerator of the scaling, which is lora_alpha / r."
    )
    lora_dropout: Float = Field(
        0.0, ge=0.0, lt=1.0, description="Probability of dropping an input of the adapter."
    )
    target_modules: TargetModules = Field(
        ALL_LINEAR,
        description="Names of the modules that get an adapter, linear ones, lm_head and "
        "embed_tokens, a regular expression of whole names, or all-linear for every linear one but "
        "the output head and experts.",
    )
    use_rslora: bool = Field(
        False, description="Whether the scaling is lora_alpha / sqrt(r) (rank-stabilized LoRA)."
    )
    use_dora: bool = Field(
        False,
        description="Whether each output's magnitude is trained by itself (DoRA); dropout "
        "costs it a second product of each layer, and experts cannot have it, as in PEFT.",
    )
    rank_pattern: dict[Pattern, Rank] = Field(
        {}, description="Ranks of modules that differ from r, by patterns of their names."
    )
    alpha_pattern: dict[Pattern, PositiveNumber] = Field(
        {},
        description="Values of lora_alpha for modules that differ, by patterns of their names.",
    )
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        min_length=1,
        description="Numbers of the layers that get an adapter, or null for all.",
    )
    init_lora_weights: InitLoraWeights = Field(
        "default",
        description="How A and B begin: default (A uniform as PEFT's, B zeros), gaussian (A normal "
        "with a standard deviation of 1 / r), pissa, pissa_niter_N (faster) or olora, with which "
        "they are parts of the base's weights, and the base keeps the rest.",
    )
    trainable_token_indices: TokenIndices = Field(
        None,
        description="Tokens whose rows of the embedding are trained, too: their numbers, or "
        "numbers by the matrices' names, such as {embed_tokens: [0], lm_head: [0]}; null for "
        "none. A head that is tied to the embedding has the same rows.",
    )
    modules_to_save: list[Text] | None = Field(
        None,
        min_length=1,
        description="Of lm_head and embed_tokens, those that are trained whole, in float32, as in "
        "PEFT; null for none. Each number takes 16 bytes beside the base's.",
    )
    ensure_weight_tying: bool = Field(
        False,
        description="Whether a tied embedding and head are trained as one where "
        "modules_to_save names either; without it that is refused.",
    )
    init_from: Annotated[FileName | None, FREE_ON_RESUME] = Field(
        None, description="Folder of an adapter of the same shape to go on training, or null."
    )

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
    def _begins_once(cls, value: str | None, info: ValidationInfo) -> str | None:
        kind = info.data.get("init_lora_weights", "default")
        if value is not None and kind not in ("default", "gaussian"):
            raise ValueError(
                f"goes on from an adapter, and init_lora_weights {kind} begins another: leave one "
                "of them out"
            )
        return value

    @property
    def changes_base(self) -> bool:
        """Whether the adapter begins as a part of the base, which keeps the rest."""
        return self.init_lora_weights not in ("default", "gaussian")

    @property
    def scaling(self) -> float:
        """Factor of the adapter's product: alpha / r, or alpha / sqrt(r) (arXiv 2312.03732)."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
