"""Small vision-language models, and batches of their language model with images' features."""

import numpy as np

from references.seeded import VOCAB

IMAGE, R, ALPHA = 330, 4, 8
SEQ = 40
# Rows and columns of the images of each row of the batch; row 1 is padded at its end.
GRIDS = ((), ((2, 3),), ((1, 4), (3, 2), (2, 2)))
# Where each image begins in its row.
PLACES = ((), (5,), (0, 9, 17))
NEW_TOKENS = 5

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", **SIGLIP}
QWEN = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
MROPE = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}, "rope_theta": 1e4}
QWEN3 = {
    **TEXT,
    "head_dim": 20,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 3, 3],
        "mrope_interleaved": True,
    },
}  # fmt: skip
TOWER_3 = {
    **QWEN, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 72,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
QWEN3_5 = {
    **TEXT, "head_dim": 20, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6,
        "mrope_section": [2, 2, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
TOWER_3_5 = {key: value for key, value in TOWER_3.items() if key != "deepstack_visual_indexes"}
UNTIED = {"tie_word_embeddings": False}  # else the last token follows itself
GEMMA4 = {
    **TEXT, "head_dim": 20, "global_head_dim": 28, "sliding_window": 7, "pad_token_id": 3,
    "final_logit_softcapping": 6.0, **UNTIED,
}  # fmt: skip
NO_TOWER = {"vision_config": None, "audio_config": None, "image_token_id": IMAGE, **UNTIED}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

# model_type, config.json, and adapted modules
CASES = {
    "smolvlm": (
        "smolvlm",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SIGLIP,
         "image_token_id": IMAGE, "tie_word_embeddings": True},
        ALL,
    ),
    "idefics3": (
        "idefics3",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SIGLIP,
         "image_token_id": IMAGE},
        ALL,
    ),
    "llava-embedding": (
        "llava",
        {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": CLIP,
         "image_token_index": IMAGE, "tie_word_embeddings": False},
        [*ATTENTION, "embed_tokens"],
    ),
    "llava_next": (
        "llava_next",
        {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": CLIP,
         "image_token_index": IMAGE},
        ALL,
    ),
    "llava_next-granite": (
        "llava_next",
        {"text_config": {"model_type": "granite", **TEXT, "embedding_multiplier": 1.5},
         "vision_config": CLIP, "image_token_index": IMAGE},
        ALL,
    ),
    "gemma3": (
        "gemma3",
        {"text_config": {**TEXT, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 12,
                         "layer_types": ["sliding_attention", "full_attention"], **UNTIED},
         "vision_config": SIGLIP, "image_token_index": IMAGE, "mm_tokens_per_image": 4, **UNTIED},
        ALL,
    ),
    "gemma4": (
        "gemma4",
        {"text_config": {**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                         "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB,
                         "layer_types": ["sliding_attention", "full_attention"] * 2},
         **NO_TOWER},
        ALL,
    ),
    "gemma4-dense": (
        "gemma4",
        {"text_config": {**GEMMA4, "hidden_size_per_layer_input": 0,
                         "use_bidirectional_attention": "vision",
                         "layer_types": ["sliding_attention", "full_attention"]},
         **NO_TOWER},
        ALL,
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {"text_config": MROPE, "vision_config": {**QWEN, "embed_dim": 24, "hidden_size": 72},
         "image_token_id": IMAGE, "video_token_id": 329},
        ALL,
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"text_config": MROPE, "image_token_id": IMAGE, "video_token_id": 329,
         "tie_word_embeddings": True,
         "vision_config": {**QWEN, "hidden_size": 24, "intermediate_size": 40,
                           "out_hidden_size": 72}},
        ALL,
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"text_config": QWEN3, "vision_config": TOWER_3, "image_token_id": IMAGE,
         "video_token_id": 329},
        ALL,
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"text_config": {**QWEN3, "num_experts": 5, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 44},
         "vision_config": TOWER_3, "image_token_id": IMAGE, "video_token_id": 329},
        ATTENTION,
    ),
    "qwen3_5": (
        "qwen3_5",
        {"text_config": QWEN3_5, "vision_config": TOWER_3_5, "image_token_id": IMAGE,
         "video_token_id": 329},
        [*ALL, "in_proj_qkv", "in_proj_a", "out_proj"],
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"text_config": {**QWEN3_5, "num_experts": 5, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 44, "shared_expert_intermediate_size": 28},
         "vision_config": TOWER_3_5, "image_token_id": IMAGE, "video_token_id": 329},
        [*ATTENTION, "in_proj_z"],
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {"text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"],
                         "block_multiple_of": 8},
         "vision_config": {"model_type": "siglip2_vision_model", **SIGLIP, "num_patches": 16},
         "image_token_id": IMAGE},
        ["out_proj", "q_proj", "w1", "w2"],
    ),
    "mistral3": (
        "mistral3",
        {"text_config": {"model_type": "mistral", **TEXT, "head_dim": 12},
         "vision_config": {"model_type": "pixtral", **SIGLIP}, "image_token_index": IMAGE,
         "tie_word_embeddings": False},
        ALL,
    ),
}  # fmt: skip


def batch():
    """Ids, mask and labels of rows with no, one and three images."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 320, (len(GRIDS), SEQ))
    mask = np.ones_like(ids)
    mask[1, -5:] = 0  # fewer than the window: PyTorch computes NaN of a wholly masked query
    for row, (grids, places) in enumerate(zip(GRIDS, PLACES, strict=True)):
        for (height, width), begin in zip(grids, places, strict=True):
            ids[row, begin : begin + height * width] = IMAGE
    labels = np.where((mask == 1) & (ids != IMAGE), ids, -100)
    labels[2, :30] = -100
    return ids, mask, labels


def packed():
    """The same with the last two rows in one, of a length that pads its end."""
    ids, mask, labels = batch()
    length = int(mask[1].sum())
    joined = np.zeros((3, 1, SEQ + length + 3), np.int64)
    joined[2] = -100
    for name, array in enumerate((ids, mask, labels)):
        joined[name, 0, :length] = array[1, :length]
        joined[name, 0, length : length + SEQ] = array[2] * 2 if name == 1 else array[2]
    return tuple(joined)


def features(deepstack):
    """float32 rows of features of each image of each row."""
    rng = np.random.default_rng(7)
    width = (1 + deepstack) * TEXT["hidden_size"]
    return [
        [0.7 * rng.standard_normal((h * w, width), dtype=np.float32) for h, w in grids]
        for grids in GRIDS
    ]


ANSWERED, BETA = ("qwen2_vl", "gemma3"), 0.5  # cases of image_answers.npz, and β
# The first tokens of a row that are its prompt, in ``pairs``.
PROMPTS = {1: 20, 2: 30}


def pairs():
    """Rows of ``GRIDS``, and ids, mask and labels of chosen and rejected answers to them in turn.

    The rejected answer ends earlier.
    """
    ids, mask, _ = batch()
    rows = [row for row in PROMPTS for _ in range(2)]
    ids, mask = ids[rows], mask[rows]
    rng = np.random.default_rng(9)
    for number, begin in enumerate(PROMPTS.values()):
        ids[2 * number + 1, begin:] = rng.integers(0, 320, SEQ - begin)
        mask[2 * number + 1, number - 6 :] = 0  # fewer than the window, as above
    labels = np.where(mask == 1, ids, -100)
    for number, begin in enumerate(PROMPTS.values()):
        labels[2 * number : 2 * number + 2, :begin] = -100
    return rows, ids, mask, labels
