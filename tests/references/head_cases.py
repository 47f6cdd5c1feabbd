"""Models of which the head or the embedding is trained, as a pair or whole, and their batch."""

from references.token_cases import PADDING, inputs

__all__ = ["ALPHA", "CASES", "R", "inputs"]

R, ALPHA = 5, 10
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 20, "final_logit_softcapping": 6.0}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.11,
    "logits_scaling": 2.5, "num_key_value_heads": 3, "tie_word_embeddings": False,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False, "pad_token_id": PADDING}
TIED = {"tie_word_embeddings": True, "pad_token_id": PADDING}
COHERE = {"logit_scale": 0.25, "pad_token_id": None}
SOME = ["q_proj", "down_proj"]
CASES = {
    "pair-untied": ("llama", UNTIED, {"target_modules": [*SOME, "lm_head"]}),
    "pair-tied": ("llama", TIED, {"target_modules": [*SOME, "lm_head"]}),
    "pair-gemma2": (
        "gemma2",
        {**GEMMA, "pad_token_id": 0},
        {"target_modules": ["q_proj", "lm_head"]},
    ),
    "pair-cohere": ("cohere", COHERE, {"target_modules": ["q_proj", "lm_head"]}),
    "pair-granite": ("granite", GRANITE, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding-untied": ("llama", UNTIED, {"target_modules": [*SOME, "embed_tokens"]}),
    "embedding-gemma2": (
        "gemma2",
        {**GEMMA, "pad_token_id": 0},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ),
    "pairs-granite": (
        "granite",
        GRANITE,
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ),
    "whole-untied": (
        "llama",
        UNTIED,
        {"target_modules": SOME, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "whole-granite": (
        "granite",
        GRANITE,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "whole-embedding": (
        "llama",
        UNTIED,
        {"target_modules": [*SOME, "lm_head"], "modules_to_save": ["embed_tokens"]},
    ),
    "whole-tied": (
        "llama",
        TIED,
        {
            "target_modules": SOME,
            "modules_to_save": ["lm_head", "embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "whole-gemma2": (
        "gemma2",
        {**GEMMA, "pad_token_id": 0},
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "whole-cohere": (
        "cohere",
        COHERE,
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
}
