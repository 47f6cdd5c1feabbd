"""llama.cpp's architectures: what each is called in config.json, and the keys that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.checkpoint.gguf import gemma, mixtures
from qlora_wgpu.checkpoint.gguf import more_architectures as more
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale, whole_heads
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.rope import read_rope
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture.

    Attributes:
        model_type: config.json's name of it.
        causal_class: transformers' class.
        more: The keys that this architecture has beside what all have.
        pairs: Whether q and k are stored for a rotation of neighbours instead of halves.
        norm_offset: What was added to the norms' weights.
        names: What its blocks' tensors are called in Hugging Face's files, where others differ.
    """

    model_type: str
    causal_class: str
    more: Callable[[Keys, GGUFFile, Config], Config]
    pairs: bool = False
    norm_offset: float = 0.0
    names: tuple[tuple[str, str], ...] = ()


def read_config(file: GGUFFile) -> Config:
    """What the model's config.json says.

    Raises:
        CheckpointError: If a key is missing or wrong.
        UnsupportedModelError: If the architecture, or one of its keys, is not computed.
    """
    keys = Keys(file.metadata, file.path)
    architecture = find_architecture(keys)
    config = _common(keys, file)
    config |= architecture.more(keys, file, config)
    config = {"model_type": architecture.model_type, **config}
    config.setdefault("architectures", [architecture.causal_class])
    keys.refuse_the_rest()
    return config


def find_architecture(keys: Keys) -> GGUFArchitecture:
    """The architecture that a file names.

    Raises:
        UnsupportedModelError: If it is none that is computed.
    """
    if keys.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{keys.where} has the architecture {keys.architecture[:80]!r}, of which GGUF files "
            f"are not read (read: {', '.join(sorted(ARCHITECTURES))}): take the model's "
            "safetensors version"
        )
    return ARCHITECTURES[keys.architecture]


def _common(keys: Keys, file: GGUFFile) -> Config:
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if not 0 < heads <= hidden:
        raise CheckpointError(
            f"{file.path}: {keys.architecture}.attention.head_count is {heads}, but "
            f"embedding_length is {hidden}"
        )
    head_dim = keys.integer("attention.key_length", hidden // heads)
    keys.refuse("attention.value_length", head_dim)
    keys.refuse("attention.causal", True)
    keys.ignore("vocab_size")  # the embedding tells
    config = {
        "vocab_size": file.tensor(EMBEDDING).place.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file,
        **_token_ids(file),
    }
    return config | read_rope(keys, file, head_dim)


def _token_ids(file: GGUFFile) -> Config:
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token_id": value for name, value in ids.items() if type(value) is int}


def _llama(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Llama and what is computed as it is: Mistral, Mixtral, SmolLM."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    experts = keys.integer("expert_count", 0)
    window = keys.integer("attention.sliding_window", 0) or None
    if experts:
        keys.refuse("expert_gating_func", 0, 1)
        keys.refuse("expert_weights_scale", 0.0, 1.0)
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": experts,
            "num_experts_per_tok": keys.integer("expert_used_count"),
            "sliding_window": window,
        }
    if window is not None:
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_bias": "blk.0.ffn_up.bias" in file,
    }


def _qwen(keys: Keys, file: GGUFFile, config: Config) -> Config:
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {}


def _qwen3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    return _qwen(keys, file, config) | {"attention_bias": "blk.0.attn_q.bias" in file}


