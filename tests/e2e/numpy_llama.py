"""Llama's logits in NumPy float64, written from the papers and sharing no code with the package."""

import math

import numpy as np


def _inverse_frequencies(config, dim):
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    frequencies = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        if kind == "linear":
            frequency /= rope["factor"]
        if kind == "llama3":
            turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if turns < low:
                frequency /= rope["factor"]
            elif turns < high:
                kept = (turns - low) / (high - low)
                frequency *= kept + (1 - kept) / rope["factor"]
        frequencies.append(frequency)
    return np.array(frequencies)


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def llama_logits(config, tensors, ids, mask=None, adapter=None, scaling=0.0):
    """Logits (batch, seq, vocab) of a config.json, its tensors, and an adapter by PEFT's names."""
    weights = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    eps = config["rms_norm_eps"]
    batch, seq = ids.shape
    mask = np.ones_like(ids) if mask is None else mask
    seen = np.tril(np.ones((seq, seq), bool)) & (mask[:, None, :] != 0)  # (batch, query, key)
    angles = np.arange(seq)[:, None] * _inverse_frequencies(config, dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # (seq, 1, dim / 2)

    def project(x, name):
        y = x @ weights[f"{name}.weight"].T
        if f"{name}.bias" in weights:
            y = y + weights[f"{name}.bias"]
        a = (adapter or {}).get(f"base_model.model.{name}.lora_A.weight")
        if a is not None:
            b = adapter[f"base_model.model.{name}.lora_B.weight"]
            y = y + scaling * (x @ a.T.astype(np.float64)) @ b.T.astype(np.float64)
        return y

    def rotate(x):
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    embedding = weights.get("model.embed_tokens.weight")
    embedding = weights["lm_head.weight"] if embedding is None else embedding
    h = embedding[ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = _norm(h, weights[at + "input_layernorm.weight"], eps)
        q = rotate(project(x, at + "self_attn.q_proj").reshape(batch, seq, heads, dim))
        k = rotate(project(x, at + "self_attn.k_proj").reshape(batch, seq, kv_heads, dim))
        v = project(x, at + "self_attn.v_proj").reshape(batch, seq, kv_heads, dim)
        k, v = (np.repeat(t, heads // kv_heads, axis=2) for t in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(dim)
        scores = np.where(seen[:, None], scores, -1e300)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        o = np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)
        h = h + project(o.reshape(batch, seq, heads * dim), at + "self_attn.o_proj")
        x = _norm(h, weights[at + "post_attention_layernorm.weight"], eps)
        gate = project(x, at + "mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * project(x, at + "mlp.up_proj")
        h = h + project(gated, at + "mlp.down_proj")
    h = _norm(h, weights["model.norm.weight"], eps)
    head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
    return h @ head.T


def mean_loss(logits, labels):
    """Mean negative log-likelihood of the labels that are not -100, shifted by one."""
    logits, targets = logits[:, :-1], labels[:, 1:]
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    rows = targets != -100
    return -float(np.take_along_axis(log_p, np.where(rows, targets, 0)[..., None], -1)[rows].mean())
