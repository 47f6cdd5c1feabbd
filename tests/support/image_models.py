"""Folders of vision-language models without weights: their configurations and a small tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.tiny_tokenizer import tiny_backend

# Heights and widths of three images in each prompt.
SIZES = (
    ((40, 60), (300, 200), (97, 97)),
    ((1, 9), (800, 601), (333, 1000)),
)
# Height and width before and after, and the filter.
RESIZED = {
    "smaller": ((23, 40), (9, 13), "bilinear"),
    "larger": ((5, 3), (17, 16), "bilinear"),
    "smaller by cubes": ((23, 40), (9, 13), "bicubic"),
    "larger by cubes": ((5, 3), (17, 16), "bicubic"),
}
_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}MARKER{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
}
_ROWS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_TILES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS3 = {
    "tokens": ["<image>", "<fake_token_around_image>", "<global-img>", *_ROWS],
    "named": {"image_token": "<image>"},
    "ids": {"image_token_id": "<image>"},
    "processor": {"image_seq_len": 4},
    "images": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 4 * 56},
        "max_image_size": {"longest_edge": 56},
    },
}
_VISION = {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 56}
FAMILIES = {
    "idefics3": _IDEFICS3,
    "smolvlm": {
        **_IDEFICS3,
        "images": {**_IDEFICS3["images"], "image_processor_type": "SmolVLMImageProcessor"},
    },
    "llava": {
        "tokens": ["<image>"],
        "named": {"image_token": "<image>"},
        "ids": {"image_token_index": "<image>"},
        "config": {"vision_config": _VISION, "vision_feature_select_strategy": "default"},
        "processor": {
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        "images": _CLIP,
    },
    "llava_next": {
        "tokens": ["<image>"],
        "named": {"image_token": "<image>"},
        "ids": {"image_token_index": "<image>"},
        "config": {"vision_config": _VISION, "vision_feature_select_strategy": "default"},
        "processor": {
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        "images": {
            **_CLIP,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
        },
    },
    "mistral3": {
        "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "named": {"image_token": "[IMG]"},
        "ids": {"image_token_index": "[IMG]"},
        "config": {"spatial_merge_size": 2, "vision_config": {"patch_size": 14}},
        "processor": {
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        "images": {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 14,
            "size": {"longest_edge": 140},
        },
    },
    "gemma3": {
        "tokens": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
        "named": {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        "ids": {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        "marker": "<start_of_image>",
        "processor": {"image_seq_length": 4},
        "images": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
        },
    },
    "gemma4": {
        "tokens": ["<|image|>", "<|image>", "<image|>"],
        "named": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        "ids": {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
        },
        "processor": {},
        "images": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 8,
            "max_soft_tokens": 70,
        },
    },
    "lfm2_vl": {
        "tokens": ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_TILES],
        "named": {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        "ids": {"image_token_id": "<image>"},
        "processor": {},
        "images": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 8,
            "tile_size": 64,
            "min_image_tokens": 4,
            "max_image_tokens": 12,
            "max_tiles": 6,
        },
    },
    "qwen2_vl": {
        "tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
        "named": {"image_token": "<|image_pad|>"},
        "ids": {
            "image_token_id": "<|image_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        "marker": "<|vision_start|><|image_pad|><|vision_end|>",
        "processor": {},
        "images": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 100},
        },
    },
}
"""What the tests' folders have, by ``model_type``."""


def folder_of(family: str, folder: Path) -> Path:
    """Writes a model's folder: configurations, tokenizer and chat template."""
    parts = FAMILIES[family]
    backend = tiny_backend(bos=False, merges=(("Ċ", "Ċ"),))  # two line feeds are one token
    backend.add_special_tokens(parts["tokens"])
    backend.save(str(folder / "tokenizer.json"))
    marker = parts.get("marker", parts["tokens"][0])
    named = {"eos_token": "</s>", "bos_token": "<s>", **parts["named"]}
    ids = {key: backend.token_to_id(token) for key, token in parts["ids"].items()}
    contents = {
        "tokenizer_config.json": {**named, "chat_template": _PARTS.replace("MARKER", marker)},
        "config.json": {"model_type": family, **parts.get("config", {}), **ids},
        "processor_config.json": parts["processor"],
        "preprocessor_config.json": parts["images"],
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def rgb_of(height: int, width: int) -> np.ndarray:
    """The pixels of an image that depends on its size alone."""
    rows, columns = np.indices((height, width))
    return np.stack([rows * 7 + columns, columns * 5, rows * columns], -1).astype(np.uint8)


def bytes_of(height, width):
    """Random bytes, many of them at both ends of their range."""
    draw = np.random.default_rng(height).integers(-128, 384, (height, width, 3))
    return np.clip(draw, 0, 255).astype(np.uint8)
