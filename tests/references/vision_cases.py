"""Small vision towers of every family, and the crops of a few images of unlike sizes."""

import numpy as np

TEXT = {
    "vocab_size": 61, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 2,
    "patch_size": 5,
}  # fmt: skip
SIZED = {**SIGLIP, "image_size": 30}
LLAMA = {"model_type": "llama", **TEXT}
CLIP = {"model_type": "clip_vision_model", **SIZED}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": 5, "spatial_merge_size": 2}
MROPE = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 1e4}
QWEN3 = {
    **TEXT,
    "head_dim": 20,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 3, 3],
        "mrope_interleaved": True,
    },
}  # fmt: skip
GEMMA4 = {
    "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 12, "patch_size": 5, "pooling_kernel_size": 2,
    "position_embedding_size": 11, "rms_norm_eps": 0.02,
}  # fmt: skip
GEMMA4_TEXT = {
    **TEXT, "head_dim": 20, "global_head_dim": 20, "pad_token_id": 3,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
IMAGE = {"image_token_id": 60, "video_token_id": 59}

# The model_type, its config.json, and height and width of the crops of each image.
CASES = {
    "idefics3": (
        "idefics3",
        {
            "text_config": LLAMA, "vision_config": {**SIZED, "image_size": 42},
            "image_token_id": 60, "scale_factor": 3,
        },
        [[(30, 30)] * 3, [(45, 45)]],
    ),
    "smolvlm": (
        "smolvlm",
        {
            "text_config": LLAMA, "vision_config": {**SIZED, "hidden_act": "gelu"},
            "image_token_id": 60,
        },
        [[(30, 30)]],
    ),
    "llava": (
        "llava",
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": 60},
        [[(30, 30)], [(30, 30)]],
    ),
    "llava-siglip": (
        "llava",
        {
            "text_config": LLAMA,
            "vision_config": {**SIZED, "model_type": "siglip_vision_model", "image_size": 32},
            "image_token_index": 60, "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1, "projector_hidden_act": "gelu_pytorch_tanh",
            "multimodal_projector_bias": False,
        },
        [[(32, 32)]],
    ),
    "llava-layers": (
        "llava",
        {
            "text_config": LLAMA, "vision_config": CLIP, "image_token_index": 60,
            "vision_feature_layer": [-3, 1, -1],
        },
        [[(30, 30)]],
    ),
    "llava_next": (
        "llava_next",
        {
            "text_config": LLAMA, "vision_config": {**CLIP, "image_size": 20},
            "image_token_index": 60, "image_grid_pinpoints": [[20, 40], [40, 20], [40, 40]],
        },
        [[(20, 20)] * 5, [(20, 20)] * 3, [(20, 20)] * 3],
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**TEXT, "head_dim": 20}, "vision_config": {**SIZED, "image_size": 40},
            "mm_tokens_per_image": 16, "image_token_index": 60,
        },
        [[(40, 40)], [(40, 40)]],
    ),
    "gemma4": (
        "gemma4",
        {
            "text_config": GEMMA4_TEXT, "vision_config": {**GEMMA4, "use_clipped_linears": True},
            "audio_config": None, "image_token_id": 60,
        },
        [[(30, 50)], [(10, 20)]],
    ),
    "gemma4-standardized": (
        "gemma4",
        {
            "text_config": GEMMA4_TEXT,
            "vision_config": {
                **GEMMA4, "standardize": True, "pooling_kernel_size": 3,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 7.0},
            },
            "audio_config": None, "image_token_id": 60,
        },
        [[(30, 45)]],
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": MROPE, "vision_config": {**QWEN, "embed_dim": 24, "hidden_size": 40},
            **IMAGE,
        },
        [[(30, 50)], [(10, 10)]],
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": MROPE,
            "vision_config": {
                **QWEN, "hidden_size": 24, "intermediate_size": 44, "out_hidden_size": 40,
                "window_size": 30, "fullatt_block_indexes": [1],
            },
            **IMAGE,
        },
        [[(50, 80)], [(10, 70)], [(60, 60)]],
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {
            "text_config": QWEN3,
            "vision_config": {
                **QWEN, "hidden_size": 24, "intermediate_size": 44, "out_hidden_size": 40,
                "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 25,
            },
            **IMAGE,
        },
        [[(30, 50)], [(10, 70)]],
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "text_config": {
                **TEXT, "head_dim": 20, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
                "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            },
            "vision_config": {
                **QWEN, "hidden_size": 24, "intermediate_size": 44, "out_hidden_size": 40,
                "num_position_embeddings": 9, "hidden_act": "gelu",
            },
            **IMAGE,
        },
        [[(30, 20)], [(10, 50)]],
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {
            "text_config": {
                "model_type": "lfm2", **TEXT, "layer_types": ["conv"], "block_multiple_of": 8,
            },
            "vision_config": {"model_type": "siglip2_vision_model", **SIGLIP, "num_patches": 16},
            "image_token_id": 60, "projector_hidden_size": 52,
        },
        [[(30, 50)], [(20, 10)]],
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 12},
            "vision_config": {"model_type": "pixtral", **SIZED, "image_size": 100},
            "image_token_index": 60, "tie_word_embeddings": False,
        },
        [[(30, 50)], [(20, 10)]],
    ),
}  # fmt: skip
# Height and width of the images of llava_next, and their rows and columns of tiles.
TILED = [((23, 31), (2, 2)), ((12, 43), (1, 2)), ((41, 15), (2, 1))]


def crops(case):
    """(3, height, width) float32 of each crop of each image; llava_next's whole image is last."""
    rng = np.random.default_rng(1)
    return [
        [rng.standard_normal((3, *size)).astype(np.float32) for size in sizes]
        for sizes in CASES[case][2]
    ]
