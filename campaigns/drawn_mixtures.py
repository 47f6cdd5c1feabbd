"""config.json of families that have mixtures, or whose layers have states, drawn at random."""

from __future__ import annotations

import random

from campaigns.drawn_parts import (
    FULL,
    SLIDING,
    Config,
    balanced,
    experts,
    flag,
    groups,
    partial,
    rope,
    windowed,
)


def delta(rng: random.Random, c: Config) -> None:
    c["head_dim"] = rng.choice((24, 40, 64, 128))
    share = rng.choice((0.25, 0.5, 1.0))
    c |= rope(rng, int(share * c["head_dim"]), "default")
    c["rope_parameters"]["partial_rotary_factor"] = share
    if "qwen3_5" in c["model_type"]:
        pairs = int(share * c["head_dim"]) // 2
        third = pairs // 3
        c["rope_parameters"] |= {
            "mrope_section": [pairs - 2 * third, third, third], "mrope_interleaved": True,
        }  # fmt: skip
    keys = rng.choice((1, 2, 3))
    c |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice((1, 2, 3))}
    c["linear_key_head_dim"] = rng.choice((8, 16, 24, 64, 128))
    c["linear_value_head_dim"] = rng.choice((8, 16, 24, 40, 128))
    c["linear_conv_kernel_dim"] = rng.choice((1, 2, 4, 5))
    c["layer_types"] = [
        rng.choice(("linear_attention", "linear_attention", FULL))
        for _ in range(c["num_hidden_layers"])
    ]
    c["attention_bias"] = flag(rng)
    if "moe" in c["model_type"] or c["model_type"] == "qwen3_next":
        experts(rng, c, "num_experts", "num_experts_per_tok")
        c["shared_expert_intermediate_size"] = rng.choice((33, 52))
        balanced(rng, c)
    if c["model_type"] == "qwen3_next":
        c["norm_topk_prob"] = flag(rng)
        c["mlp_only_layers"] = [i for i in range(c["num_hidden_layers"]) if rng.random() < 0.3]


def latent(rng: random.Random, c: Config) -> None:
    c["num_key_value_heads"] = c["num_attention_heads"]
    c.pop("head_dim")
    c["qk_rope_head_dim"] = rng.choice((4, 8, 10, 24, 64))
    c["qk_nope_head_dim"] = rng.choice((6, 7, 14, 20, 40, 128))
    c["v_head_dim"] = rng.choice((4, 6, 18, 21, 24, 50, 64, 128))
    c |= {"kv_lora_rank": rng.choice((12, 28, 75)), "q_lora_rank": rng.choice((None, 10, 36, 75))}
    c |= rope(rng, c["qk_rope_head_dim"], "default yarn")
    c["rope_interleave"] = flag(rng)
    c["attention_bias"] = flag(rng)
    if c["model_type"] == "deepseek_v2":
        c["hidden_size"] = c["num_attention_heads"] * rng.choice((12, 20, 36))
        c["kv_lora_rank"] += c["kv_lora_rank"] % 2
        c["qk_nope_head_dim"] += c["qk_nope_head_dim"] % 2  # transformers' own takes no odd ones
        c["mlp_bias"] = flag(rng)
        c["rope_parameters"].pop("mscale", None)
        c["rope_parameters"].pop("mscale_all_dim", None)
    _deepseek_experts(rng, c)
    if c["model_type"] == "deepseek_v2":
        c["topk_method"] = rng.choice(("greedy", "group_limited_greedy"))
        c["norm_topk_prob"] = False


def _deepseek_experts(rng: random.Random, c: Config) -> None:
    experts(rng, c, "n_routed_experts", "num_experts_per_tok")
    groups(rng, c, "n_routed_experts")
    c |= {"n_shared_experts": rng.choice((1, 2, 3)), "first_k_dense_replace": rng.randrange(3)}
    c |= {"routed_scaling_factor": rng.choice((1.0, 1.7)), "norm_topk_prob": flag(rng)}


def glm4_moe(rng: random.Random, c: Config) -> None:
    partial(rng, c)
    c["use_qk_norm"] = flag(rng)
    _deepseek_experts(rng, c)


