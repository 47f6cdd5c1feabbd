"""llama.cpp's architectures by model type, and what each of them computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qlora_wgpu.errors import UnsupportedModelError

Head = Literal["own or tied", "own", "tied"]
Windows = Literal["none", "periodic", "every other", "of 64 layers"]


@dataclass(frozen=True)
class LlamaCpp:
    """An architecture of llama.cpp."""

    label: str  # its name in the package ``gguf``
    pairs: bool = False  # whether q and k are stored for a rotation of neighbours instead of halves
    # Whether the file has a matrix for the logits: always ("own"), where it is not the embedding
    # ("own or tied"), or never ("tied")
    head: Head = "own or tied"
    is_square: bool = False  # whether all heads together must be as wide as the residual stream
    # Modules that may have biases, by the last part of their name
    biases: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    windows: Windows = "none"  # which layers llama.cpp has slide
    activation: str = "silu"  # the MLP's activation
    # Activations for which it computes ``activation``, of which a note tells
    nearly: tuple[str, ...] = ()
    scalings: tuple[str, ...] = ()  # kinds of RoPE whose factors llama.cpp reads as a tensor
    # Layers that it multiplies by without looking for an adapter, by the last part of their name
    unadapted: tuple[str, ...] = ()


# Models with images, whose text part may leave its name out.
_TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_QKV = ("q_proj", "k_proj", "v_proj")
_ALL = (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
_FACTORS = ("llama3", "longrope")
_LLAMA = LlamaCpp("LLAMA", pairs=True, biases=_ALL, scalings=_FACTORS)
_GRANITE = LlamaCpp("GRANITE", pairs=True, biases=_ALL, scalings=_FACTORS)
_GELU = "gelu_pytorch_tanh"
_DEEPSEEK = LlamaCpp(
    "DEEPSEEK2",
    biases=(),
    unadapted=("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head"),
)
_GEMMA4 = LlamaCpp("GEMMA4", biases=(), activation=_GELU, unadapted=("per_layer_model_projection",))
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "granite": _GRANITE,
    "smollm3": LlamaCpp("SMOLLM3", pairs=True),
    "qwen2": LlamaCpp("QWEN2", is_square=True),
    "qwen3": LlamaCpp("QWEN3"),
    "qwen2_moe": LlamaCpp("QWEN2MOE", head="own", is_square=True),
    "qwen3_moe": LlamaCpp("QWEN3MOE"),
    "olmoe": LlamaCpp("OLMOE", head="own", is_square=True, biases=()),
    "ernie4_5_moe": LlamaCpp("ERNIE4_5_MOE", biases=()),
    "lfm2_moe": LlamaCpp("LFM2MOE", is_square=True),
    "glm4": LlamaCpp("GLM4"),
    "glm4_moe": LlamaCpp("GLM4_MOE"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "gpt_oss": LlamaCpp("GPT_OSS", head="own", windows="every other", biases=_ALL),
    "gemma": LlamaCpp("GEMMA", head="tied", activation=_GELU),
    "gemma2": LlamaCpp("GEMMA2", head="tied", windows="every other", activation=_GELU),
    "gemma3_text": LlamaCpp("GEMMA3", windows="periodic", activation=_GELU),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "phi3": LlamaCpp("PHI3", is_square=True, scalings=("longrope",)),
    "olmo": LlamaCpp("OLMO", pairs=True, is_square=True, biases=()),
    "olmo2": LlamaCpp("OLMO2", head="own", is_square=True, biases=()),
    "starcoder2": LlamaCpp(
        "STARCODER2", is_square=True, biases=(*_QKV, "o_proj", "c_fc", "c_proj"), activation=_GELU
    ),
    "stablelm": LlamaCpp("STABLELM", head="own", is_square=True),
    "cohere": LlamaCpp("COMMAND_R", head="tied", is_square=True, biases=()),
    "cohere2": LlamaCpp("COHERE2", head="tied", is_square=True, biases=(), windows="periodic"),
    "olmo3": LlamaCpp("OLMO2", head="own", is_square=True, biases=(), windows="periodic"),
    "exaone4": LlamaCpp("EXAONE4", is_square=True, windows="of 64 layers", scalings=("llama3",)),
    "ernie4_5": LlamaCpp("ERNIE4_5", biases=()),
    "seed_oss": LlamaCpp("SEED_OSS"),
    "hunyuan_v1_dense": LlamaCpp("HUNYUAN_DENSE", biases=()),
    "ministral3": LlamaCpp("MISTRAL3", pairs=True, biases=_ALL),
    "mistral3": LlamaCpp("MISTRAL3", pairs=True, biases=_ALL),
    "arcee": LlamaCpp("ARCEE", pairs=True, biases=(), activation="relu2", scalings=("llama3",)),
    "nemotron": LlamaCpp("NEMOTRON", head="own", is_square=True, biases=_ALL, activation="relu2"),
    "apertus": LlamaCpp("APERTUS", head="own", scalings=_FACTORS),
    "lfm2": LlamaCpp("LFM2", is_square=True),
    "qwen3_next": LlamaCpp("QWEN3NEXT", biases=()),
    "qwen3_5_text": LlamaCpp("QWEN35", biases=()),
    "qwen3_5_moe_text": LlamaCpp("QWEN35MOE", biases=()),
    "granitemoe": LlamaCpp("GRANITE_MOE", pairs=True, biases=(), scalings=_FACTORS),
    "granitemoeshared": LlamaCpp("GRANITE_MOE", pairs=True, biases=(), scalings=_FACTORS),
    "hunyuan_v1_moe": LlamaCpp("HUNYUAN_MOE", biases=()),
    "phi": LlamaCpp(
        "PHI2",
        head="own",
        is_square=True,
        biases=(*_QKV, "dense", "fc1", "fc2"),
        activation=_GELU,
    ),
    "gpt_neox": LlamaCpp(
        "GPTNEOX",
        head="own",
        is_square=True,
        biases=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        activation=_GELU,
        nearly=("gelu",),
    ),
    "exaone_moe": LlamaCpp("EXAONE_MOE", head="own", biases=(), windows="periodic"),
    # Where it is dense.
    "granitemoehybrid": LlamaCpp("GRANITE", pairs=True, biases=_ALL, scalings=_FACTORS),
}
"""By config.json's ``model_type``: those of which adapters are exported."""


def model_type_of(config: Mapping[str, Any]) -> str:
    """config.json's name of the model, of one with images that of its text part."""
    outer = str(config.get("model_type"))
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return str(inner) if inner is not None else _TEXT_PARTS.get(outer, outer)


def find_llama_cpp(model_type: str, what: str, *, has_experts: bool) -> LlamaCpp:
    """llama.cpp's architecture for a model type."""
    is_granite_4 = model_type == "granitemoehybrid"
    of = "granitemoeshared" if is_granite_4 and has_experts else model_type
    found = ARCHITECTURES.get(of)
    if found is None:
        raise UnsupportedModelError(
            f"{what} of model type {model_type!r} are not exported to GGUF (known: "
            f"{', '.join(sorted(ARCHITECTURES))})"
        )
    return found
