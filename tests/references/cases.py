"""The models whose gradients are recorded: their config.json, every detail switched on.

A case is a ``model_type`` and its keys beside ``ODD``. ``record.py`` has PyTorch compute them.
"""

from case_parts import (
    DELTA,
    GRANITE,
    GROUPED,
    LATENT,
    LONG,
    MAMBA,
    MIXED,
    NEMOTRON,
    TWO_SIZES,
    WHOLE,
    WIDE,
    ZAMBA,
    rope,
)  # fmt: skip
from seeded import VOCAB

CASES = {
    "llama": ("llama", WIDE),
    "llama-linear": ("llama", rope("linear", factor=3.0)),
    "llama-dynamic": ("llama", {**rope("dynamic", factor=2.5), "max_position_embeddings": 16}),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-mscale": (
        "llama",
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7,
            mscale_all_dim=0.3, beta_fast=8.0, beta_slow=2.0, truncate=False,
        ),
    ),
    "llama-llama3": (
        "llama",
        rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}),
    "llama-relu": ("llama", {**WIDE, "hidden_act": "relu"}),
    "llama-quick-gelu": ("llama", {**WIDE, "hidden_act": "quick_gelu"}),
    "llama-dora": ("llama", {**WIDE, "attention_bias": True}),
    "mistral": ("mistral", {**WIDE, "sliding_window": 7, "num_key_value_heads": 3}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", WIDE),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "granite": ("granite", {**GRANITE, "num_key_value_heads": 2}),
    "gemma": ("gemma", {**WIDE, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {
            **WIDE, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0,
            "sliding_window": 7, "query_pre_attn_scalar": 17,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **WIDE, "num_hidden_layers": 3, "sliding_window": 7, "query_pre_attn_scalar": 17,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4": (  # as E2B: inputs of each layer, shared keys and values, wider MLPs where they are
        "gemma4_text",
        {
            **TWO_SIZES, "num_hidden_layers": 5, "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True, "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": [
                "sliding_attention", "full_attention", "sliding_attention", "full_attention",
                "full_attention",
            ],
        },
    ),
    "gemma4-dense": (  # as 31B: keys that are values
        "gemma4_text",
        {
            **TWO_SIZES, "num_hidden_layers": 3, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4-experts": (  # as 26B-A4B: a mixture beside the MLP
        "gemma4_text",
        {
            **TWO_SIZES, "num_hidden_layers": 3, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
            "enable_moe_block": True, "num_experts": 7, "top_k_experts": 3,
            "moe_intermediate_size": 44,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma3n": (  # as E2B, with fewer layers: sparse gates in some, MLPs of two sizes
        "gemma3n_text",
        {
            **WIDE, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 7,
            "intermediate_size": [100, 100, 100, 92, 92], "laurel_rank": 9,
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.3],
            "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB - 9,
            "final_logit_softcapping": 6.0,
            "layer_types": [
                "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "gemma3n-streams": (  # three streams, of which the last is computed, biases and a large epsilon
        "gemma3n_text",
        {
            **WIDE, "num_hidden_layers": 2, "num_kv_shared_layers": 0, "sliding_window": 7,
            "rms_norm_eps": 1e-2, "altup_num_inputs": 3, "altup_active_idx": 2,
            "altup_correct_scale": False, "laurel_rank": 8, "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {"sliding_window": 7, "num_key_value_heads": 3}),
    "phi3-partial": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": (
        "phi3", {**rope("longrope", **LONG), "original_max_position_embeddings": 16},
    ),
    "phi3-shortrope": (
        "phi3", {**rope("longrope", **LONG), "original_max_position_embeddings": 32},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "attention_bias": True, "sliding_window": 7, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        },
    ),
    "starcoder2": (
        "starcoder2",
        {
            "sliding_window": 7, "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
            "residual_dropout": 0.0, "embedding_dropout": 0.0,
        },
    ),
    "starcoder2-gelu": (
        "starcoder2",
        {"sliding_window": None, "use_bias": False, "hidden_act": "gelu", "residual_dropout": 0.0},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True, **rope("default", partial_rotary_factor=0.5)}),
    "stablelm-qknorm": (
        "stablelm",
        {
            "qk_layernorm": True, "use_parallel_residual": True, "layer_norm_eps": 1e-3,
            "num_key_value_heads": 3, **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, **rope("default", partial_rotary_factor=0.5)},
    ),
    "glm4": (
        "glm4",
        {**WIDE, "attention_bias": True, **rope("default", partial_rotary_factor=0.5)},
    ),
    "qwen3_moe": ("qwen3_moe", {**WIDE, **MIXED, "norm_topk_prob": False}),
    "qwen3_moe-experts": (
        "qwen3_moe",
        {
            **WIDE, **MIXED, "num_hidden_layers": 3, "norm_topk_prob": True, "mlp_only_layers": [1],
            "use_sliding_window": True, "sliding_window": 7,
        },
    ),
    "qwen2_moe-experts": (
        "qwen2_moe",
        {
            **MIXED, "num_experts": 5, "norm_topk_prob": False,
            "shared_expert_intermediate_size": 52, "use_sliding_window": True, "sliding_window": 7,
        },
    ),
    "olmoe-experts": (
        "olmoe",
        {
            "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
            "attention_bias": True, "num_key_value_heads": 3, "norm_topk_prob": True,
        },
    ),
    "flex_olmo-experts": (
        "flex_olmo",
        {
            "num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 44,
            "attention_bias": True, "num_key_value_heads": 3, "norm_topk_prob": False,
            "output_router_logits": True, "router_aux_loss_coef": 0.3,
        },
    ),
    "olmoe-limited": (
        "olmoe",
        {
            "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44, "clip_qkv": 1.5,
            "attention_bias": True, "num_key_value_heads": 3,
        },
    ),
    "ernie4_5_moe-experts": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 28,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "num_key_value_heads": 3,
        },
    ),
    "lfm2_moe-experts": (
        "lfm2_moe",
        {
            "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
            "num_dense_layers": 1, "routed_scaling_factor": 1.7, "conv_bias": True,
            "conv_L_cache": 4, "norm_eps": 1e-3, "layer_types": ["conv", "full_attention"],
        },
    ),
    "glm4_moe-experts": (
        "glm4_moe",
        {
            **WIDE, **GROUPED, "moe_intermediate_size": 28, "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "glm4_moe_lite-experts": (
        "glm4_moe_lite",
        {
            **LATENT, **GROUPED, "q_lora_rank": 36, "moe_intermediate_size": 28,
            "attention_bias": True,
            **rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7,
                mscale_all_dim=0.6,
            ),
        },
    ),
    "deepseek_v3-experts": (
        "deepseek_v3",
        {
            **LATENT, **GROUPED, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "q_lora_rank": None, "moe_intermediate_size": 28, "rope_interleave": False,
            "v_head_dim": 22,
        },
    ),
    "deepseek_v3-values-experts": (  # longer than keys, both odd
        "deepseek_v3",
        {
            **LATENT, "n_routed_experts": 3, "num_experts_per_tok": 3, "n_group": 1,
            "topk_group": 1, "q_lora_rank": 20, "moe_intermediate_size": 17, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "qk_nope_head_dim": 7, "v_head_dim": 27,
        },
    ),
    "deepseek_v2-experts": (
        "deepseek_v2",
        {
            **LATENT, **GROUPED, "q_lora_rank": None, "moe_intermediate_size": 28,
            "topk_method": "group_limited_greedy", "mlp_bias": True,
        },
    ),
    "granitemoe-experts": (
        "granitemoe",
        {
            **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
        },
    ),
    "granitemoeshared-experts": (
        "granitemoeshared",
        {
            **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
            "shared_intermediate_size": 36, "attention_bias": False,
        },
    ),
    "granite4-experts": (
        "granitemoehybrid",
        {
            **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
            "shared_intermediate_size": 36, "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope", "mamba_n_heads": 2, "output_router_logits": True,
            "router_aux_loss_coef": 0.3,
        },
    ),
    "granite4-mamba-experts": (
        "granitemoehybrid",
        {
            **GRANITE, **MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2,
            "intermediate_size": 44, "shared_intermediate_size": 36, "mamba_conv_bias": False,
            "layer_types": ["linear_attention", "full_attention"], "mamba_n_groups": 1,
        },
    ),
    "hunyuan_moe-experts": (
        "hunyuan_v1_moe",
        {
            **WIDE, "num_experts": 5, "moe_topk": 2, "intermediate_size": 44,
            "attention_bias": False, "num_key_value_heads": 3,
        },
    ),
    "exaone_moe-experts": (
        "exaone_moe",
        {
            **WIDE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "num_shared_experts": 2, "num_hidden_layers": 3, "first_k_dense_replace": 1,
            "sliding_window": 7, "n_group": 3, "topk_group": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral": (
        "ministral",
        {
            **WIDE, "num_key_value_heads": 3, "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "nanochat": (
        "nanochat",
        {**WIDE, "num_key_value_heads": 3, "final_logit_softcapping": 6.0, "attention_bias": True},
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {  # transformers saves the convolutions' weights in equal parts
            **DELTA, "linear_value_head_dim": 8, "rms_norm_eps": 1e-3, "linear_conv_kernel_dim": 3,
        },
    ),
    "youtu": (
        "youtu",
        {**LATENT, "q_lora_rank": 36, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "solar_open-experts": (
        "solar_open",
        {
            **WIDE, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2,
            "n_shared_experts": 2, "routed_scaling_factor": 1.7, "moe_intermediate_size": 28,
            "attention_bias": True,
        },
    ),
    "granite_swa": (
        "granite_swa",
        {
            **GRANITE, "num_hidden_layers": 3, "sliding_window": 7,
            "layer_rope_theta": [77.0, 10000.0, 0],
        },
    ),
    "granitemoe_swa-experts": (
        "granitemoe_swa",
        {
            **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
            "shared_intermediate_size": 36, "sliding_window": 7, "layer_rope_theta": [0, 77.0],
        },
    ),
    "afmoe-experts": (
        "afmoe",
        {
            **WIDE, "num_hidden_layers": 3, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 28, "num_shared_experts": 2, "num_dense_layers": 1,
            "sliding_window": 7, "route_scale": 1.7, "mup_enabled": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma4_unified": (  # as 12B: keys that are values
        "gemma4_unified_text",
        {
            **TWO_SIZES, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "num_hidden_layers": 3, "use_bidirectional_attention": None,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "mixtral-balanced": (
        "mixtral",
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "output_router_logits": True,
            "router_aux_loss_coef": 0.7,
        },
    ),
    "qwen3_moe-balanced-experts": (  # a layer without experts
        "qwen3_moe",
        {
            **WIDE, **MIXED, "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True,
            "output_router_logits": True, "router_aux_loss_coef": 0.7,
        },
    ),
    "ernie4_5_moe-balanced-experts": (  # experts chosen by more than their logits
        "ernie4_5_moe",
        {
            "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 28,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "num_key_value_heads": 3,
            "output_router_logits": True, "router_aux_loss_coef": 0.3,
        },
    ),
    "mixtral-experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "gpt_oss",
        {
            **WIDE, "num_key_value_heads": 3, "sliding_window": 7, "num_local_experts": 5,
            "num_experts_per_tok": 2, "swiglu_limit": 1.5,
        },
    ),
    "gpt_oss-experts": (
        "gpt_oss",
        {
            **WIDE, "num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": False,
            # No number of the ten steps is nearer to this limit than rounding moves it.
            "swiglu_limit": 3.3, "swiglu_alpha": 1.2, "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"], **rope("linear", factor=3.0),
        },
    ),
    "cohere": ("cohere", {"logit_scale": 0.3, "use_qk_norm": False, "attention_bias": False}),
    "cohere-qknorm": (
        "cohere",
        {
            "logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True,
            "num_key_value_heads": 3, "layer_norm_eps": 1e-3,
        },
    ),
    "exaone4": (
        "exaone4",
        {
            **WIDE, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "cohere2": (
        "cohere2",
        {
            "logit_scale": 0.3, "attention_bias": True, "num_key_value_heads": 3,
            "layer_norm_eps": 1e-3, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ernie4_5": ("ernie4_5", {**WIDE, "use_bias": True, "num_key_value_heads": 3}),
    "seed_oss": (
        "seed_oss",
        {
            **WIDE, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True,
            "attention_dropout": 0.0, "residual_dropout": 0.0,
        },
    ),
    "hunyuan": (
        "hunyuan_v1_dense", {**WIDE, **rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "ministral3": (
        "ministral3",
        {
            **WIDE, "sliding_window": 17, "num_key_value_heads": 3,
            **rope(
                "yarn", factor=4.0, original_max_position_embeddings=5, mscale=1.0,
                mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0, llama_4_scaling_beta=0.4,
            ),
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.11,
            "logits_scaling": 2.5, "num_local_experts": 0, "shared_intermediate_size": 92,
            "position_embedding_type": "rope", "layer_types": ["attention"] * 2,
            "mamba_n_heads": 2, "tie_word_embeddings": True,
        },
    ),
    "arcee": ("arcee", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}),
    "nemotron": (
        "nemotron",
        {
            **WIDE, "mlp_bias": True, "norm_eps": 1e-3,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "apertus": (
        "apertus",
        {
            **WIDE, "attention_bias": True, "num_key_value_heads": 3,
            **rope("default"),
        },
    ),
    "gpt_neox": (  # as Pythia
        "gpt_neox",
        {
            "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_act": "gelu",
            "rotary_pct": 0.25, "rotary_emb_base": 20000,
        },
    ),
    "gpt_neox-serial": (
        "gpt_neox",
        {
            "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast",
            "rotary_pct": 1.0, "layer_norm_eps": 1e-3, "num_key_value_heads": 6,
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 6, **rope("default", partial_rotary_factor=0.5)}),
    "phi-qknorm": (
        "phi",
        {
            **WIDE, "qk_layernorm": True, "num_key_value_heads": 3, "layer_norm_eps": 1e-3,
            "hidden_size": 120, **rope("default", partial_rotary_factor=1.0),
        },
    ),
    "olmo": (  # rows that are no whole units
        "olmo",
        {
            **WIDE, "attention_bias": True, "clip_qkv": 1.5, "num_key_value_heads": 3,
            "hidden_size": 61,
        },
    ),
    "olmo-plain": ("olmo", {"clip_qkv": None, "tie_word_embeddings": True}),
    "lfm2": (
        "lfm2",
        {
            "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 9, "norm_eps": 1e-3,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "qwen3_next-experts": (
        "qwen3_next",
        {
            **WIDE, **DELTA, **MIXED, "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [0], "norm_topk_prob": True,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "qwen3_5_moe-experts": (
        "qwen3_5_moe_text",
        {
            **WIDE, **DELTA, **MIXED, "shared_expert_intermediate_size": 52,
            "layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2,
            **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 2, 1]),
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            **WIDE, **DELTA, "attention_bias": True, "rms_norm_eps": 1e-3,
            **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 2, 1]),
        },
    ),
    "bamba": (
        "bamba",
        {
            **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "attention_bias": True,
            "mamba_proj_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3,
            "time_step_limit": [0.5, 1.1],
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "mlp_multipliers": [0.7, 1.4],
            "ssm_multipliers": [1.3, 0.7, 1.6, 0.8, 1.2], "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.9, "key_multiplier": 0.6, "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8, "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.4, "rms_norm_eps": 1e-3,
        },
    ),
    "falcon_h1-gate": (
        "falcon_h1",
        {
            **MAMBA, "mamba_n_heads": 3, "mamba_d_ssm": 72, "mamba_proj_bias": True,
            "projectors_bias": True, "attention_bias": True, "mlp_bias": True,
            "ssm_multipliers": [1.3, 0.7, 1.6, 0.8, 1.2], "key_multiplier": 0.6,
        },
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {
            **WIDE, "num_hidden_layers": 3, "sliding_window": 7, "attention_bias": True,
            "final_logit_softcapping": 1.5, "output_multiplier": 4.0, "qk_scale_factor": 2.3,
            "rms_norm_eps": 1e-3, "post_norm_eps": 1e-2, "layer_rope_theta": [10000.0, 0, 77.0],
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **NEMOTRON, **GROUPED, "use_bias": True, "mlp_bias": True, "use_conv_bias": False,
        },
    ),
    "nemotron_h-latent-experts": (  # as Nemotron 3 Super
        "nemotron_h",
        {
            **NEMOTRON, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_latent_size": 28,
            "layers_block_type": ["moe", "full_attention", "mlp"],
            "norm_topk_prob": False, "mlp_hidden_act": "silu",
        },
    ),
    "zamba2": (  # as 1.2B: one block with terms of its attention, too
        "zamba2",
        {
            **ZAMBA, "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "use_shared_attention_adapter": True, "use_mem_rope": True, "add_bias_linear": True,
        },
    ),
    "zamba2-turns": (  # as 2.7B: two blocks in turns, of which one is used twice
        "zamba2",
        {
            **ZAMBA, "layers_block_type": ["hybrid"] * 3, "num_mem_blocks": 2,
            "num_key_value_heads": 1, "hidden_act": "silu", "hidden_size": 8, "n_mamba_heads": 2,
            "mamba_ngroups": 2,
        },
    ),
    "zamba2-untied": (  # whose layers have blocks of their own
        "zamba2",
        {
            **ZAMBA, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "tie_word_embeddings": False, "use_mem_rope": True,
        },
    ),
    "llama-nf4": ("llama", {**WIDE, **WHOLE}),
    "qwen2-nf4": ("qwen2", WHOLE),
    "phi3-nf4": ("phi3", {**WHOLE, "num_key_value_heads": 3}),
}  # fmt: skip