def _qwen3_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    keys.refuse("expert_gating_func", 0, 1)
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", True)
    keys.refuse("expert_shared_feed_forward_length", 0)
    return _qwen3(keys, file, config) | {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _phi3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    usual_scale(keys, config)
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    length = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "original_max_position_embeddings": length,
        "sliding_window": keys.integer("attention.sliding_window", 0) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _granite(keys: Keys, file: GGUFFile, config: Config) -> Config:
    whole_heads(keys, config)
    keys.refuse("expert_count", 0)
    return {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _smollm3(keys: Keys, file: GGUFFile, config: Config) -> Config:
    whole_heads(keys, config)
    usual_scale(keys, config)
    return {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _olmo2(keys: Keys, file: GGUFFile, config: Config) -> Config:
    whole_heads(keys, config)
    usual_scale(keys, config)
    keys.refuse("attention.sliding_window", 0)  # of OLMo 3, which goes by the same name
    return {}


def _gpt_oss(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Of YaRN's details, and of the experts' unit, no key tells: they are as published."""
    whole_heads(keys, config)
    usual_scale(keys, config)
    keys.refuse("expert_gating_func", 0, 3)  # 3: softmax over the chosen
    keys.refuse("expert_weights_scale", 0.0, 1.0)
    keys.refuse("expert_weights_norm", True, False)  # they sum to one whatever it says
    keys.refuse("attention.sliding_window_pattern", 2)
    scaling = config.get("rope_scaling")
    if scaling is None:
        rotation: Config = {"rope_parameters": {"rope_type": "default"}}
    else:
        is_yarn = scaling["rope_type"] == "yarn"
        rotation = {"rope_scaling": {**scaling, "truncate": False} if is_yarn else scaling}
    return {
        **rotation,
        "attention_bias": "blk.0.attn_q.bias" in file,
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "intermediate_size": keys.integer(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
    }


_POST_NORMS = (
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_GLM_NAMES = (
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
    ("ffn_up", "mlp.gate_up_proj"),
)
_HUNYUAN_NAMES = (
    ("attn_q_norm", "self_attn.query_layernorm"),
    ("attn_k_norm", "self_attn.key_layernorm"),
)
_GEMMA_NAMES = (("ffn_norm", "pre_feedforward_layernorm"), *_POST_NORMS)
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", "LlamaForCausalLM", _llama, pairs=True),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM", _qwen),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen3moe": GGUFArchitecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", mixtures.qwen2_moe, names=mixtures.SHARED_NAMES
    ),
    "olmoe": GGUFArchitecture("olmoe", "OlmoeForCausalLM", mixtures.olmoe),
    "granitemoe": GGUFArchitecture(
        "granitemoe", "GraniteMoeForCausalLM", mixtures.granite_moe, pairs=True
    ),
    "gemma": GGUFArchitecture("gemma", "GemmaForCausalLM", gemma.gemma, norm_offset=1.0),
    "gemma2": GGUFArchitecture(
        "gemma2", "Gemma2ForCausalLM", gemma.gemma2, norm_offset=1.0, names=_GEMMA_NAMES
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text", "Gemma3ForCausalLM", gemma.gemma3, norm_offset=1.0, names=_GEMMA_NAMES
    ),
    "phi3": GGUFArchitecture(
        "phi3", "Phi3ForCausalLM", _phi3, names=(("ffn_up", "mlp.gate_up_proj"),)
    ),
    "granite": GGUFArchitecture("granite", "GraniteForCausalLM", _granite, pairs=True),
    "olmo2": GGUFArchitecture("olmo2", "Olmo2ForCausalLM", _olmo2, names=_POST_NORMS),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _gpt_oss,
        names=(
            ("post_attention_norm", "post_attention_layernorm"),
            ("attn_sinks", "self_attn.sinks"),
            ("ffn_gate_inp", "mlp.router"),
        ),
    ),
    "smollm3": GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", _smollm3, pairs=True),
    "arcee": GGUFArchitecture("arcee", "ArceeForCausalLM", more.arcee, pairs=True),
    "ernie4_5": GGUFArchitecture("ernie4_5", "Ernie4_5ForCausalLM", more.ernie4_5),
    "exaone4": GGUFArchitecture("exaone4", "Exaone4ForCausalLM", more.exaone4, names=_POST_NORMS),
    "glm4": GGUFArchitecture("glm4", "Glm4ForCausalLM", more.glm4, names=_GLM_NAMES),
    "hunyuan-dense": GGUFArchitecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", more.hunyuan, names=_HUNYUAN_NAMES
    ),
    "seed_oss": GGUFArchitecture(
        "seed_oss", "SeedOssForCausalLM", more.seed_oss, names=_POST_NORMS[:1]
    ),
}
"""By the names that files have for them."""
