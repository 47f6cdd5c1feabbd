"""The config.json files that ``configs.py`` tries: small models, and other values of every key."""

import itertools
import json

from references.seeded import VOCAB

ABSENT = "(absent)"
BASE = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LISTS = {"short_factor": [1.0, 1.5, 3.0], "long_factor": [2.0, 4.0, 9.0]}
DELTA = {
    "head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "partial_rotary_factor": 0.67,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MAMBA = {
    "head_dim": 8, "mamba_n_heads": 2, "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}  # fmt: skip
OWN = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": True, "ssm_multipliers": [1.2] * 5,
    },
    "nemotron_h": {
        "head_dim": 8, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 2, "mamba_head_dim": 24, "n_groups": 2, "ssm_state_size": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 12, "chunk_size": 8,
    },
    "zamba2": {
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "n_mamba_heads": 2,
        "mamba_ngroups": 2, "mamba_d_state": 8, "num_key_value_heads": 4, "adapter_rank": 6,
        "use_shared_attention_adapter": True, "use_mem_rope": True, "chunk_size": 8,
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_vl_moe_text": {
        "head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "qwen2_moe": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12,
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 2,
    },
    "lfm2_moe": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"],
    },
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_group": 4, "topk_group": 2,
    },
    **{
        model_type: {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "n_group": 4, "topk_group": 2, "num_key_value_heads": 4, "kv_lora_rank": 12,
            "qk_nope_head_dim": 6, "qk_rope_head_dim": 6, "v_head_dim": 6, "q_lora_rank": 10,
        }
        for model_type in ("glm4_moe_lite", "deepseek_v2", "deepseek_v3")
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.5,
    },
    "gemma": {"head_dim": 6}, "gemma2": {"head_dim": 6}, "gemma3_text": {"head_dim": 6},
    "gemma4_text": {
        "head_dim": 6, "global_head_dim": 10, "sliding_window": 5, "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gemma3n_text": {
        "head_dim": 6, "sliding_window": 5, "num_kv_shared_layers": 1, "laurel_rank": 5,
        "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB - 9,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.7, 0.4, 0.0],
    },
    "qwen3": {"head_dim": 6}, "qwen3_vl_text": {"head_dim": 6}, "glm4": {"head_dim": 8},
    "qwen2_vl_text": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
    "qwen2_5_vl_text": {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
    "stablelm": {"partial_rotary_factor": 0.67},
    "smollm3": {"no_rope_layers": [1, 0, 1]}, "ernie4_5": {"head_dim": 6},
    "seed_oss": {"head_dim": 6, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "hunyuan_v1_dense": {"head_dim": 6}, "nemotron": {"head_dim": 8},
    "ministral3": {"head_dim": 6, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.3,
    }},
    "qwen3_next": {
        **DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12,
    },
    "qwen3_5_moe_text": {
        **DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12,
    },
    "qwen3_5_text": {**DELTA, "rope_parameters": {
        "rope_type": "default", "partial_rotary_factor": 0.67, "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    }},
    "granitemoehybrid": {
        "num_local_experts": 0, "layer_types": ["attention"] * 3, "shared_intermediate_size": 36,
        "position_embedding_type": "rope", "mamba_n_heads": 2, "mamba_d_state": 8,
    },
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "phi": {"partial_rotary_factor": 0.67},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.67},
    "granitemoeshared": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 12,
    },
    "hunyuan_v1_moe": {"head_dim": 6, "num_experts": 5, "moe_topk": 2},
    "exaone_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "sliding_window": 5, "first_k_dense_replace": 1,
    },
    "youtu": {
        "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 6,
        "v_head_dim": 6, "q_lora_rank": 10,
    },
    "ministral": {"head_dim": 6}, "nanochat": {"head_dim": 6},
    "olmo_hybrid": {**{k: v for k, v in DELTA.items() if k.startswith("l")}, "head_dim": 6},
    "solar_open": {
        "head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 16,
    },
    "afmoe": {
        "head_dim": 6, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "sliding_window": 5,
    },
    "granite_swa": {"sliding_window": 5, "layer_rope_theta": [0, 10000.0, 77.0]},
    "granitemoe_swa": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 12,
        "sliding_window": 5,
    },
    "muse_glimmer_text": {
        "head_dim": 6, "sliding_window": 5, "layer_rope_theta": [10000.0, 10000.0, 0],
        "final_logit_softcapping": 1.5, "output_multiplier": 4.0, "qk_scale_factor": 2.3,
        "post_norm_eps": 1e-2,
    },
    "gemma4_unified_text": {
        "head_dim": 6, "global_head_dim": 10, "sliding_window": 5, "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip
MAMBA_KEYS = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv",
    "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
    "rms_norm_eps", "hidden_act", "attention_bias", "position_embedding_type",
    "num_local_experts",
)  # fmt: skip
# Of models with images, the type of their text part.
TEXTS = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text",
    "mistral3": "ministral3",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "idefics3": "llama", "smolvlm": "llama", "llava": "mistral", "llava_next": "qwen2",
    "lfm2_vl": "lfm2", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text", "exaone4_5": "exaone4",
    "muse_glimmer": "muse_glimmer_text",
}  # fmt: skip
# Small image towers of those that transformers makes with one alone.
_TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2,
}  # fmt: skip
_QWEN = {**_TOWER, "out_hidden_size": 24, "deepstack_visual_indexes": [0]}
TOWERS = {
    "idefics3": _TOWER, "smolvlm": _TOWER,
    "llava": {"model_type": "clip_vision_model", **_TOWER},
    "llava_next": {"model_type": "clip_vision_model", **_TOWER},
    "lfm2_vl": {"model_type": "siglip2_vision_model", **_TOWER, "num_patches": 16},
    "qwen2_vl": {**_QWEN, "embed_dim": 24}, "qwen2_5_vl": _QWEN,
    "qwen3_vl": {**_QWEN, "num_position_embeddings": 16},
    "exaone4_5": {**_QWEN, "num_key_value_heads": 1, "fullatt_block_indexes": [0]},
    "qwen3_vl_moe": {**_QWEN, "num_position_embeddings": 16},
    "muse_glimmer": {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4},
}  # fmt: skip
# Sizes of theirs that are keys of the whole model.
PROJECTORS = {"muse_glimmer": {"out_hidden_size": 96, "projector_hidden_size": 24}}
GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
# Those whose text part is called otherwise by itself.
RENAMED = "gemma3", "gemma3n", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe"
TEXT = ["full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
LONG = {"rope_type": "longrope", **LISTS}
ROPES = [
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0, "rope_theta": 77.0},
    {"rope_type": "dynamic", "factor": 3.0}, YARN, {**YARN, "rope_theta": 77.0},
    {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 2.0},
    {**YARN, "attention_factor": 1.7}, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3},
    {k: v for k, v in YARN.items() if not k.startswith("original")},
    {k: v for k, v in YARN.items() if k != "factor"}, {**YARN, "factor": None},
    LLAMA3, {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
    LONG, {**LONG, "original_max_position_embeddings": 8},
    {**LONG, "original_max_position_embeddings": 8, "factor": 5.0},
    {**LONG, "original_max_position_embeddings": 8, "attention_factor": 1.4},
    {"type": "su", **LISTS, "original_max_position_embeddings": 8},
    {"rope_type": "default", "partial_rotary_factor": 0.67},
    {"rope_type": "default", "partial_rotary_factor": 0.34, "rope_theta": 77.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.67},
    {"rope_type": "default", "rope_theta": None}, {"rope_theta": 77.0}, {"rope_type": None}, {},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5}, {"rope_type": "mrope"},
    {"rope_type": "dynamic", "factor": 3.0, "alpha": 40.0}, {"type": "dynamic", "alpha": 7.0},
    {"rope_type": "linear", "factor": 3.0, "alpha": 40.0}, {**YARN, "llama_4_scaling_beta": 0.7},
    {"rope_type": "default", "llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 4},
    {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 77.0},
    {"rope_type": "default", "mrope_section": [3, 0, 0], "mrope_interleaved": False},
    {"rope_type": "default", "mrope_section": [1, 1]}, {**YARN, "mrope_section": [9, 9, 9]},
    {"full_attention": {"rope_type": "default", "rope_theta": 77.0}},
    {"sliding_attention": {"rope_type": "default", "rope_theta": 77.0}},
    {
        "full_attention": {**YARN, "truncate": False},
        "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
    },
    {"full_attention": YARN, "sliding_attention": None},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {}},
    {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 55.0},
        "sliding_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 33.0},
    },
]  # fmt: skip
ALIKE = [  # keys that take the same values
    (
        "hidden_act hidden_activation mlp_hidden_act mamba_hidden_act",
        [
            "silu",
            "swish",
            "gelu",
            "gelu_new",
            "gelu_fast",
            "gelu_pytorch_tanh",
            "relu",
            "relu2",
            "quick_gelu",
            "xielu",
            None,
        ],
    ),
    (
        "rms_norm_eps layer_norm_eps norm_epsilon norm_eps layernorm_epsilon layer_norm_epsilon",
        [0.3, 0, 1e-5],
    ),
    ("rope_theta rope_local_base_freq rotary_emb_base", [77.0, None, 1]),
    ("rope_parameters rope_scaling", [*ROPES, None]),
    ("partial_rotary_factor rotary_pct", [0.67, 0.34, 1.0, None]),
    (
        "tie_word_embeddings attention_bias mlp_bias use_bias bias use_qkv_bias qkv_bias"
        " qk_layernorm use_qk_norm use_parallel_residual use_sliding_window norm_topk_prob"
        " output_router_logits"
        " attention_k_eq_v use_double_wide_mlp enable_moe_block is_decoder is_causal use_mup"
        " add_cross_attention output_hidden_states output_attentions use_cache rope_interleaved"
        " is_encoder_decoder attention_out_bias conv_bias tie_embedding"
        " block_auto_adjust_ff_dim mamba_rms_norm mamba_norm_before_gate projectors_bias"
        " add_bias_linear use_shared_attention_adapter use_mem_rope use_long_context"
        " residual_in_fp32 rescale_prenorm_residual use_conv_bias moe_shared_expert_overlap",
        [True, False, None],
    ),
    (
        "attention_dropout resid_pdrop embd_pdrop hidden_dropout residual_dropout"
        " embedding_dropout router_jitter_noise",
        [0.2],
    ),
    ("attn_logit_softcapping final_logit_softcapping logit_softcapping", [0.7, 3, None]),
    (
        "ssm_in_multiplier ssm_out_multiplier key_multiplier attention_in_multiplier"
        " attention_out_multiplier lm_head_multiplier"
        " embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale"
        " initializer_range router_aux_loss_coef embed_scale clip_qkv",
        [0.6, 2.0],
    ),
    ("num_experts num_local_experts n_routed_experts", [3, 0]),
    ("attn_implementation _attn_implementation", ["sdpa"]),
    ("dtype torch_dtype", ["float16", "bfloat16"]),
]
VALUES = {key: values for keys, values in ALIKE for key in keys.split()} | {
    "head_dim": [6, 8, 10, None], "num_key_value_heads": [1, 4, None],
    "num_attention_heads": [2, 8], "num_hidden_layers": [1, 2],
    "max_position_embeddings": [8, 12, 48], "original_max_position_embeddings": [8, 100],
    "sliding_window": [5, 1, 100, None], "max_window_layers": [0, 1, 2, 9],
    "sliding_window_pattern": [1, 2, 3], "_sliding_window_pattern": [2],
    "layer_types": [TEXT[:1] * 3, TEXT[1:] * 3, [*TEXT, TEXT[0]], ["chunked_attention"] * 3,
        ["full_attention", "conv", "conv"], ["linear_attention"] * 3,
        ["full_attention", "linear_attention", "full_attention"], ["mamba", "attention", "mamba"],
        None],
    "query_pre_attn_scalar": [7, None], "no_rope_layer_interval": [2, 1],
    "no_rope_layers": [[0, 1, 1], [1, 1, 1], [], None], "num_experts_per_tok": [1, 3],
    "decoder_sparse_step": [2, 0], "mlp_only_layers": [[1], [-1]], "moe_intermediate_size": [20],
    "shared_expert_intermediate_size": [8], "pad_token_id": [0, 5], "bos_token_id": [1],
    "pretraining_tp": [2], "chunk_size_feed_forward": [2], "attention_chunk_size": [4],
    "dual_chunk_attention_config": [{"chunk_size": 4}], "hidden_size_per_layer_input": [8, 0, None],
    "vocab_size_per_layer_input": [400, 7], "num_kv_shared_layers": [0, 2, 3],
    "top_k_experts": [1, 4, 5, None],
    "global_head_dim": [8, None], "num_global_key_value_heads": [1, 2, None],
    "use_bidirectional_attention": [True, False, None, "vision", "all"],
    "per_layer_config": [
        {"1": {"head_dim": 8}, "2": {"head_dim": 8}}, {"1": {"head_dim": 8}}, {},
        {i: {"head_dim": 8, "num_key_value_heads": 4} for i in "12"},
    ],
    "architectures": [["Other"]], "embedding_size": [12], "shared_intermediate_size": [20],
    "swiglu_limit": [0.5, 7, None], "swiglu_alpha": [0.7, None],
    "moe_num_experts": [3], "moe_k": [1, 9], "moe_num_shared_experts": [0, 1],
    "moe_layer_start_index": [0, 2], "moe_layer_end_index": [1, -2], "moe_layer_interval": [2],
    "moe_norm_min": [0.8], "num_dense_layers": [0, 2], "use_expert_bias": [False],
    "routed_scaling_factor": [0.5], "n_group": [1, 2, 3, None], "topk_group": [1, 4],
    "kv_lora_rank": [8], "q_lora_rank": [None, 8], "qk_nope_head_dim": [8], "v_head_dim": [4, 12],
    "qk_rope_head_dim": [8], "rope_interleave": [False],
    "topk_method": ["group_limited_greedy", "x"],
    "mlp_layer_types": [["sparse", "dense", "sparse"], ["dense"]],
    "n_shared_experts": [2, 0], "first_k_dense_replace": [0, 2],
    "conv_L_cache": [1, 2, 5], "full_attn_idxs": [[0], [1, 2], [], None], "block_ff_dim": [30],
    "block_ffn_dim_multiplier": [0.5, None], "block_multiple_of": [7],
    "position_embedding_type": ["rope", "nope", None, "alibi"],
    "mamba_n_heads": [1, 6, 3], "mamba_d_head": ["auto", 12, None], "mamba_n_groups": [1, 3],
    "mamba_d_state": [16, 12], "mamba_d_conv": [1, 2, 5], "mamba_expand": [1, 3, None],
    "mamba_chunk_size": [3, 256], "mamba_conv_bias": [False, None],
    "mamba_proj_bias": [True, None], "attn_layer_indices": [[0, 2], [], None, [-1], [7]],
    "mamba_d_ssm": [48, 64, 1], "mlp_multipliers": [[0.7, 1.3], [1.0], None],
    "ssm_multipliers": [[1.3, 0.7, 1.6, 0.8, 1.2], [1.0] * 3, None],
    "mamba_num_heads": [6, 3], "mamba_head_dim": [16, 12], "n_groups": [1, 3],
    "ssm_state_size": [16, 12], "conv_kernel": [1, 2, 5], "expand": [1], "chunk_size": [3],
    "time_step_min": [0.7, 0], "time_step_max": [0.2], "time_step_floor": [0.7],
    "mamba_dt_min": [0.7, None], "mamba_dt_limit": [[0.4, 0.6]], "moe_latent_size": [12, None],
    "layers_block_type": [["moe", "attention"], ["mamba", "attention", "mlp"], ["dense"], [], None,
        ["mamba", "hybrid"], ["hybrid"] * 3],
    "hybrid_override_pattern": ["*E", "M|*", None], "moe_shared_expert_intermediate_size": [20, 0],
    "num_nextn_predict_layers": [1], "mtp_layers_block_type": [["moe"]],
    "use_mamba_kernels": [False], "n_mamba_heads": [1, 6, 7], "mamba_ngroups": [1],
    "mamba_headdim": [24, 12], "num_mem_blocks": [2, 3], "adapter_rank": [2],
    "attention_head_dim": [12, 8], "attention_hidden_size": [48, 24], "kv_channels": [3],
    "hybrid_layer_ids": [[0, 2], [0]],
    "time_step_limit": [[0.0, 0.5], [0.7, 1e9], [0.4, 0.6], [0.5], None],
    "full_attention_interval": [1, 2, 9], "linear_conv_kernel_dim": [1, 2, 5],
    "linear_num_key_heads": [1, 4, 3], "linear_num_value_heads": [2, 6],
    "altup_num_inputs": [2, 3, 1], "altup_active_idx": [1, 3, 7], "laurel_rank": [3],
    "altup_coef_clip": [None, 0.01], "altup_correct_scale": [False],
    "activation_sparsity_pattern": [[0.0, 0.9, 0.3], [0.5, 0.5], [0.5, 0.5, 1.0], 0.5, None],
    "layer_rope_theta": [[77.0, 0, 10000.0], [0, 0, 0], [77.0], [77.0, -1, 3], None],
    "global_attn_every_n_layers": [1, 2, 9, None], "num_shared_experts": [1, 3],
    "linear_allow_neg_eigval": [True, False, None], "route_scale": [0.5],
    "qk_scale_factor": [0.7], "output_multiplier": [0.5], "post_norm_eps": [0.3],
    "mup_enabled": [True, False, None],
    "linear_key_head_dim": [12, 24], "linear_value_head_dim": [3, 16], "mrope_section": [[1, 1, 1]],
}  # fmt: skip


