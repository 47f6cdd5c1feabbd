"""What the ordinary draws of a config.json leave out: a few oddities at a time, of any family.

Sizes are primes, or one beside a power of two, where kernels cut; numbers are far from the usual
ones; rotations are written in the old way, and longer or shorter than they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from campaigns.drawn_configs import FULL, SLIDING, Config, drawn_config

WIDTHS = (2, 7, 17, 31, 33, 37, 63, 65, 97, 127, 129, 193, 257)
INNER = (1, 2, 3, 7, 31, 63, 65, 127, 129, 255, 257, 509)
VOCABULARIES = (2, 3, 31, 33, 127, 257, 509, 1009, 1025, 4099)
HEADS = (1, 5, 7, 8, 9, 12, 16, 17)
HEAD_DIMS = (2, 4, 6, 10, 14, 18, 26, 34, 50, 62, 66, 126, 130)
LONG_HEADS = (254, 258, 320, 512)  # which lavapipe compiles for minutes
WINDOWS = (1, 2, 31, 32, 63, 65, 127, 128, 129, 1000)
COUNTS = (1, 2, 7, 31, 64, 65, 128)
# Families whose heads, or whose rotation, are counted from hidden_size by a division.
DIVIDED = (
    "bamba",
    "zamba2",
    "falcon_h1",
    "granitemoehybrid",
    "stablelm",
    "deepseek_v2",
    "phi3",
    "olmoe",
    "lfm2",
    "lfm2_moe",
    "gpt_neox",
    "phi",
)
# Those whose hidden_size transformers wants to be a multiple of the heads.
MULTIPLES = ("arcee", "llama", "gemma2", "gemma3_text", "gemma3n_text", "granite")
LISTED = {"short_factor", "mrope_section"}  # of rotations that are so long
ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2",
)  # fmt: skip
ONE_ACTIVATION = (
    "apertus", "gpt_oss", "gemma", "gemma4_text", "gemma4_unified_text", "qwen3_next",
    "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid",
)  # fmt: skip
# Numbers that stand in a config.json if the ordinary draw has them, or in the families named.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (1e-12, 1e-8, 0.1, 1.0),
    "layer_norm_eps": (1e-12, 1e-8, 0.1, 1.0),
    "norm_epsilon": (1e-12, 0.1, 1.0),
    "norm_eps": (1e-12, 0.1, 1.0),
    "embedding_multiplier": (0.01, 1.0, 12.0, 200.0),
    "residual_multiplier": (0.01, 0.22, 1.0, 3.0),
    "attention_multiplier": (0.0078125, 1.0, 3.0),
    "logits_scaling": (0.1, 1.0, 16.0),
    "logit_scale": (0.0625, 1.0, 5.0),
    "attn_logit_softcapping": (0.3, 1.0, 1000.0),
    "final_logit_softcapping": (0.3, 1.0, 1000.0),
    "query_pre_attn_scalar": (1, 3, 10_000),
    "swiglu_limit": (0.1, 0.5, 100.0),
    "clip_qkv": (0.01, 0.3, 100.0),
    "routed_scaling_factor": (0.05, 2.5, 16.0),
    "router_aux_loss_coef": (0.0, 0.001, 20.0),
    "conv_L_cache": (1, 2, 9, 16, 33),
    "linear_conv_kernel_dim": (1, 3, 9, 16),
    "linear_key_head_dim": (8, 32, 72, 256),
    "linear_value_head_dim": (8, 32, 72, 136, 256),
    "kv_lora_rank": (2, 8, 34, 130),
    "q_lora_rank": (1, 7, 33, 129),
    "qk_rope_head_dim": (2, 6, 34, 66),
    "qk_nope_head_dim": (2, 8, 34, 130),
    "v_head_dim": (1, 2, 3, 33, 65, 129, 200),
    "shared_intermediate_size": (1, 3, 65, 129),
    "shared_expert_intermediate_size": (1, 3, 65, 129),
    "moe_intermediate_size": (1, 2, 3, 7, 65, 127, 129),
    "hidden_size_per_layer_input": (2, 6, 34, 66),
    "global_head_dim": (2, 6, 34, 66, 130),
}
COUNTED = (
    ("num_experts", "num_experts_per_tok"), ("num_local_experts", "num_experts_per_tok"),
    ("moe_num_experts", "moe_k"), ("num_experts", "moe_topk"), ("num_experts", "top_k_experts"),
)  # fmt: skip


def odd_config(rng: random.Random, model_type: str) -> Config:
    """A config.json of a family with some oddities; either side may refuse it."""
    config = drawn_config(rng, model_type)
    for change in rng.sample(CHANGES, rng.randint(3, 7)):
        change(rng, config)
    _fit(config)
    return config


def _fit(c: Config) -> None:
    """Makes sizes fit one another again, where every program asks for it."""
    if c["model_type"] in MULTIPLES:
        heads = c["num_attention_heads"]
        c["hidden_size"] = heads * max(c["hidden_size"] // heads, 1)
    if "residual_multiplier" in c and c["attention_bias"]:
        c["residual_multiplier"] = 1.0
    if c["pad_token_id"]:
        c["pad_token_id"] = c["vocab_size"] - 1


def _sizes(rng: random.Random, c: Config) -> None:
    c["vocab_size"] = rng.choice(VOCABULARIES)
    if c.get("vocab_size_per_layer_input"):
        c["vocab_size_per_layer_input"] = c["vocab_size"] + rng.choice((0, 1, 63))
    c["intermediate_size"] = rng.choice(INNER)


def _width(rng: random.Random, c: Config) -> None:
    if c["model_type"] not in DIVIDED:
        c["hidden_size"] = rng.choice(WIDTHS)


def _heads(rng: random.Random, c: Config) -> None:
    """One head, many, or a prime number, all with their own keys or all with the same ones."""
    if c["model_type"] in DIVIDED:
        return
    heads = c["num_attention_heads"] = rng.choice(HEADS)
    alone = "kv_lora_rank" in c
    c["num_key_value_heads"] = heads if alone else rng.choice((1, heads))
    if c.get("num_global_key_value_heads"):
        c["num_global_key_value_heads"] = rng.choice((1, heads))


def _head_dim(rng: random.Random, c: Config) -> None:
    """Heads of another size, whose rotation is as long unless it is listed."""
    ropes = _ropes(c)
    if c["model_type"] in DIVIDED or "head_dim" not in c or any(LISTED & r.keys() for r in ropes):
        return
    c["head_dim"] = rng.choice(HEAD_DIMS if rng.random() < 0.97 else LONG_HEADS)
    for rope in ropes:
        share = rope.get("partial_rotary_factor", 1.0)
        if rope.get("rope_type") != "proportional" and int(share * c["head_dim"]) % 2:
            rope["partial_rotary_factor"] = 1.0


def _one_layer(rng: random.Random, c: Config) -> None:
    layers = c["num_hidden_layers"] = rng.choice((1, 1, 5, 6))
    for key in ("layer_types", "no_rope_layers"):
        if c.get(key):
            c[key] = [rng.choice(c[key]) for _ in range(layers)]
    c["mlp_only_layers"] = [i for i in c.get("mlp_only_layers", ()) if i < layers - 1]
    if "num_kv_shared_layers" in c:
        c["num_kv_shared_layers"] = 0
        c["layer_types"][-1] = FULL


def _numbers(rng: random.Random, c: Config) -> None:
    keys = [key for key in NUMBERS if c.get(key) is not None]
    for key in rng.sample(keys, min(len(keys), rng.randint(1, 3))):
        c[key] = rng.choice(NUMBERS[key])


def _windows(rng: random.Random, c: Config) -> None:
    if c.get("sliding_window") is None:
        return
    c["sliding_window"] = rng.choice(WINDOWS)
    if c.get("layer_types") and rng.random() < 0.3 and "conv" not in c["layer_types"]:
        c["layer_types"] = [SLIDING] * len(c["layer_types"])


def _experts(rng: random.Random, c: Config) -> None:
    """Of experts the usual number, or 128; all of them are chosen, or one."""
    for count, top in COUNTED:
        if c.get(count) and c.get(top) and "n_group" not in c:
            c[count] = rng.choice(COUNTS)
            c[top] = rng.choice((1, c[count], min(c[count], 6)))
            if c[count] > 30:
                c["num_hidden_layers"] = min(c["num_hidden_layers"], 2)
                c["intermediate_size"] = min(c["intermediate_size"], 33)
                for key in ("layer_types", "no_rope_layers"):
                    if c.get(key):
                        c[key] = c[key][-2:]
                c["mlp_only_layers"] = []
                if "num_kv_shared_layers" in c:
                    c["num_kv_shared_layers"] = 0
    if c.get("n_routed_experts"):
        c["n_shared_experts"] = rng.choice((1, 4, 5))
        c["num_experts_per_tok"] = c["n_routed_experts"] // c["n_group"] * c["topk_group"]


def _activation(rng: random.Random, c: Config) -> None:
    if c["model_type"] in ONE_ACTIVATION:
        return
    key = "hidden_activation" if c["model_type"].startswith("gemma") else "hidden_act"
    c[key] = rng.choice(ACTIVATIONS)


def _lengths(rng: random.Random, c: Config) -> None:
    """Texts are longer than the model was made for, or much shorter."""
    c["max_position_embeddings"] = rng.choice((8, 40, 2048, 131_072))
    for rope in _ropes(c):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = rng.choice((4, 64, 513, 8192))


def _angles(rng: random.Random, c: Config) -> None:
    for rope in _ropes(c):
        (c if "rope_theta" in c else rope)["rope_theta"] = rng.choice(
            (2.0, 10.0, 1234.5, 5e6, 1e11)
        )
        if "factor" in rope:
            rope["factor"] = rng.choice((0.5, 1.0, 1.1, 40.0))
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "yarn":
            rope |= {"beta_fast": rng.choice((1.0, 32.0, 100.0)), "beta_slow": 1.0}
        if kind in ("yarn", "longrope") and rng.random() < 0.5:
            rope["attention_factor"] = rng.choice((0.5, 1.0, 2.0))
        if kind == "llama3":
            rope |= {"low_freq_factor": 0.5, "high_freq_factor": rng.choice((0.6, 32.0))}


def _old_keys(rng: random.Random, c: Config) -> None:
    """``rope_theta`` and ``rope_scaling`` with a ``type``, as files before transformers 5."""
    rope = c.get("rope_parameters")
    if not rope or FULL in rope or SLIDING in rope or "llama_4_scaling_beta" in rope:
        return
    if "mrope_section" in rope:
        return
    rope = dict(c.pop("rope_parameters"))
    c["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        c["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    c["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def _ties(rng: random.Random, c: Config) -> None:
    c["tie_word_embeddings"] = not c["tie_word_embeddings"]


def _biases(rng: random.Random, c: Config) -> None:
    if c["model_type"].startswith(("granite", "phi3")):
        return  # which are refused
    for key in ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "attention_out_bias"):
        if key in c:
            c[key] = True


def _padding(rng: random.Random, c: Config) -> None:
    """A row of the embedding that is padding's."""
    c["pad_token_id"] = rng.choice((0, c["vocab_size"] - 1))


def _ropes(c: Config) -> list[Config]:
    rope = c.get("rope_parameters") or c.get("rope_scaling")
    if not rope:
        return []
    return [part for key in (FULL, SLIDING) if (part := rope.get(key))] or [rope]


CHANGES: tuple[Callable[[random.Random, Config], None], ...] = (
    _sizes, _width, _heads, _head_dim, _one_layer, _numbers, _windows, _experts, _activation,
    _lengths, _angles, _old_keys, _ties, _biases, _padding,
)  # fmt: skip
