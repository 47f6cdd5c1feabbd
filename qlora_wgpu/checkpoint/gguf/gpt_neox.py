"""GPT-NeoX and Pythia in GGUF files, which have all queries first, then all keys, then all values.

In Hugging Face's files each head's query, key and value are beside one another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.delta_orders import inverse
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.heads import usual_scale
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.placement import Placement
from qlora_wgpu.errors import CheckpointError

Config = dict[str, Any]
_QKV = "attention.query_key_value"
NAMES = (
    ("attn_qkv", _QKV),
    ("attn_output", "attention.dense"),
    ("ffn_up", "mlp.dense_h_to_4h"),
    ("ffn_down", "mlp.dense_4h_to_h"),
)
OUTSIDE = (("token_embd", "gpt_neox.embed_in"), ("output_norm", "gpt_neox.final_layer_norm"))


def gpt_neox(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """GPT-NeoX, whose activation no key tells: it is the one that llama.cpp computes."""
    usual_scale(keys, config)
    keys.refuse("attention.head_count_kv", config["num_attention_heads"])
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    return {
        "hidden_act": "gelu_new",
        "rotary_pct": rotated / config["head_dim"],
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in file,
    }


def kind_order(heads: int, rows: int) -> npt.NDArray[np.int64]:
    """Which of Hugging Face's rows each of llama.cpp's is."""
    return np.arange(rows).reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1)


def by_head(found: dict[str, Placement], file: GGUFFile, config: Config) -> None:
    """Puts each head's query, key and value beside one another."""
    heads, size = config["num_attention_heads"], config["head_dim"]
    order = inverse(kind_order(heads, 3 * heads * size))
    for name, placement in found.items():
        if _QKV not in name:
            continue
        if placement.shape[0] != len(order):
            raise CheckpointError(
                f"{file.path}: {placement.stored} has shape {placement.shape}, where {heads} heads "
                f"of {size} make {len(order)}"
            )
        found[name] = replace(placement, order=order)
