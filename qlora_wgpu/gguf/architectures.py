"""llama.cpp's architectures: their model types in config.json, keys and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import Architecture
from qlora_wgpu.families.parts.mamba import Mamba
from qlora_wgpu.gguf import families, mamba, mixers, mixtures
from qlora_wgpu.gguf.architecture import (
    BIAS,
    SIGMOID,
    XIELU,
    GGUFArchitecture,
    Keys,
    ModelKeys,
    Pair,
    check_scales,
    window_pattern,
)
from qlora_wgpu.gguf.gemma4 import read_gemma4, write_gemma4
from qlora_wgpu.gguf.mixtures import COUNTS, SHARED, by_softmax, counts, shared_size

_QKV = ("q_proj", "k_proj", "v_proj")
_ALL = (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
_FACTORS = ("llama3", "longrope")
_GELU = "gelu_pytorch_tanh"
_LAYER_NORM: dict[str, Any] = {"epsilon": "layer_norm_eps", "layer_norm": True}
_WINDOW = Pair("attention.sliding_window", "sliding_window")
_LOGIT_SCALE = Pair("logit_scale", "logit_scale")
_GRANITE = (
    Pair("attention.scale", "attention_multiplier", lambda config: config["head_dim"] ** -0.5),
    Pair("embedding_scale", "embedding_multiplier", 1.0),
    Pair("residual_scale", "residual_multiplier", 1.0),
    Pair("logit_scale", "logits_scaling", 1.0, value=lambda keys: 1.0 / keys.decoder.logit_scale),
)
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_SECTIONS: Mapping[str, tuple[Any, ...]] = {"rope.dimension_sections": ()}


def _as(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """The value of config.json's key ``name``."""
    return lambda config: config[name]


def _softcap(logits: str, usual: float) -> Pair:
    return Pair(f"{logits}_logit_softcapping", f"{logits}_logit_softcapping", usual, none=True)


def _delta_nets(
    name: str, model_type: str, causal_class: str, *, has_experts: bool, **more: Any
) -> GGUFArchitecture:
    allowed: Mapping[str, tuple[Any, ...]] = {"expert_count": (0,)}
    checks: tuple[Callable[[ModelKeys], None], ...] = (mixers.check_delta_nets,)
    experts: tuple[Pair, ...] = ()
    if has_experts:
        allowed, experts = by_softmax(normalized=True), mixtures.WITH_SHARED
        checks = (*checks, mixtures.check_every_layer)
    return GGUFArchitecture(
        name,
        (model_type,),
        causal_class,
        keys=(*mixers.DELTA_NETS, *experts, *more.pop("keys", ())),
        flags={"attention_bias": BIAS},
        allowed=allowed,
        rotated_share="partial_rotary_factor",
        read=mixers.read_delta_nets,
        write=checks,
        biases=(),
        mtp_layers=True,
        **more,
    )


def _nemotron_h(name: str, **more: Any) -> GGUFArchitecture:
    return GGUFArchitecture(
        name,
        ("nemotron_h",),
        "NemotronHForCausalLM",
        fixed={"mlp_hidden_act": "relu2", "use_bias": False},
        # Its attention has no positions; converters add keys of RoPE, and another epsilon.
        ignored=("rope.dimension_count", "attention.layer_norm_epsilon"),
        epsilon="layer_norm_epsilon",
        own_sizes=True,
        mtp_layers=True,
        read=mamba.read_nemotron_h,
        write=(mamba.write_nemotron_h,),
        head="own",
        activation="relu2",
        unadapted=("fc1_latent_proj", "fc2_latent_proj"),
        **{"biases": (), **more},
    )


