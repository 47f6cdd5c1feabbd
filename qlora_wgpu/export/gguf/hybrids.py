"""What a GGUF file says of layers with a gated delta net (Qwen3-Next, Qwen 3.5)."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.export.gguf import mixtures
from qlora_wgpu.export.gguf.model_keys import ModelKeys
from qlora_wgpu.export.gguf.scales import check_scales
from qlora_wgpu.families.parts.mixers import GatedDeltaNet

_EPS = 1e-6  # of the norm of queries and keys, whatever config.json says
_SECTIONS = 4  # kinds of positions that llama.cpp has


def qwen3_next(keys: ModelKeys) -> None:
    """Qwen3-Next, every layer of which has experts."""
    _delta_nets(keys)
    mixtures.qwen_shared(keys)


def qwen3_5(keys: ModelKeys) -> None:
    """Qwen 3.5 without experts."""
    _delta_nets(keys)
    check_scales(keys)
    _sections(keys)


def qwen3_5_moe(keys: ModelKeys) -> None:
    """Qwen 3.5 as a mixture."""
    _delta_nets(keys)
    mixtures.qwen_shared(keys)
    _sections(keys)


def _delta_nets(keys: ModelKeys) -> None:
    """Adds which layers are such, and their sizes.

    Raises:
        UnsupportedModelError: If llama.cpp computes them otherwise.
    """
    halves = [layer.attention for layer in keys.decoder.layers]
    nets = [half for half in halves if isinstance(half, GatedDeltaNet)]
    if not nets:
        raise keys.refuse("a model of delta nets without any")
    if keys.decoder.norm.eps != _EPS:
        raise keys.refuse(f"a rms_norm_eps of {keys.decoder.norm.eps:g} beside delta nets")
    heads, taps = nets[0].heads, nets[0].taps
    if heads.key_dim != heads.value_dim:
        raise keys.refuse(
            f"a linear_key_head_dim of {heads.key_dim} and a linear_value_head_dim of "
            f"{heads.value_dim}, which differ,"
        )
    keys.values |= {
        "ssm.conv_kernel": taps,
        "ssm.state_size": heads.key_dim,
        "ssm.group_count": heads.key_heads,
        "ssm.time_step_rank": heads.value_heads,
        "ssm.inner_size": heads.value_size,
        "attention.recurrent_layers": np.array([isinstance(h, GatedDeltaNet) for h in halves]),
        "full_attention_interval": int(keys.config.get("full_attention_interval") or 4),
    }


def _sections(keys: ModelKeys) -> None:
    """Adds how many pairs of a head turn by each kind of position, which a text has one of.

    Those for time, height and width take turns; a pair that is nobody's would not turn at all.
    """
    pairs = keys.values["rope.dimension_count"] // 2
    whole = [(pairs + 2 - i) // 3 for i in range(3)]
    told = (keys.config.get("rope_parameters") or {}).get("mrope_section")
    if isinstance(told, list) and sorted(told) == sorted(whole):
        whole = told
    keys.values["rope.dimension_sections"] = np.array([*whole, 0][:_SECTIONS], np.int32)