def base(model_type):
    text = TEXTS.get(model_type, model_type)
    config = {"model_type": text, **BASE, **OWN.get(text, {})}
    if text == model_type:
        return config
    tower = {"vision_config": TOWERS[model_type]} if model_type in TOWERS else {}
    around = PROJECTORS.get(model_type, {})
    return {"model_type": model_type, "text_config": config, **around, **tower}


def changed(model_type, changes):
    config = base(model_type)
    inner = config.get("text_config", config)
    for key, value in changes.items():
        if value == ABSENT:
            inner.pop(key, None)
        else:
            inner[key] = value
    return json.loads(json.dumps(config))  # no part is shared


def singles(model_type):
    """Every key with every other value, and without it."""
    config = base(model_type).get("text_config", base(model_type))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type")
    for key in [*dict.fromkeys([*config, *VALUES])]:
        for value in VALUES.get(key, []):
            yield {key: value}
        if key in config and key not in sizes:
            yield {key: ABSENT}
    for window, types in itertools.product((5, None), VALUES["layer_types"]):
        yield {"sliding_window": window, "layer_types": types}
        yield {"sliding_window": window, "layer_types": types, "use_sliding_window": True}
    if model_type == "granitemoehybrid":  # all of whose layers have attention otherwise
        for key in MAMBA_KEYS:
            for value in VALUES[key]:
                yield {"layer_types": ["mamba", "attention", "mamba"], key: value}
    for interval in (1, 2, 9):
        yield {"layer_types": None, "full_attention_interval": interval}
    for rope in ROPES:  # of models that were stretched
        yield {"rope_parameters": rope, "original_max_position_embeddings": 12}
        yield {"rope_parameters": rope, "rope_theta": 50.0}
        yield {"rope_scaling": rope, "rope_theta": 50.0}
    yield {"rope_parameters": ROPES[0], "rope_scaling": ROPES[1]}


def several(model_type, count, random):
    """A few keys at once."""
    keys = list(VALUES)
    for _ in range(count):
        chosen = random.choice(len(keys), random.integers(2, 5), replace=False)
        options = [VALUES[keys[i]] for i in chosen]
        picked = [option[random.integers(len(option))] for option in options]
        yield dict(zip((keys[i] for i in chosen), picked, strict=True))
