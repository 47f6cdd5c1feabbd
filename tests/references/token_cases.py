"""Models of which rows of the embedding or the head are trained, and a batch for them."""

import numpy as np

from references.seeded import VOCAB, batch

R, ALPHA = 5, 10
TARGETS = ["q_proj", "down_proj"]
PADDING, UNSEEN = 5, 96
# Both ends of the vocabulary, a token that repeats, one that never comes, and that of padding.
TOKENS = [17, 0, VOCAB - 1, UNSEEN, PADDING]
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 20, "final_logit_softcapping": 6.0}
CASES = {
    "tied": ("llama", {"tie_word_embeddings": True, "pad_token_id": PADDING}, TOKENS),
    "untied": ("llama", {"tie_word_embeddings": False, "pad_token_id": PADDING}, TOKENS),
    "both": (
        "llama",
        {"tie_word_embeddings": False},
        {"embed_tokens": TOKENS, "lm_head": [40, VOCAB - 1, 0]},
    ),
    "gemma2": ("gemma2", {**GEMMA, "pad_token_id": 0}, {"embed_tokens": TOKENS}),
    "cohere": ("cohere", {"logit_scale": 0.25, "pad_token_id": None}, TOKENS),
}


def inputs():
    """A batch in which tokens that are trained come several times, at its ends and as padding."""
    ids, mask, labels = batch()
    ids[ids == UNSEEN] = UNSEEN + 1
    ids[0, [0, 3, 7, 8]] = 17
    ids[1, [2, 4]] = ids[2, 11] = 17
    ids[0, 9] = ids[0, 12] = VOCAB - 1
    ids[1, 6] = ids[0, 20] = 0
    ids[0, 15] = PADDING
    ids[1, -5:] = PADDING
    labels = np.where((mask == 1) & (labels != -100), ids, -100)
    return ids, mask, labels
