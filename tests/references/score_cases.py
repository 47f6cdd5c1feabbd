"""Reward models and classifiers, their sequences and their targets."""

import numpy as np

from references.seeded import VOCAB

R, ALPHA, PADDING = 5, 10, 0
LENGTHS = (24, 19, 7, 2, 11, 16)
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 20, "final_logit_softcapping": 6.0}
TIED = {"tie_word_embeddings": True, "pad_token_id": PADDING}
UNTIED = {"tie_word_embeddings": False, "pad_token_id": PADDING}
NEOX = {"num_attention_heads": 3, "num_key_value_heads": 3}
QKV = ["q_proj", "down_proj"]
CASES = {  # model type, its config.json, target modules, classes, kind of loss
    "reward": ("llama", UNTIED, QKV, 1, "reward"),
    "reward-margin": ("llama", TIED, QKV, 1, "reward-margin"),
    "single-gemma2": ("gemma2", {**GEMMA, "pad_token_id": PADDING}, QKV, 3, "single"),
    "weighted-qwen2": ("qwen2", TIED, QKV, 3, "weighted"),
    "multi-gpt_neox": ("gpt_neox", {**UNTIED, **NEOX}, ["query_key_value"], 3, "multi"),
    "regression": ("llama", UNTIED, QKV, 2, "regression"),
}
CENTER, MARGINS, CLASS_WEIGHTS = 0.05, (0.5, 0.0, -0.25), (0.5, 2.0, 1.25)


def inputs():
    """Ids and mask of six sequences; the third one ends with the padding token."""
    random = np.random.default_rng(21)
    ids = random.integers(1, VOCAB, (len(LENGTHS), max(LENGTHS)))
    mask = (np.arange(ids.shape[1]) < np.array(LENGTHS)[:, None]).astype(np.int64)
    ids = np.where(mask == 1, ids, PADDING)
    ids[2, LENGTHS[2] - 1] = PADDING
    return ids, mask


def targets(case):
    """What the sequences are scored for: margins of chosen ones, classes, or values of each."""
    *_, classes, kind = CASES[case]
    random = np.random.default_rng(22)
    if kind.startswith("reward"):
        margins = MARGINS if kind == "reward-margin" else (0.0, 0.0, 0.0)
        return np.stack([margins, np.zeros(3)], axis=1).reshape(-1, 1)
    if kind in ("single", "weighted"):
        return random.integers(0, classes, (len(LENGTHS), 1)).astype(np.float64)
    if kind == "multi":
        return random.integers(0, 2, (len(LENGTHS), classes)).astype(np.float64)
    return random.normal(0.0, 1.0, (len(LENGTHS), classes)).astype(np.float32).astype(np.float64)