_QWEN_3_5: dict[str, Any] = {
    "keys": (Pair("rope.dimension_sections"),),
    "ignored": ("rope.dimension_sections",),  # for positions in images
    "tiled": True,
}
# fmt: off
_ROWS = (
    GGUFArchitecture(
        "llama", ("llama", "mistral", "mixtral"), "LlamaForCausalLM", read=mixtures.read_llama,
        write=(check_scales, mixtures.write_mixtral), pairs=True, biases=_ALL, scalings=_FACTORS,
    ),
    GGUFArchitecture("qwen2", ("qwen2",), "Qwen2ForCausalLM", is_square=True),
    GGUFArchitecture("qwen3", ("qwen3",), "Qwen3ForCausalLM", flags={"attention_bias": BIAS}),
    GGUFArchitecture(
        "qwen3moe", ("qwen3_moe",), "Qwen3MoeForCausalLM", keys=COUNTS,
        fixed={"norm_topk_prob": True, **_EVERY_LAYER}, flags={"attention_bias": BIAS},
        allowed={**by_softmax(normalized=True), SHARED: (0,)}, write=mixtures.EVERY_LAYER,
    ),
    GGUFArchitecture(
        "qwen2moe", ("qwen2_moe",), "Qwen2MoeForCausalLM", keys=mixtures.WITH_SHARED,
        fixed={"norm_topk_prob": False, **_EVERY_LAYER, "use_sliding_window": False},
        flags={"qkv_bias": BIAS}, allowed=by_softmax(normalized=False),
        write=mixtures.UNNORMALIZED, head="own", is_square=True,
    ),
    GGUFArchitecture(
        "olmoe", ("olmoe",), "OlmoeForCausalLM", keys=counts("num_experts"),
        fixed={"norm_topk_prob": False},
        allowed={**by_softmax(normalized=False), "attention.clamp_kqv": (0.0,)},
        write=(mixtures.check_olmoe, *mixtures.UNNORMALIZED), head="own", is_square=True, biases=(),
    ),
    GGUFArchitecture(
        "granitemoe", ("granitemoe", "granitemoeshared"), "GraniteMoeForCausalLM",
        keys=(*_GRANITE, *counts("num_local_experts"), mixtures.GRANITE_SHARED),
        fixed={"attention_bias": False}, allowed=by_softmax(normalized=True), default_scale=False,
        read=mixtures.read_granite_moe,
        write=(families.check_granite, mixtures.check_every_layer), pairs=True, biases=(),
        scalings=_FACTORS,
    ),
    GGUFArchitecture(
        "hunyuan-moe", ("hunyuan_v1_moe",), "HunYuanMoEV1ForCausalLM",
        keys=(*counts("num_experts", "moe_topk", "intermediate_size"), *mixtures.ONE_SHARED),
        fixed={"attention_bias": False},
        allowed={
            **by_softmax(normalized=True), SHARED: (_as("intermediate_size"),),
            "expert_shared_count": (1,),
        },
        write=(*mixtures.EVERY_LAYER, mixtures.check_one_top_k), biases=(),
    ),
    GGUFArchitecture(
        "ernie4_5-moe", ("ernie4_5_moe",), "Ernie4_5_MoeForCausalLM",
        keys=(
            *counts("moe_num_experts", "moe_k", "moe_intermediate_size"),
            Pair("leading_dense_block_count", "moe_layer_start_index", 0),
            Pair("interleave_moe_layer_step", "moe_layer_interval", 1),
            Pair("expert_shared_count", "moe_num_shared_experts", 0), Pair(SHARED),
        ),
        fixed={"use_bias": False},
        allowed={
            **by_softmax(normalized=True), **_SECTIONS,
            SHARED: shared_size("moe_num_shared_experts", "moe_intermediate_size"),
        },
        write=(
            check_scales, mixtures.check_after_dense,
            partial(mixtures.check_router, sigmoid=False),
        ),
        biases=(),
    ),
    GGUFArchitecture(
        "lfm2moe", ("lfm2_moe",), "Lfm2MoeForCausalLM",
        keys=(
            Pair("shortconv.l_cache", "conv_L_cache"), *COUNTS,
            Pair("leading_dense_block_count", "num_dense_layers", 0), Pair("expert_gating_func"),
        ),
        fixed={
            "conv_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        allowed={**by_softmax(normalized=True), "expert_gating_func": (2,)}, epsilon="norm_eps",
        hybrid=True, read=mixers.read_convolutions, write=(
            mixers.write_convolutions, mixtures.check_after_dense,
            partial(mixtures.check_router, sigmoid=True),
        ),
        is_square=True,
    ),
    GGUFArchitecture(
        "glm4moe", ("glm4_moe", "solar_open"), "Glm4MoeForCausalLM", keys=mixtures.DEEPSEEK,
        flags={"attention_bias": BIAS, "use_qk_norm": "blk.0.attn_q_norm.weight"},
        allowed={**_SECTIONS, SHARED: shared_size("n_shared_experts", "moe_intermediate_size")},
        rotated_share="partial_rotary_factor", mtp_layers=True, read=mixtures.read_groups,
        write=mixtures.AFTER_DENSE,
    ),
    # head_count_kv may be 1, for the latent vector, or the number of heads
    GGUFArchitecture(
        "deepseek2", ("deepseek_v3", "deepseek_v2", "glm4_moe_lite"), "DeepseekV3ForCausalLM",
        keys=mixtures.DEEPSEEK, fixed={"rope_interleave": True},
        allowed={
            "attention.temperature_scale": (0.0,),
            SHARED: shared_size("n_shared_experts", "moe_intermediate_size"),
        },
        ignored=("attention.head_count_kv",), default_scale=False, own_sizes=True, mtp_layers=True,
        read=mixers.read_latent,
        write=(mixers.write_latent, *mixtures.AFTER_DENSE), biases=(),
        unadapted=("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head"),
    ),
    GGUFArchitecture(
        "exaone-moe", ("exaone_moe",), "ExaoneMoeForCausalLM", keys=(*mixtures.DEEPSEEK, _WINDOW),
        allowed={
            "rope.freq_base_swa": (_as("rope_theta"),),
            SHARED: shared_size("n_shared_experts", "moe_intermediate_size"),
        },
        mtp_layers=True, read=mixtures.read_exaone_moe, write=mixtures.AFTER_DENSE,
        head="own", biases=(), windows="periodic",
    ),
    _delta_nets(
        "qwen3next", "qwen3_next", "Qwen3NextForCausalLM", has_experts=True,
        fixed={**_EVERY_LAYER, "norm_topk_prob": True},
    ),
    _delta_nets("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", has_experts=False, **_QWEN_3_5),
    _delta_nets(
        "qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", has_experts=True, **_QWEN_3_5,
    ),
    GGUFArchitecture(
        "gemma", ("gemma",), "GemmaForCausalLM", fixed={"hidden_activation": _GELU},
        write=(families.check_gemma,), head="tied", activation=_GELU,
    ),
    GGUFArchitecture(
        "gemma2", ("gemma2",), "Gemma2ForCausalLM",
        keys=(
            Pair("attention.sliding_window", "sliding_window", 4096), _softcap("attn", 50.0),
            _softcap("final", 30.0),
        ),
        fixed={"hidden_activation": _GELU}, allowed={"attention.sliding_window_pattern": (2,)},
        default_scale=False, read=families.read_gemma2, write=(families.check_gemma2,), head="tied",
        windows="every other", activation=_GELU,
    ),
    GGUFArchitecture(
        "gemma3", ("gemma3_text",), "Gemma3ForCausalLM", keys=(_softcap("final", 0.0),),
        fixed={"hidden_activation": _GELU}, default_scale=False, read=families.read_gemma3,
        write=(families.check_gemma3,), windows="periodic", activation=_GELU,
    ),
    GGUFArchitecture(
        "gemma4", ("gemma4_text", "gemma4_unified_text"), "Gemma4ForCausalLM",
        fixed={"hidden_activation": _GELU}, default_scale=False, own_sizes=True, read=read_gemma4,
        write=(write_gemma4,), joins_experts=True, biases=(), activation=_GELU,
        unadapted=("per_layer_model_projection",),
    ),
    GGUFArchitecture(
        "phi3", ("phi3",), "Phi3ForCausalLM",
        keys=(
            Pair(
                "rope.scaling.original_context_length", "original_max_position_embeddings",
                _as("max_position_embeddings"),
            ),
            Pair("attention.sliding_window", "sliding_window", 0, none=True),
        ),
        rotated_share="partial_rotary_factor", read=families.read_padding, is_square=True,
        scalings=("longrope",),
    ),
    # granitemoehybrid with experts is granitemoe
    GGUFArchitecture(
        "granite", ("granite", "granitemoehybrid"), "GraniteForCausalLM", keys=_GRANITE,
        flags={"attention_bias": BIAS}, allowed={"expert_count": (0,)}, default_scale=False,
        write=(families.check_granite,), pairs=True, biases=_ALL, scalings=_FACTORS,
    ),
    GGUFArchitecture(
        "granite_swa", ("granite_swa",), "GraniteSWAForCausalLM", keys=(*_GRANITE, _WINDOW),
        flags={"attention_bias": BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
        allowed={"expert_count": (0,)}, default_scale=False, read=families.read_granite_swa,
        write=(families.write_granite_swa,), named_as="mimo2", pairs=True, biases=_ALL,
        windows="listed",
    ),
    # Granite 4 with Mamba, too: ``architecture_of``
    GGUFArchitecture(
        "granitehybrid", ("bamba",), "GraniteMoeHybridForCausalLM",
        keys=_GRANITE, fixed={"model_type": "granitemoehybrid"},
        allowed=by_softmax(normalized=True), default_scale=False,
        rotated_share="partial_rotary_factor", hybrid=True, read=mamba.read_hybrid,
        write=(mamba.write_hybrid,), pairs=True, biases=_ALL, scalings=_FACTORS,
    ),
    # Its factors are part of the weights
    GGUFArchitecture(
        "falcon-h1", ("falcon_h1",), "FalconH1ForCausalLM", read=mamba.read_parallel,
        write=(mamba.write_parallel,), head="own", biases=(),
    ),
    _nemotron_h("nemotron_h_moe", keys=mixtures.NEMOTRON),
    # With experts it is nemotron_h_moe: ``architecture_of``
    _nemotron_h("nemotron_h", allowed={"expert_count": (0,)}, biases=("up_proj", "down_proj")),
    GGUFArchitecture(
        "afmoe", ("afmoe",), "AfmoeForCausalLM",
        keys=(
            *COUNTS, _WINDOW, Pair("leading_dense_block_count", "num_dense_layers", 0),
            Pair("expert_shared_count", "num_shared_experts", 0), Pair("expert_gating_func"),
            Pair("expert_weights_norm"), Pair("expert_weights_scale", "route_scale", 1.0),
        ),
        fixed={"attention_bias": False, "mup_enabled": True, "global_attn_every_n_layers": 4},
        allowed={
            "expert_gating_func": (0, SIGMOID), "expert_weights_norm": (True,),
            "attention.sliding_window_pattern": (4,),
        },
        write=(mixtures.check_afmoe, mixtures.check_after_dense), biases=(), windows="periodic",
    ),
    # Its config.json has no epsilon
    GGUFArchitecture(
        "olmo", ("olmo",), "OlmoForCausalLM",
        keys=(Pair("attention.clamp_kqv", "clip_qkv", 0.0, none=True),),
        fixed={"attention_bias": False},
        allowed={"attention.layer_norm_epsilon": (1e-05, float(np.float32(1e-05)))},
        default_scale=False, **_LAYER_NORM, read=families.read_padding, pairs=True, is_square=True,
        biases=(),
    ),
    GGUFArchitecture(
        "olmo2", ("olmo2", "olmo3"), "Olmo2ForCausalLM", read=families.read_olmo2, head="own",
        is_square=True, biases=(), windows="periodic",
    ),
    # A softmax over the chosen experts (3) gives weights that sum to one, whatever a key says
    GGUFArchitecture(
        "gpt-oss", ("gpt_oss",), "GptOssForCausalLM",
        keys=(
            _WINDOW, *counts("num_local_experts"),
            Pair("expert_feed_forward_length", "intermediate_size", _as("intermediate_size")),
        ),
        flags={"attention_bias": BIAS},
        allowed={
            "expert_gating_func": (0, 3), "expert_weights_scale": (0.0, 1.0),
            "expert_weights_norm": (True, False), "attention.sliding_window_pattern": (2,),
        },
        read=families.read_gpt_oss, write=(mixtures.check_biased_attention, *mixtures.EVERY_LAYER),
        head="own", windows="every other", biases=_ALL,
    ),
    GGUFArchitecture(
        "stablelm", ("stablelm",), "StableLmForCausalLM", keys=(Pair("use_parallel_residual"),),
        fixed={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        flags={"use_qkv_bias": BIAS, "qk_layernorm": "blk.0.attn_q_norm.weight"},
        rotated_share="partial_rotary_factor", **_LAYER_NORM, read=families.read_stablelm,
        head="own", is_square=True,
    ),
    GGUFArchitecture(
        "starcoder2", ("starcoder2",), "Starcoder2ForCausalLM",
        fixed={
            "hidden_act": _GELU, "use_bias": True, "sliding_window": None,
            "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0,
        },
        default_scale=False, epsilon="norm_epsilon", layer_norm=True,
        write=(families.check_biased,), is_square=True,
        biases=(*_QKV, "o_proj", "c_fc", "c_proj"), activation=_GELU,
    ),
    GGUFArchitecture(
        "nemotron", ("nemotron",), "NemotronForCausalLM", fixed={"hidden_act": "relu2"},
        flags={"attention_bias": BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
        rotated_share="partial_rotary_factor", epsilon="norm_eps", layer_norm=True, head="own",
        is_square=True, biases=_ALL, activation="relu2",
    ),
    GGUFArchitecture(
        "command-r", ("cohere",), "CohereForCausalLM", keys=(_LOGIT_SCALE,),
        fixed={"attention_bias": False}, flags={"use_qk_norm": "blk.0.attn_q_norm.weight"},
        default_scale=False, **_LAYER_NORM, write=(families.check_cohere,), head="tied",
        is_square=True, biases=(),
    ),
    GGUFArchitecture(
        "cohere2", ("cohere2",), "Cohere2ForCausalLM", keys=(_LOGIT_SCALE, _WINDOW),
        fixed={"attention_bias": False}, allowed={"rope.freq_base_swa": (_as("rope_theta"),)},
        default_scale=False, **_LAYER_NORM,
        read=lambda keys, file, config: window_pattern(keys, config, 4),
        write=(families.check_cohere,), head="tied", is_square=True, biases=(), windows="periodic",
    ),
    GGUFArchitecture(
        "phi2", ("phi",), "PhiForCausalLM",
        fixed={"hidden_act": "gelu_new", "qk_layernorm": False},
        rotated_share="partial_rotary_factor", **_LAYER_NORM, read=families.read_phi2,
        write=(families.check_phi,), head="own", is_square=True,
        biases=(*_QKV, "dense", "fc1", "fc2"), activation=_GELU,
    ),
    # No key has the activation: it is the one that llama.cpp computes
    GGUFArchitecture(
        "gptneox", ("gpt_neox",), "GPTNeoXForCausalLM",
        keys=(Pair("use_parallel_residual", "use_parallel_residual", True),),
        fixed={"hidden_act": "gelu_new"}, flags={"attention_bias": "blk.0.attn_qkv.bias"},
        allowed={"attention.head_count_kv": (_as("num_attention_heads"),)},
        rotated_share="rotary_pct", **_LAYER_NORM,
        read=lambda keys, file, config: {"rotary_emb_base": config["rope_theta"]},
        write=(families.check_biased,), head="own", is_square=True,
        biases=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), activation=_GELU,
        approximates=("gelu",),
    ),
    GGUFArchitecture(
        "mistral3", ("ministral3", "mistral3"), "Ministral3ForCausalLM",
        fixed={"sliding_window": None}, allowed={"expert_count": (0,)},
        read=families.read_ministral, write=(families.check_ministral,), pairs=True, biases=_ALL,
    ),
    GGUFArchitecture(
        "apertus", ("apertus",), "ApertusForCausalLM", fixed={"hidden_act": "xielu"},
        flags={"attention_bias": BIAS}, read=families.read_apertus, head="own", activation="xielu",
        scalars=XIELU, scalings=_FACTORS,
    ),
    GGUFArchitecture(
        "lfm2", ("lfm2",), "Lfm2ForCausalLM", keys=(Pair("shortconv.l_cache", "conv_L_cache"),),
        fixed={"block_auto_adjust_ff_dim": False, "conv_bias": False}, epsilon="norm_eps",
        hybrid=True, read=mixers.read_convolutions, write=(mixers.write_convolutions,),
        is_square=True,
    ),
    # Every fourth layer has no RoPE
    GGUFArchitecture(
        "smollm3", ("smollm3",), "SmolLM3ForCausalLM",
        fixed={"no_rope_layer_interval": 4, "use_sliding_window": False}, pairs=True,
    ),
    GGUFArchitecture(
        "arcee", ("arcee",), "ArceeForCausalLM", fixed={"hidden_act": "relu2"},
        flags={"attention_bias": BIAS}, default_scale=False, pairs=True, biases=(),
        activation="relu2", scalings=("llama3",),
    ),
    GGUFArchitecture(
        "ernie4_5", ("ernie4_5",), "Ernie4_5ForCausalLM", flags={"use_bias": BIAS},
        allowed=_SECTIONS, default_scale=False, biases=(),
    ),
    GGUFArchitecture(
        "exaone4", ("exaone4",), "Exaone4ForCausalLM", default_scale=False,
        read=families.read_exaone4, is_square=True, windows="of 64 layers", scalings=("llama3",),
    ),
    GGUFArchitecture(
        "glm4", ("glm4",), "Glm4ForCausalLM", flags={"attention_bias": BIAS}, allowed=_SECTIONS,
        rotated_share="partial_rotary_factor", default_scale=False,
    ),
    GGUFArchitecture(
        "hunyuan-dense", ("hunyuan_v1_dense",), "HunYuanDenseV1ForCausalLM",
        fixed={"attention_bias": False}, default_scale=False, biases=(),
    ),
    GGUFArchitecture(
        "seed_oss", ("seed_oss",), "SeedOssForCausalLM",
        fixed={
            "attention_out_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
            "residual_dropout": 0.0,
        },
        flags={"attention_bias": BIAS}, default_scale=False,
    ),
)
# fmt: on
ARCHITECTURES = {row.name: row for row in _ROWS}
"""By ``general.architecture``."""
BY_MODEL_TYPE = {model_type: row for row in _ROWS for model_type in row.model_types}
"""By config.json's ``model_type``."""
# Multimodal models, whose text_config may have no model_type.
_TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def find_architecture(keys: Keys) -> GGUFArchitecture:
    """The architecture of a file."""
    if keys.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{keys.where}: GGUF files of the architecture {keys.architecture[:80]!r} are not "
            f"supported (supported: {', '.join(sorted(ARCHITECTURES))}): use the model's "
            "safetensors version"
        )
    return ARCHITECTURES[keys.architecture]


def architecture_for(config: Mapping[str, Any], whole: Architecture, what: str) -> GGUFArchitecture:
    """llama.cpp's architecture for a model."""
    has_mamba = any(isinstance(layer.attention, Mamba) for layer in whole.config.layers)
    return architecture_of(
        model_type_of(config), what, has_experts=bool(whole.experts), has_mamba=has_mamba
    )


def architecture_of(
    model_type: str, what: str, *, has_experts: bool, has_mamba: bool = False
) -> GGUFArchitecture:
    """llama.cpp's architecture for a model type."""
    if model_type == "granitemoehybrid" and has_mamba:
        return ARCHITECTURES["granitehybrid"]
    if model_type == "granitemoehybrid" and has_experts:
        return ARCHITECTURES["granitemoe"]
    if model_type == "nemotron_h" and has_experts:
        return ARCHITECTURES["nemotron_h_moe"]
    found = BY_MODEL_TYPE.get(model_type)
    if found is None:
        raise UnsupportedModelError(
            f"GGUF export of {what} of model type {model_type!r} is not supported (supported: "
            f"{', '.join(sorted(BY_MODEL_TYPE))})"
        )
    return found


def model_type_of(config: Mapping[str, Any]) -> str:
    """config.json's ``model_type``, for a multimodal model that of its text model."""
    outer = str(config.get("model_type"))
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return str(inner) if inner is not None else _TEXT_PARTS.get(outer, outer)
