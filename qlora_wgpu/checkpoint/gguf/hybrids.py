"""Layers with a gated delta net in GGUF files: Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf.architecture import (
    Change,
    Columns,
    FloatArray,
    Heads,
    Placement,
    grouped_orders,
    inverse,
    qkv_order,
    tiled_order,
    usual_scale,
)
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.mixtures import SPARE, refuse_other_weights
from qlora_wgpu.errors import CheckpointError

Config = dict[str, Any]
Placements = dict[str, Placement]
NAMES = (
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt", "linear_attn.dt_bias"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
)
"""What its tensors are called in Hugging Face's files."""
_KINDS = {True: "linear_attention", False: "full_attention"}
_MOST_LISTED = 65_536  # layers
_QKVZ = "linear_attn.in_proj_qkvz.weight"


def qwen3_next(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen3-Next, every layer of which has experts."""
    return {
        **_delta_nets(keys, file, config),
        **_experts(keys),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def qwen3_5(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen 3.5 without experts."""
    keys.ignore("rope.dimension_sections")  # which tell of images' positions
    keys.refuse("expert_count", 0)
    return _delta_nets(keys, file, config)


def qwen3_5_moe(keys: Keys, file: GGUFFile, config: Config) -> Config:
    """Qwen 3.5 as a mixture."""
    keys.ignore("rope.dimension_sections")
    return {**_delta_nets(keys, file, config), **_experts(keys)}


def _delta_nets(keys: Keys, file: GGUFFile, config: Config) -> Config:
    usual_scale(keys, config)
    layers = config["num_hidden_layers"] - keys.integer(SPARE, 0)
    values, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    size = keys.integer("ssm.state_size")
    if inner != values * size:
        raise CheckpointError(
            f"{keys.where}: {keys.architecture}.ssm.inner_size is {inner}, not the {values} heads "
            f"of {size} that time_step_rank and state_size tell"
        )
    rotated = keys.integer("rope.dimension_count", config["head_dim"])
    return {
        "num_hidden_layers": layers,
        "layer_types": [_KINDS[recurrent] for recurrent in _recurrent(keys, layers)],
        "partial_rotary_factor": rotated / config["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in file,
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }


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


def _experts(keys: Keys) -> Config:
    refuse_other_weights(keys, normalized=True)
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
    }


def tiled(found: Placements, file: GGUFFile, config: Config) -> None:
    """Gives the heads of values their order in Hugging Face's files."""
    heads = _heads(file, config)
    of_value, of_one = (inverse(tiled_order(heads, size)) for size in (heads.value_dim, 1))
    channels = inverse(qkv_order(heads))
    rows = {
        "in_proj_qkv.weight": channels,
        "conv1d.weight": channels,
        "in_proj_z.weight": of_value,
        "in_proj_b.weight": of_one,
        "in_proj_a.weight": of_one,
        "dt_bias": of_one,
    }
    for name, placement in _of_delta_nets(found):
        leaf = name.partition("linear_attn.")[2]
        if leaf in rows:
            _check_length(file, placement, 0, len(rows[leaf]))
            found[name] = replace(placement, order=rows[leaf])
        elif leaf == "out_proj.weight":
            _check_length(file, placement, 1, len(of_value))
            found[name] = replace(placement, columns=Columns(heads.value_dim, of_one))
        elif leaf == "A_log":
            _check_length(file, placement, 0, len(of_one))
            found[name] = _logarithm(replace(placement, order=of_one))


def grouped(found: Placements, file: GGUFFile, config: Config) -> None:
    """Puts together what Hugging Face's files have of each head of keys."""
    heads = _heads(file, config)
    order = inverse(np.concatenate(grouped_orders(heads)))
    for name, placement in _of_delta_nets(found):
        if name.endswith("A_log"):
            found[name] = _logarithm(placement)
        if not name.endswith("in_proj_qkv.weight"):
            continue
        at = name.removesuffix("linear_attn.in_proj_qkv.weight")
        gates = found.pop(f"{at}linear_attn.in_proj_z.weight", None)
        rows = placement.shape[0] + (0 if gates is None else gates.shape[0])
        if gates is None or rows != len(order) or gates.shape[1:] != placement.shape[1:]:
            raise CheckpointError(
                f"{file.path}: {placement.stored} and its attn_gate have {rows} rows together, "
                f"where the heads of its keys have {len(order)}"
            )
        del found[name]
        found[at + _QKVZ] = _both(file, placement, gates, order)


def _both(file: GGUFFile, qkv: Placement, z: Placement, order: Any) -> Placement:
    """One matrix of two, the rows of which are in another order."""
    shape, first = (len(order), *qkv.shape[1:]), qkv.shape[0]
    kinds = {file.tensor(part.stored).place.type for part in (qkv, z)}
    if len(kinds) == 1:
        return replace(qkv, shape=shape, then=z, order=order)

    def undo(array: FloatArray) -> Sequence[FloatArray]:
        return np.split(array[inverse(order)], [first])

    change = Change((qkv, z), lambda parts: np.concatenate(parts)[order], undo)
    return Placement(qkv.stored, shape, change=change)


def _logarithm(placement: Placement) -> Placement:
    """The logarithm of a decay, where the file has the decay itself, below zero."""

    def make(parts: Sequence[FloatArray]) -> FloatArray:
        return np.log(-parts[0])

    change = Change((placement,), make, lambda array: [-np.exp(array)])
    return Placement(placement.stored, placement.shape, change=change)


def _heads(file: GGUFFile, config: Config) -> Heads:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    heads = Heads(*(config[f"linear_{name}"] for name in names))
    if heads.key_heads < 1 or heads.value_heads % heads.key_heads:
        raise CheckpointError(
            f"{file.path}: ssm.time_step_rank {heads.value_heads} is no multiple of "
            f"ssm.group_count {heads.key_heads}"
        )
    return heads


def _of_delta_nets(found: Placements) -> list[tuple[str, Placement]]:
    return [(name, place) for name, place in found.items() if ".linear_attn." in name]


def _check_length(file: GGUFFile, placement: Placement, axis: int, length: int) -> None:
    """Refuses a tensor that is not of the heads that the keys tell."""
    if len(placement.shape) <= axis or placement.shape[axis] != length:
        raise CheckpointError(
            f"{file.path}: {placement.stored} has shape {placement.shape}, where the heads of the "
            f"delta nets make {length}"
        )
