"""What config.json files are refused, by name: what is not computed, and what cannot be."""

import time

import pytest
from families.small_configs import (
    G4,
    KINDS,
    LATENT,
    NEEDED,
    NO_SHARED,
    PLAIN,
    SIZES,
    read,
)

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import known_families
from qlora_wgpu.families.parts.config import longest_text

DENSE = NEEDED["granitemoehybrid"]
ALPHA = {"type": "dynamic", "alpha": 50.0}


REFUSED = {
    "kind of layer": ("granitemoehybrid", {**DENSE, "layer_types": ["conv"] * 4}, "layer_types"),
    "biases and a multiplier": (
        "granitemoehybrid",
        {
            **DENSE, **NEEDED["bamba"], "layer_types": ["mamba"] * 4, "mamba_proj_bias": True,
            "residual_multiplier": 0.5,
        },
        "residual_multiplier with mamba_proj_bias",
    ),
    "Mamba's state": (
        "bamba", {**NEEDED["bamba"], "mamba_d_state": 20}, "mamba_d_state 20 must be a multiple",
    ),
    "Mamba's largest state": (
        "bamba", {**NEEDED["bamba"], "mamba_d_state": 520}, "mamba_d_state must be at most 512",
    ),
    "Mamba's heads": ("bamba", {**NEEDED["bamba"], "mamba_d_head": 16}, "mamba_d_head 16 must be"),
    "Mamba's groups": (
        "bamba", {**NEEDED["bamba"], "mamba_n_groups": 3}, "multiple of mamba_n_groups 3",
    ),
    "layers of Nemotron-H": (
        "nemotron_h", {"layers_block_type": ["dense"]}, "layers_block_type must be a list of",
    ),
    "letters of Nemotron-H": (
        "nemotron_h", {**NEEDED["nemotron_h"], "layers_block_type": None,
                       "hybrid_override_pattern": "M|E"}, "hybrid_override_pattern must be a",
    ),
    "layers of Zamba 2": (
        "zamba2", {"layers_block_type": ["attention"]}, "must be a list of linear_attention and",
    ),
    "terms of Zamba 2's attention": (
        "zamba2", {**NEEDED["zamba2"], "use_shared_attention_adapter": True,
                   "num_key_value_heads": 2}, "requires heads of queries, and of keys",
    ),
    "Zamba 2's hybrid layers": (
        "zamba2", {**NEEDED["zamba2"], "hybrid_layer_ids": [1]}, "hybrid_layer_ids must be",
    ),
    "Mamba's activation": ("bamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "time steps": (
        "bamba", {**NEEDED["bamba"], "time_step_limit": [2.0, 1.0]}, "time_step_limit must be two",
    ),
    "attending layers": (
        "bamba", {**NEEDED["bamba"], "attn_layer_indices": "1"}, "attn_layer_indices must be",
    ),
    "random experts": ("phimoe", {}, "samples experts at random"),
    "no text": ("mistral3", {}, "text_config"),
    "other text": (
        "mistral3", {"text_config": {**SIZES, "model_type": "mistral4"}}, "'mistral4'",
    ),
    "alpha": (
        "hunyuan_v1_dense", {"rope_scaling": {"type": "linear", "alpha": 2.0}}, "alpha 2.0 must",
    ),
    "alpha of one pair": (
        "hunyuan_v1_dense", {"head_dim": 2, "rope_scaling": ALPHA}, "more than one pair",
    ),
    "alpha without a base": (
        "hunyuan_v1_dense", {"rope_theta": "x", "rope_scaling": ALPHA}, "rope_theta must be a pos",
    ),
    "growth": ("ministral3", {"rope_parameters": {"type": "default"}}, "llama_4_scaling_beta"),
    "one text": ("qwen3_5", {}, "requires a text_config .text only: 'qwen3_5_text'"),
    "delta heads": (
        "qwen3_5_text", {"linear_num_value_heads": 24}, "24 must be a multiple of linear_num",
    ),
    "delta sizes": (
        "qwen3_next", {"linear_value_head_dim": 20}, "value_head_dim 20 must be a multiple of 8",
    ),
    "delta keys": (
        "qwen3_5_text", {"linear_key_head_dim": 520}, "must be at most 512, got 520",
    ),
    "delta kinds": (
        "qwen3_5_text", {"layer_types": ["linear_attention", "conv"] * 2}, "layer_types must name",
    ),
    "delta gate": ("qwen3_5_moe_text", {"output_gate_type": "sigmoid"}, "output_gate_type"),
    "no gate": ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = False"),
    "delta activation": ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "sections": (
        "qwen3_5_text", {"rope_parameters": {"mrope_section": [11, 11]}}, "must be a list of 3",
    ),
    "interleaved": (
        "qwen3_5_text", {"rope_parameters": {"mrope_interleaved": 1}}, "mrope_interleaved must be",
    ),
    "sections of others": (
        "qwen3_next", {"rope_parameters": {"mrope_section": [11, 11, 10]}}, "mrope_section",
    ),
    "rope type": ("llama", {"rope_scaling": {"rope_type": "mrope"}}, "mrope"),
    "rope key": ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "x"),
    "activation": ("qwen3", {"hidden_act": "mish"}, "hidden_act"),
    "dropout": ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
    "both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    "layer types": ("qwen2", {"use_sliding_window": True, "layer_types": ["x"] * 4}, "layer_types"),
    "few layer types": ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
    "window": ("mistral", {"sliding_window": 0}, "sliding_window"),
    "rotated layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    "softcap": ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    "divisor": ("granite", {"logits_scaling": 0}, "logits_scaling"),
    "factors": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "short_factor must have 6",
    ),
    "partial": ("stablelm", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    "images": ("gemma3", {}, "text_config"),
    "no text of Idefics": ("idefics3", {}, "'idefics3' needs a text_config"),
    "an unknown text": ("llava", {"text_config": {**SIZES, "model_type": "bloom"}}, "'bloom'"),
    "a model in itself": ("llava", {"text_config": {"model_type": "llava"}}, "'llava'"),
    "what is no name": ("smolvlm", {"text_config": {"model_type": ["llama"]}}, "not supported"),
    "images and sound": ("gemma4", {}, "text_config"),
    "streams": ("gemma3n_text", {**NO_SHARED, "altup_num_inputs": 9}, "from 2 to 8, and altup_act"),
    "stream": ("gemma3n_text", {**NO_SHARED, "altup_active_idx": 4}, "less, got 4 and 4"),
    "sparse": (
        "gemma3n_text", {**NO_SHARED, "activation_sparsity_pattern": [0.5, 1.0, 0.0, 0.0]},
        "from 0 to below 1 for each of the 4 layers",
    ),
    "sizes": ("gemma3n_text", {**NO_SHARED, "intermediate_size": [8, 8]}, "4 layers, got 2"),
    "odd": ("gemma3n_text", {**NO_SHARED, "hidden_size_per_layer_input": 5}, "5 must be even"),
    "all both ways": ("gemma4_text", {"use_bidirectional_attention": "all"}, "bidirectional"),
    "all shared": ("gemma4_text", {**G4, "num_kv_shared_layers": 4}, "num_kv_shared_layers must"),
    "no source": ("gemma4_text", {**G4, "num_kv_shared_layers": 3}, "no layer of type full_att"),
    "odd inputs": ("gemma4_text", {**G4, "hidden_size_per_layer_input": 5}, "5 must be even"),
    "rows": ("gemma4_text", {**G4, "vocab_size_per_layer_input": 9}, "9 at least vocab_size 331"),
    "heads": ("gemma4_text", {**G4, "global_head_dim": None}, "global_head_dim must not be null"),
    "few heads": ("gemma4_text", {**G4, "per_layer_config": {}}, "per_layer_config must have an"),
    "other heads": (
        "gemma4_text", {**G4, "per_layer_config": {"3": {"sliding_window": 7}}}, "same head_dim",
    ),
    "no base": ("gemma4_text", {**G4, "rope_parameters": {}}, "sliding_attention with a rope"),
    "scaling": ("gemma4_text", {**G4, "rope_scaling": None}, "rope_scaling is not supported"),
    "experts of Gemma 4": (
        "gemma4_text",
        {
            **PLAIN, "enable_moe_block": True, "num_experts": 2, "top_k_experts": 3,
            "moe_intermediate_size": 8,
        },
        "top_k_experts 3 exceeds num_experts 2",
    ),
    "no experts": ("gemma4_text", {**PLAIN, "enable_moe_block": True}, "num_experts must be"),
    "stretched": (
        "gemma4_text",
        {**G4, "rope_parameters": {k: {"rope_type": "yarn", "rope_theta": 9.0} for k in KINDS}},
        "'default' or 'proportional'",
    ),
    "model type": ("deepseek_v4", {}, "deepseek_v4"),
    "list of topk": (
        "hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [1, 2]}, "moe_topk must have a positive",
    ),
    "kinds of MLPs": ("exaone_moe", {"mlp_layer_types": ["thin"] * 4}, "mlp_layer_types must be"),
    "experts": ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3"),
    "balance": ("glm4_moe", {"output_router_logits": True}, "output_router_logits"),
    "slides or not": (
        "qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is not true",
    ),
    "one rotation": ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "are ambiguous"),
    "one scaling": ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "are ambiguous"),
    "two readings": ("olmo3", {"rope_theta": 1e4}, "rope_theta .* are ambiguous"),
    "no such activation": ("gemma2", {"hidden_activation": "mish"}, "hidden_activation"),
    "two numbers": (
        "ernie4_5_moe", {"moe_num_experts": 9, "num_experts": 8}, "mean the same, but differ",
    ),
    "head's bias": ("ernie4_5_moe", {"use_bias": True}, "lm_head would have a bias"),
    "last layer": ("ernie4_5_moe", {"moe_layer_end_index": "x"}, "moe_layer_end_index must be"),
    "groups": ("glm4_moe", {"n_group": 3}, "n_group 3 and topk_group 1 do not fit 8 of 128"),
    "few in groups": (
        "glm4_moe", {"n_routed_experts": 8, "n_group": 4, "num_experts_per_tok": 3}, "fit 3 of 8",
    ),
    "shared keys": (
        "deepseek_v3", {"num_key_value_heads": 3}, "num_attention_heads 6 .* got 3",
    ),
    "long values": ("deepseek_v3", {**LATENT, "v_head_dim": 1025}, "must be at most 1,024"),
    "normalized": (
        "deepseek_v2", {**NEEDED["deepseek_v2"], "norm_topk_prob": True}, "norm_topk_prob = True",
    ),
    "MLPs' kinds": (
        "glm4_moe_lite", {**LATENT, "v_head_dim": 99, "mlp_layer_types": ["dense"]},
        "mlp_layer_types must name",
    ),
    "part of a part": (
        "deepseek_v3", {"num_key_value_heads": 6, "partial_rotary_factor": 0.5},
        "partial_rotary_factor = 0.5",
    ),
    "clipped to nothing, densely": ("olmo", {"clip_qkv": 0}, "clip_qkv must be a positive number"),
    "clipped to nothing": ("olmoe", {"clip_qkv": 0}, "clip_qkv must be a positive number or"),
    "parts of heads": ("gpt_neox", {"num_attention_heads": 7}, "72 must be a multiple of num_att"),
    "heads by their own size": ("gpt_neox", {"head_dim": 8}, r"head_dim = 8 .*None, 12"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_not_computed_is_refused_by_name(case):
    model_type, changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        read(model_type, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 256, got 1000000000"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers must be at most 256, got 1000"),
        ({"head_dim": 10**9}, "head_dim must be at most 1,024, got 1000000000"),
        ({"num_attention_heads": 10**6, "num_key_value_heads": 1}, "must be at most 4,096"),
        (
            {"hidden_size": 2**20, "vocab_size": 2**20, "head_dim": 64},
            "1,099,511,627,776 elements is not supported",
        ),
        ({"vocab_size": 2**40}, "vocab_size must be at most 4,294,967,296, got 1099511627776"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be finite"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps must be finite"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"hidden_act": ["x" * 10**6]}, "hidden_act = \\['xxx"),
        ({"model_type": "x" * 10**6}, "model_type 'xxx.* is not supported"),
    ],
)
def test_what_is_far_too_large(changes, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read(**{"model_type": "llama", **changes})
    assert len(str(caught.value).replace(", ".join(known_families()), "")) < 400


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"layer_types": [["full_attention"]] * 4}),
        ("smollm3", {"no_rope_layers": [[]] * 4}),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6,
                                   "long_factor": [1.0] * 6},
                  "original_max_position_embeddings": 1}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1}),
        ("qwen3_moe", {"num_experts": 4096, "num_hidden_layers": 100}),
    ],
)  # fmt: skip
def test_values_that_were_tracebacks_or_gigabytes(model_type, changes):
    with pytest.raises(UnsupportedModelError):
        read(model_type, **changes)


@pytest.mark.slow
def test_many_layers_without_experts_are_read_soon():
    begin = time.process_time()
    read("qwen3_moe", mlp_only_layers=list(range(10**6)), num_hidden_layers=200)
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize("positions", ["x", 0, -1, 2.5, True, [8]])
@pytest.mark.parametrize("nested", [False, True])
def test_the_longest_text_is_a_positive_integer(positions, nested):
    config = {"max_position_embeddings": positions}
    with pytest.raises(UnsupportedModelError, match="max_position_embeddings must be a positive"):
        longest_text({"text_config": config} if nested else config)


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": None}])
def test_no_longest_text_is_told(config):
    assert longest_text(config) is None
