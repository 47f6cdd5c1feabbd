"""Small config.json files of every family, and what is read from them."""

from qlora_wgpu.families.family import find_family

SIZES = {
    "vocab_size": 331, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


MIXED = {"num_experts_per_tok": 2}


# Without which a family has nothing to read.
PLAIN = {"hidden_size_per_layer_input": 0}  # a 0 that is not the default


LATENT = {"num_key_value_heads": 6, "partial_rotary_factor": 1.0}


NO_SHARED = {"num_kv_shared_layers": 0}


NEEDED = {
    "gemma3n_text": NO_SHARED,
    "gemma3n": {"text_config": {**SIZES, **NO_SHARED, "head_dim": 12}},
    "gemma4_text": PLAIN,
    "gemma4": {"text_config": {**SIZES, **PLAIN, "head_dim": 12}},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 6},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 0},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["sparse"] * 4, "v_head_dim": 128},
    "lfm2_moe": {"layer_types": ["full_attention"] * 4, "num_dense_layers": 0},
    "gemma4_unified": {"text_config": {**SIZES, "head_dim": 12}},
    "hunyuan_v1_moe": {"num_experts": 4},
    "gemma3": {"text_config": {**SIZES, "head_dim": 12}},
    "mistral3": {"text_config": {**SIZES, "model_type": "ministral3", "head_dim": 12}},
    "idefics3": {"text_config": {**SIZES, "model_type": "llama"}},
    "smolvlm": {"text_config": {**SIZES, "model_type": "llama"}},
    "llava": {"text_config": {**SIZES, "model_type": "mistral"}},
    "llava_next": {"text_config": {**SIZES, "model_type": "qwen2"}},
    "exaone4_5": {"text_config": {**SIZES, "model_type": "exaone4"}},
    "muse_glimmer": {"text_config": {**SIZES, "head_dim": 12}},
    "youtu": LATENT,
    "olmo_hybrid": {
        "num_hidden_layers": 3,
        "linear_key_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
    "lfm2_vl": {"text_config": {**SIZES, "model_type": "lfm2"}},
    "qwen3_vl": {"text_config": SIZES},
    "qwen3_vl_moe": {"text_config": SIZES},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 4},
    "falcon_h1": {"mamba_n_heads": 3, "mamba_d_ssm": 72, "mamba_d_state": 16},
    "bamba": {"mamba_n_heads": 2, "mamba_d_state": 16},
    "nemotron_h": {
        "layers_block_type": ["full_attention", "mlp"] * 2,
        "head_dim": 12,
        "mamba_num_heads": 2,
        "n_groups": 1,
        "ssm_state_size": 16,
        "n_routed_experts": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 3,
        "mamba_d_state": 16,
        "num_key_value_heads": 6,
        "adapter_rank": 5,
    },
    "qwen3_next": {"layer_types": ["linear_attention"] * 4, "num_experts": 4, **MIXED},
    "qwen3_5_text": {"layer_types": ["linear_attention"] * 4},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention"] * 4, "num_experts": 4, **MIXED},
    "qwen3_5": {"text_config": {**SIZES, "layer_types": ["linear_attention"] * 4}},
    "qwen3_5_moe": {
        "text_config": {
            **SIZES,
            "layer_types": ["linear_attention"] * 4,
            "num_experts": 4,
            **MIXED,
        }
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "apertus": {"rope_parameters": {"rope_type": "default"}},
    "gpt_oss": {"rope_parameters": {"rope_type": "default"}},  # YaRN rotates whole heads alone
    "ministral3": {
        "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
    },
}
G4 = {"global_head_dim": 20, "hidden_size_per_layer_input": 6}
KINDS = ["sliding_attention", "full_attention"] * 2


def read(model_type, **changes):
    config = {"model_type": model_type, **SIZES, **changes}
    return find_family(config).read(config)


def layers(model_type, **changes):
    return read(model_type, **changes).config.layers


def windows(model_type, **changes):
    return tuple(layer.attention.window for layer in layers(model_type, **changes))
