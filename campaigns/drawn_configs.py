"""config.json of every family, of sizes and kinds that are drawn at random: small and odd ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


def flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


def rope(rng: random.Random, rotary_dim: int, kinds: str = "") -> Config:
    """``rope_parameters`` of some kind, the rotated elements of a head so many."""
    kinds = kinds or "default default default linear llama3 yarn yarn dynamic longrope"
    kind = rng.choice(kinds.split())
    theta = rng.choice((77.0, 10_000.0, 1e6))
    original = rng.choice((16, 32, 60))
    values: Config = {"rope_type": kind, "rope_theta": theta}
    if kind in ("linear", "dynamic"):
        values["factor"] = rng.choice((1.5, 3.0))
    if kind == "llama3":
        values |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        values["original_max_position_embeddings"] = original
    if kind == "yarn":
        values |= {"factor": 4.0, "original_max_position_embeddings": original}
        if flag(rng):
            values |= {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": flag(rng)}
        if flag(rng):
            values |= {"mscale": 0.7, "mscale_all_dim": rng.choice((0.3, 0.7, 1.0))}
    if kind == "longrope":
        pairs = range(rotary_dim // 2)
        values["short_factor"] = [1.0 + 0.1 * i for i in pairs]
        values["long_factor"] = [1.0 + 0.7 * i for i in pairs]
        values["original_max_position_embeddings"] = original
    return {"rope_parameters": values}


def windowed(rng: random.Random, c: Config) -> None:
    c["sliding_window"] = rng.choice((1, 3, 7, 16, 33, 64, 300))
    c["layer_types"] = [rng.choice((SLIDING, FULL)) for _ in range(c["num_hidden_layers"])]


def experts(
    rng: random.Random, c: Config, count: str, top: str, size: str | None = "moe_intermediate_size"
) -> None:
    number = rng.choice((1, 2, 3, 5, 8, 12, 33)) if rng.random() < 0.97 else 300
    c[count], c[top] = number, rng.choice((1, min(2, number), number, rng.randint(1, number)))
    if size is not None:
        c[size] = rng.choice((12, 28, 33, 72))
    if number >= 33:
        c["num_hidden_layers"] = min(c["num_hidden_layers"], 2)
        for key in ("layer_types", "no_rope_layers"):
            if key in c:
                c[key] = c[key][-2:]
        if size is None:
            c["intermediate_size"] = 33


def groups(rng: random.Random, c: Config, count: str) -> None:
    """Groups that divide the experts, of two at least, and hold as many as are chosen."""
    number = c[count] = max(c[count], 2)  # transformers ranks a group by its two best
    groups = rng.choice([n for n in range(1, min(number // 2, 32) + 1) if number % n == 0])
    c["n_group"], c["topk_group"] = groups, rng.randint(1, groups)
    c["num_experts_per_tok"] = min(c["num_experts_per_tok"], number // groups * c["topk_group"])


def balanced(rng: random.Random, c: Config) -> None:
    if flag(rng):
        c |= {"output_router_logits": True, "router_aux_loss_coef": 0.7}


def partial(rng: random.Random, c: Config) -> None:
    share = rng.choice((0.25, 0.5, 0.75, 1.0))
    if int(share * c["head_dim"]) % 2:
        share = 1.0
    c |= rope(rng, int(share * c["head_dim"]), "default default linear yarn")
    c["rope_parameters"]["partial_rotary_factor"] = share
    c["attention_bias"] = flag(rng)


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


def gemma3n(rng: random.Random, c: Config) -> None:
    layers = c["num_hidden_layers"] = rng.choice((2, 3, 4, 5))
    c["hidden_size"] = c["num_attention_heads"] * rng.choice((12, 20, 36))
    windowed(rng, c)
    shared = rng.choice((0, 0, 1)) if layers > 2 else 0
    if shared:  # a layer of each kind keeps its keys and values
        c["layer_types"] = [SLIDING, FULL, *c["layer_types"][2:]]
    streams = rng.choice((2, 3, 4, 4, 8))
    c |= {
        "num_kv_shared_layers": shared, "altup_num_inputs": streams,
        "altup_active_idx": rng.choice((0, 0, streams - 1)),
        "laurel_rank": rng.choice((3, 8, 20)), "attention_bias": flag(rng),
        "activation_sparsity_pattern": [rng.choice((0.0, 0.3, 0.95)) for _ in range(layers)],
        "hidden_size_per_layer_input": rng.choice((2, 10, 24)),
        "vocab_size_per_layer_input": c["vocab_size"] + rng.choice((-7, 0, 5)),
        "final_logit_softcapping": rng.choice((30.0, 6.0)),
    }  # fmt: skip
    if flag(rng):
        sizes = c["intermediate_size"], c["intermediate_size"] + 8
        c["intermediate_size"] = [rng.choice(sizes) for _ in range(layers)]


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


def _nanochat(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    c["attention_bias"] = flag(rng)
    c["final_logit_softcapping"] = rng.choice((None, 6.0, 15.0))


def _ministral_8b(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    windowed(rng, c)


def _youtu(rng: random.Random, c: Config) -> None:
    latent(rng, c)
    for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"):
        c.pop(key)


def _solar(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    c["attention_bias"] = flag(rng)
    _deepseek_experts(rng, c)


def _afmoe(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    windowed(rng, c)
    experts(rng, c, "num_experts", "num_experts_per_tok")
    c |= {"num_shared_experts": rng.choice((1, 2)), "num_dense_layers": rng.randrange(3)}
    c |= {"route_scale": rng.choice((1.0, 1.7)), "mup_enabled": flag(rng)}
    c["attention_bias"] = flag(rng)


def _granite_windows(rng: random.Random, c: Config) -> None:
    mixture = c["model_type"] == "granitemoe_swa"
    (_granite_mixture if mixture else _granite)(rng, c)
    c["attention_bias"] = False
    windowed(rng, c)
    if flag(rng):
        thetas = [rng.choice((0, 77.0, 10_000.0)) for _ in range(c["num_hidden_layers"])]
        c["layer_rope_theta"] = thetas


def _olmo_hybrid(rng: random.Random, c: Config) -> None:
    delta(rng, c)
    c |= rope(rng, c["head_dim"], "default linear yarn")
    c["attention_bias"] = flag(rng)
    c["linear_allow_neg_eigval"] = flag(rng)
    c["num_hidden_layers"] = 3
    c["layer_types"] = ["linear_attention", FULL, "linear_attention"]


HEAD_DIMS = (8, 20, 22, 24, 36, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 576)
LONGEST = 256


def drawn_config(rng: random.Random, model_type: str) -> Config:
    """A config.json; some are refused."""
    heads = rng.choice((1, 2, 3, 4, 6))
    layers = rng.choice((1, 2, 2, 3, 4))
    config: Config = {
        "model_type": model_type,
        "vocab_size": rng.choice((17, 131, 193, 331, 517)) if rng.random() < 0.97 else 65_537,
        "hidden_size": rng.choice((24, 40, 72, 72, 136, 136, 200, 50)),
        "intermediate_size": rng.choice((33, 75, 100, 137, 211)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rng.choice(HEAD_DIMS[:8] if rng.random() < 0.6 else HEAD_DIMS),
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "tie_word_embeddings": rng.random() < 0.4,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    FAMILIES[model_type](rng, config)
    if len(config.get("mlp_only_layers", ())) >= config["num_hidden_layers"]:
        config["mlp_only_layers"] = []  # transformers balances no model without experts
    return config


def _plain(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    c["attention_bias"] = flag(rng)
    c["mlp_bias"] = flag(rng)


def _upper_windows(rng: random.Random, c: Config) -> None:
    _plain(rng, c)
    if flag(rng):
        c |= {"use_sliding_window": True, "sliding_window": rng.choice((1, 7, 33))}
        c["max_window_layers"] = rng.randrange(c["num_hidden_layers"] + 1)


def _mistral(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    c["sliding_window"] = rng.choice((None, 1, 7, 33, 100))


def _ministral(rng: random.Random, c: Config) -> None:
    _mistral(rng, c)
    c |= rope(rng, c["head_dim"], "yarn")
    c["rope_parameters"]["llama_4_scaling_beta"] = rng.choice((0.1, 0.7))


def _smollm(rng: random.Random, c: Config) -> None:
    _plain(rng, c)
    c["no_rope_layers"] = [rng.randrange(2) for _ in range(c["num_hidden_layers"])]
    if flag(rng):
        c |= {"use_sliding_window": True, "sliding_window": rng.choice((3, 16))}
        c["layer_types"] = [rng.choice((SLIDING, FULL)) for _ in range(c["num_hidden_layers"])]


def _granite(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    c["attention_bias"] = flag(rng)
    c |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.11}
    if c["attention_bias"] and c["model_type"] == "granite":
        c["residual_multiplier"] = 1.0  # another one is refused beside biases
    c["logits_scaling"] = 2.5


def mamba(rng: random.Random, c: Config) -> None:
    """Mamba 2's heads, whose size times their number is a multiple of the hidden size."""
    c["hidden_size"] = rng.choice((24, 40, 72, 96))
    heads, c["mamba_expand"] = rng.choice((1, 2, 4)), rng.choice((2, 4))
    if c["mamba_expand"] * c["hidden_size"] // heads % 8:
        heads = 1
    c |= {"mamba_n_heads": heads, "mamba_d_head": c["mamba_expand"] * c["hidden_size"] // heads}
    c["mamba_n_groups"] = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
    c |= {"mamba_d_state": rng.choice((8, 16, 40, 128)), "mamba_d_conv": rng.choice((1, 2, 4, 5))}
    c["mamba_conv_bias"] = flag(rng)
    c["time_step_limit"] = rng.choice(([0.0, 1e9], [0.4, 1.3]))


def _bamba(rng: random.Random, c: Config) -> None:
    mamba(rng, c)
    c["head_dim"] = rng.choice((4, 8, 20, 64))
    c |= {"mamba_proj_bias": flag(rng), "mlp_bias": flag(rng), "attention_bias": flag(rng)}
    c["attn_layer_indices"] = [i for i in range(c["num_hidden_layers"]) if flag(rng)]


def _falcon(rng: random.Random, c: Config) -> None:
    mamba(rng, c)
    c |= rope(rng, c["head_dim"])
    c |= {"mamba_d_ssm": c["mamba_n_heads"] * c["mamba_d_head"], "mamba_rms_norm": flag(rng)}
    c |= {"mamba_norm_before_gate": flag(rng), "key_multiplier": rng.choice((1.0, 0.4))}
    c["ssm_multipliers"] = [rng.choice((0.6, 1.0, 1.7)) for _ in range(5)]
    factor = 1.0
    if flag(rng):
        c |= {"projectors_bias": True, "mlp_bias": True, "attention_bias": True}
    else:
        factor = 0.8
    c |= {
        "ssm_in_multiplier": factor,
        "ssm_out_multiplier": factor,
        "attention_in_multiplier": factor,
    }
    c |= {"attention_out_multiplier": factor, "mlp_multipliers": [factor, 1.0 / factor]}
    c |= {"embedding_multiplier": rng.choice((1.0, 2.5)), "lm_head_multiplier": 0.7}


def _granite_mixture(rng: random.Random, c: Config) -> None:
    _granite(rng, c)
    experts(rng, c, "num_local_experts", "num_experts_per_tok", size=None)
    c["shared_intermediate_size"] = rng.choice((33, 52))
    balanced(rng, c)
    c["attention_bias"] = False


def _granite_hybrid(rng: random.Random, c: Config) -> None:
    _granite_mixture(rng, c)
    mamba(rng, c)
    c["layer_types"] = [rng.choice(("mamba", "attention")) for _ in range(c["num_hidden_layers"])]
    c["position_embedding_type"] = rng.choice(("rope", "nope", None))
    if flag(rng):
        c["num_local_experts"] = 0
        c.pop("num_experts_per_tok")
        c.pop("output_router_logits", None)


def _gemma(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"], "default linear llama3")
    c["attention_bias"] = flag(rng)


def _gemma2(rng: random.Random, c: Config) -> None:
    _gemma(rng, c)
    windowed(rng, c)
    c["attn_logit_softcapping"] = rng.choice((None, 3.0, 50.0))
    c["final_logit_softcapping"] = rng.choice((None, 6.0, 30.0))
    c["query_pre_attn_scalar"] = rng.choice((17, 144))


def _gemma3(rng: random.Random, c: Config) -> None:
    _gemma2(rng, c)
    c.pop("attn_logit_softcapping")
    c["rope_parameters"] = {
        FULL: rope(rng, c["head_dim"], "default linear yarn")["rope_parameters"],
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    }


def _olmo(rng: random.Random, c: Config) -> None:
    _plain(rng, c)
    c["clip_qkv"] = rng.choice((None, 0.6, 2.0))


def _olmo3(rng: random.Random, c: Config) -> None:
    windowed(rng, c)
    c["attention_bias"] = flag(rng)
    c["rope_parameters"] = {
        FULL: rope(rng, c["head_dim"], "default linear yarn")["rope_parameters"],
        SLIDING: {"rope_type": "default", "rope_theta": 20_000.0},
    }


def _stablelm(rng: random.Random, c: Config) -> None:
    c.pop("head_dim")
    c["hidden_size"] = c["num_attention_heads"] * rng.choice((16, 24, 40, 64))
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    share = rng.choice((0.25, 0.5, 1.0))
    c |= rope(rng, int(head_dim * share), "default")
    c["rope_parameters"]["partial_rotary_factor"] = share
    c |= {"use_qkv_bias": flag(rng), "qk_layernorm": flag(rng)}
    c |= {"use_parallel_residual": flag(rng), "layer_norm_eps": 1e-3}


def _neox(rng: random.Random, c: Config) -> None:
    _stablelm(rng, c)
    c |= {"attention_bias": flag(rng), "hidden_act": rng.choice(("gelu", "gelu_fast", "silu"))}


def _phi_2(rng: random.Random, c: Config) -> None:
    partial(rng, c)
    c |= {"qk_layernorm": flag(rng), "layer_norm_eps": 1e-3}
    c["hidden_act"] = rng.choice(("gelu_new", "gelu"))
    if c["qk_layernorm"]:  # whose weights are counted by this division
        c["hidden_size"] = c["num_attention_heads"] * c.pop("head_dim")


def _starcoder(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"], "default linear yarn")
    c |= {"sliding_window": rng.choice((None, 7, 33)), "use_bias": flag(rng)}
    c["hidden_act"] = rng.choice(("gelu", "gelu_pytorch_tanh"))
    c |= {"residual_dropout": 0.0, "embedding_dropout": 0.0, "norm_epsilon": 1e-4}


def _cohere(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"], "default linear dynamic")
    c |= {"logit_scale": 0.3, "attention_bias": flag(rng), "layer_norm_eps": 1e-3}
    if c["model_type"] == "cohere":
        c["use_qk_norm"] = flag(rng)
    else:
        windowed(rng, c)


def _nemotron_h(rng: random.Random, c: Config) -> None:
    kinds = ("linear_attention", "moe", FULL, "mlp")
    c["layers_block_type"] = [FULL, *(rng.choice(kinds) for _ in range(c["num_hidden_layers"]))]
    groups_of_heads, inner = rng.choice((1, 2, 3)), rng.choice((8, 16, 24, 40))
    c |= {"mamba_num_heads": groups_of_heads * rng.choice((1, 2)), "mamba_head_dim": inner}
    c |= {"n_groups": groups_of_heads, "ssm_state_size": rng.choice((8, 16, 40, 128))}
    c |= {"conv_kernel": rng.choice((1, 2, 4, 5)), "time_step_min": rng.choice((0.001, 0.6))}
    c |= {"use_bias": flag(rng), "mlp_bias": flag(rng), "use_conv_bias": flag(rng)}
    c |= {"layer_norm_epsilon": 1e-3, "mlp_hidden_act": rng.choice(("relu2", "silu"))}
    experts(rng, c, "n_routed_experts", "num_experts_per_tok")
    groups(rng, c, "n_routed_experts")
    c |= {"moe_shared_expert_intermediate_size": rng.choice((33, 52)), "norm_topk_prob": flag(rng)}
    c |= {"moe_latent_size": rng.choice((None, 20, 33)), "routed_scaling_factor": 1.7}


def _zamba(rng: random.Random, c: Config) -> None:
    mamba(rng, c)
    c |= {"n_mamba_heads": c.pop("mamba_n_heads"), "mamba_ngroups": c.pop("mamba_n_groups")}
    for key in ("head_dim", "mamba_d_head", "mamba_conv_bias", "time_step_limit"):
        c.pop(key)
    c["layers_block_type"] = [
        rng.choice(("linear_attention", "hybrid", "hybrid")) for _ in range(c["num_hidden_layers"])
    ]
    c |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_mem_blocks": rng.choice((1, 2))}
    c |= {"use_shared_attention_adapter": flag(rng), "add_bias_linear": flag(rng)}
    c |= {"adapter_rank": rng.choice((2, 5, 8)), "time_step_min": rng.choice((0.001, 0.4))}
    c["use_mem_rope"] = flag(rng)
    c |= rope(rng, c["hidden_size"] // 2, "default linear")


def _nemotron(rng: random.Random, c: Config) -> None:
    partial(rng, c)
    c |= {"mlp_bias": flag(rng), "norm_eps": 1e-3, "hidden_act": "relu2"}


def _exaone(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    if flag(rng):
        windowed(rng, c)
    else:
        c |= {"sliding_window": None, "layer_types": [FULL] * c["num_hidden_layers"]}
    if c["model_type"] == "exaone_moe":
        windowed(rng, c)
        experts(rng, c, "num_experts", "num_experts_per_tok")
        groups(rng, c, "num_experts")
        c |= {"num_shared_experts": rng.choice((1, 2)), "first_k_dense_replace": rng.randrange(2)}


def _ernie(rng: random.Random, c: Config) -> None:
    c |= rope(rng, c["head_dim"])
    c["use_bias"] = flag(rng)


def _seed(rng: random.Random, c: Config) -> None:
    _plain(rng, c)
    c |= {"attention_out_bias": flag(rng), "attention_dropout": 0.0, "residual_dropout": 0.0}


def _phi(rng: random.Random, c: Config) -> None:
    partial(rng, c)
    share = c["rope_parameters"]["partial_rotary_factor"]
    if flag(rng):
        c |= rope(rng, int(share * c["head_dim"]), "longrope")
        # transformers counts factors by this division.
        c["hidden_size"] = c["num_attention_heads"] * c.pop("head_dim")
        c["rope_parameters"]["partial_rotary_factor"] = share
        c["original_max_position_embeddings"] = rng.choice((16, 60))
    c |= {"attention_bias": False, "sliding_window": rng.choice((None, 7, 33))}


# What each model_type draws beside sizes; those with images are drawn as their text parts.
FAMILIES: dict[str, Callable[[random.Random, Config], None]] = {
    "apertus": _plain, "arcee": _plain, "llama": _plain, "olmo2": _plain,
    "qwen2": _upper_windows, "qwen3": _upper_windows, "mistral": _mistral,
    "ministral3": _ministral, "smollm3": _smollm, "granite": _granite,
    "granitemoe": _granite_mixture, "granitemoeshared": _granite_mixture,
    "granitemoehybrid": _granite_hybrid, "gemma": _gemma, "gemma2": _gemma2,
    "gemma3_text": _gemma3, "gemma3n_text": gemma3n, "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
    "olmo3": _olmo3, "stablelm": _stablelm, "starcoder2": _starcoder, "cohere": _cohere,
    "cohere2": _cohere, "hunyuan_v1_dense": hunyuan, "hunyuan_v1_moe": hunyuan,
    "bamba": _bamba, "falcon_h1": _falcon,
    "nemotron": _nemotron, "nemotron_h": _nemotron_h, "zamba2": _zamba,
    "exaone4": _exaone, "exaone_moe": _exaone, "lfm2": lfm,
    "lfm2_moe": lfm, "qwen3_next": delta, "qwen3_5_text": delta, "qwen3_5_moe_text": delta,
    "deepseek_v2": latent, "deepseek_v3": latent, "glm4_moe_lite": latent,
    "glm4_moe": glm4_moe, "glm4": partial, "phi3": _phi, "mixtral": mixture,
    "qwen2_moe": mixture, "qwen3_moe": mixture, "olmoe": mixture, "ernie4_5": _ernie,
    "flex_olmo": mixture,
    "ernie4_5_moe": ernie_moe, "gpt_oss": gpt_oss, "seed_oss": _seed,
    "nanochat": _nanochat, "ministral": _ministral_8b, "youtu": _youtu, "solar_open": _solar,
    "afmoe": _afmoe, "granite_swa": _granite_windows, "granitemoe_swa": _granite_windows,
    "olmo_hybrid": _olmo_hybrid, "gpt_neox": _neox, "olmo": _olmo, "phi": _phi_2,
}  # fmt: skip
