"""config.json of every family, of sizes and kinds that are drawn at random: small and odd ones."""

from __future__ import annotations

import random
from collections.abc import Callable

from campaigns.drawn_mixtures import (
    delta,
    ernie_moe,
    gemma4,
    glm4_moe,
    gpt_oss,
    hunyuan,
    latent,
    lfm,
    mixture,
)
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


def _granite_mixture(rng: random.Random, c: Config) -> None:
    _granite(rng, c)
    experts(rng, c, "num_local_experts", "num_experts_per_tok", size=None)
    c["shared_intermediate_size"] = rng.choice((33, 52))
    balanced(rng, c)
    c["attention_bias"] = False


def _granite_hybrid(rng: random.Random, c: Config) -> None:
    _granite_mixture(rng, c)
    c |= {"layer_types": ["attention"] * c["num_hidden_layers"], "mamba_n_heads": 2}
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
    "gemma3_text": _gemma3, "gemma4_text": gemma4, "gemma4_unified_text": gemma4,
    "olmo3": _olmo3, "stablelm": _stablelm, "starcoder2": _starcoder, "cohere": _cohere,
    "cohere2": _cohere, "hunyuan_v1_dense": hunyuan, "hunyuan_v1_moe": hunyuan,
    "nemotron": _nemotron, "exaone4": _exaone, "exaone_moe": _exaone, "lfm2": lfm,
    "lfm2_moe": lfm, "qwen3_next": delta, "qwen3_5_text": delta, "qwen3_5_moe_text": delta,
    "deepseek_v2": latent, "deepseek_v3": latent, "glm4_moe_lite": latent,
    "glm4_moe": glm4_moe, "glm4": partial, "phi3": _phi, "mixtral": mixture,
    "qwen2_moe": mixture, "qwen3_moe": mixture, "olmoe": mixture, "ernie4_5": _ernie,
    "ernie4_5_moe": ernie_moe, "gpt_oss": gpt_oss, "seed_oss": _seed,
    "gpt_neox": _neox, "olmo": _olmo, "phi": _phi_2,
}  # fmt: skip
