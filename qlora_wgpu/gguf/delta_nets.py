"""Layers with a gated delta net in GGUF files, both ways: Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.parts.mixers import GatedDeltaNet
from qlora_wgpu.gguf.architecture import Config, ModelKeys, Pair, check_scales
from qlora_wgpu.gguf.keys import SPARE, Keys
from qlora_wgpu.gguf.mixtures import check_every_layer

KEYS = (
    Pair("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Pair("ssm.state_size", "linear_key_head_dim"),
    Pair("ssm.group_count", "linear_num_key_heads"),
    Pair("ssm.time_step_rank", "linear_num_value_heads"),
    Pair("ssm.inner_size"),
    Pair("attention.recurrent_layers"),
    Pair("full_attention_interval"),
)
_KINDS = {True: "linear_attention", False: "full_attention"}
_MOST_LISTED = 65_536  # layers
_EPS = 1e-6  # of the norm of queries and keys, whatever config.json says


def read_delta_nets(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Which layers are delta nets, and the size of their values."""
    layers = config["num_hidden_layers"] - keys.integer(SPARE, 0)
    values, size = config["linear_num_value_heads"], config["linear_key_head_dim"]
    inner, key_heads = keys.integer("ssm.inner_size"), config["linear_num_key_heads"]
    if inner != values * size:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.ssm.inner_size is {inner}, not the {values} heads "
            f"of {size} that time_step_rank and state_size tell"
        )
    if key_heads < 1 or values % key_heads:
        raise CheckpointError(
            f"{file.path}: ssm.time_step_rank {values} is no multiple of ssm.group_count "
            f"{key_heads}"
        )
    types = [_KINDS[recurrent] for recurrent in _recurrent(keys, layers)]
    return {"layer_types": types, "linear_value_head_dim": size}


def _recurrent(keys: Keys, layers: int) -> list[bool]:
    """Which layers are delta nets: those of a list, or all but each n-th, usually the fourth."""
    told = keys.raw("attention.recurrent_layers")
    every = keys.integer("full_attention_interval", 4)
    if told is None:
        # A file may say any number of layers, which is refused later.
        return [every < 1 or (i + 1) % every != 0 for i in range(min(layers, _MOST_LISTED))]
    if not isinstance(told, np.ndarray) or told.dtype.kind not in "biu" or len(told) < layers:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.attention.recurrent_layers must say it of each of "
            f"the {layers} layers"
        )
    return [bool(recurrent) for recurrent in told[:layers]]


def check_delta_nets(keys: ModelKeys) -> None:
    """Refuses another epsilon, and keys and values of different sizes."""
    if not any(isinstance(half, GatedDeltaNet) for half in keys.halves):
        raise keys.refuse("a model of delta nets without any")
    if keys.decoder.norm.eps != _EPS:
        raise keys.refuse(f"a rms_norm_eps of {keys.decoder.norm.eps:g} beside delta nets")
    heads = keys.delta_net.heads
    if heads.key_dim != heads.value_dim:
        raise keys.refuse(
            f"a linear_key_head_dim of {heads.key_dim} and a linear_value_head_dim of "
            f"{heads.value_dim}, which differ,"
        )
    check_scales(keys)


def check_delta_mixture(keys: ModelKeys) -> None:
    """The same where every layer has experts."""
    check_delta_nets(keys)
    check_every_layer(keys)
