"""Keys of config.json that several of the recorded models share."""

from seeded import VOCAB

WHOLE = {"intermediate_size": 104}
ODD = {
    "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WIDE = {"head_dim": 20}  # heads that do not divide the hidden size
LONG = {
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
}

TWO_SIZES = {**WIDE, "global_head_dim": 28, "sliding_window": 7, "final_logit_softcapping": 6.0}
MIXED = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
# Heads of a gated delta net: none of its sizes is another's, each head of keys has two of values.
DELTA = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
# Mamba 2's heads: none of its sizes is another's, each group has two heads.
MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_n_groups": 3, "mamba_d_state": 40,
    "mamba_d_conv": 3, "mamba_chunk_size": 16,
}  # fmt: skip
# As Nemotron 3 has them, with a layer of each kind.
NEMOTRON = {
    "head_dim": 20, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 6, "mamba_head_dim": 24, "n_groups": 3, "ssm_state_size": 40,
    "conv_kernel": 3, "chunk_size": 16, "time_step_min": 0.5, "layer_norm_epsilon": 1e-3,
    "moe_intermediate_size": 44, "moe_shared_expert_intermediate_size": 36,
}  # fmt: skip
# Narrow, since each hybrid layer multiplies what rounding changes: its block has no residual.
ZAMBA = {
    "hidden_size": 12, "intermediate_size": 20, "num_attention_heads": 2, "n_mamba_heads": 3,
    "mamba_ngroups": 3, "mamba_d_state": 8, "mamba_d_conv": 3, "chunk_size": 16,
    "time_step_min": 0.1, "rms_norm_eps": 1e-3, "adapter_rank": 3, "num_hidden_layers": 3,
}  # fmt: skip
GROUPED = {  # as DeepSeek-V3 has them
    "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 28, "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8, "v_head_dim": 18,
}  # fmt: skip

GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.11,
    "logits_scaling": 2.5, "num_key_value_heads": 3,
}  # fmt: skip


def rope(kind, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **keys}}