def mixture(rng: random.Random, c: Config) -> None:
    """Mixtral, Qwen's and OLMoE."""
    own = {"mixtral": "num_local_experts"}
    experts(rng, c, own.get(c["model_type"], "num_experts"), "num_experts_per_tok")
    c |= rope(rng, c["head_dim"])
    balanced(rng, c)
    layers = c["num_hidden_layers"]
    if c["model_type"] == "mixtral":
        c["sliding_window"] = rng.choice((None, 7, 33))
    if c["model_type"] == "olmoe":
        c |= {"clip_qkv": rng.choice((None, 1.5)), "attention_bias": flag(rng)}
        c["head_dim"] = rng.choice((20, 24, 36, 40))
        c["hidden_size"] = c["num_attention_heads"] * c["head_dim"]
        if c["num_experts"] >= 33:
            c["intermediate_size"] = 33
    if c["model_type"].startswith("qwen"):
        c |= {"norm_topk_prob": flag(rng), "qkv_bias": flag(rng)}
        c["mlp_only_layers"] = [i for i in range(layers) if rng.random() < 0.3]
        c["shared_expert_intermediate_size"] = rng.choice((33, 52))
        c["use_sliding_window"], c["sliding_window"] = flag(rng), rng.choice((7, 33))


def ernie_moe(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    experts(rng, c, "moe_num_experts", "moe_k")
    c["moe_num_shared_experts"] = rng.choice((0, 1, 2))
    if flag(rng):
        c |= {"moe_layer_start_index": rng.randrange(3), "moe_layer_interval": rng.choice((1, 2))}
    else:
        c["moe_layer_start_index"] = 0
        balanced(rng, c)  # which transformers does for no model without experts


def gpt_oss(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    windowed(rng, c)
    experts(rng, c, "num_local_experts", "num_experts_per_tok", size=None)
    c |= {"swiglu_limit": rng.choice((1.5, 7.0)), "attention_bias": flag(rng)}
    balanced(rng, c)


def gemma4(rng: random.Random, c: Config) -> None:
    layers = c["num_hidden_layers"] = rng.choice((2, 3, 4, 5))
    c["sliding_window"] = rng.choice((1, 7, 16, 33, 300))
    kinds = [rng.choice((SLIDING, FULL)) for _ in range(layers)]
    c["layer_types"] = [*kinds[:-1], FULL]
    c["global_head_dim"] = rng.choice((20, 28, 64, 96, 256))
    c["final_logit_softcapping"] = rng.choice((None, 6.0))
    c["attention_bias"] = flag(rng)
    c["attention_k_eq_v"] = flag(rng)
    c["num_global_key_value_heads"] = rng.choice((None, 1, c["num_key_value_heads"]))
    c["rope_parameters"] = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {
            "rope_type": "proportional", "rope_theta": 1e6,
            "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0)),
        },
    }  # fmt: skip
    c["num_kv_shared_layers"] = rng.choice((0, 0, 1, 2)) if layers > 2 else 0
    if c["num_kv_shared_layers"]:
        c["use_double_wide_mlp"] = flag(rng)
    if c["model_type"] == "gemma4_unified_text":
        return
    c["hidden_size_per_layer_input"] = rng.choice((0, 10, 24))
    c["vocab_size_per_layer_input"] = c["vocab_size"] + rng.choice((0, 5))
    if flag(rng):
        c["enable_moe_block"] = True
        experts(rng, c, "num_experts", "top_k_experts")


def lfm(rng: random.Random, c: Config) -> None:
    c["hidden_size"] = rng.choice((24, 40, 72, 136, 200))
    if flag(rng):  # as the published files
        c["hidden_size"] = c["num_attention_heads"] * 24
        c.pop("head_dim")
    c |= rope(rng, c.get("head_dim", 24), "default linear yarn")
    c |= {"conv_bias": flag(rng), "conv_L_cache": rng.choice((1, 2, 3, 4, 7)), "norm_eps": 1e-3}
    c["layer_types"] = [rng.choice(("conv", FULL)) for _ in range(c["num_hidden_layers"])]
    if c["model_type"] == "lfm2":
        c |= {"block_multiple_of": rng.choice((9, 16)), "block_auto_adjust_ff_dim": flag(rng)}
        return
    experts(rng, c, "num_experts", "num_experts_per_tok")
    c |= {"num_dense_layers": rng.randrange(3), "routed_scaling_factor": rng.choice((1.0, 1.7))}
    c |= {"use_expert_bias": flag(rng), "norm_topk_prob": flag(rng)}


def hunyuan(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"], "default dynamic linear")
    if c["rope_parameters"]["rope_type"] == "dynamic" and flag(rng):
        c["rope_parameters"] |= {"alpha": 50.0, "factor": 1.0}
    if "moe" in c["model_type"]:
        experts(rng, c, "num_experts", "moe_topk", size=None)
    else:
        c["attention_bias"] = flag(rng)
