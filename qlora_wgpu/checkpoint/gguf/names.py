"""Where each of a model's tensors lies in a GGUF file, by the names of Hugging Face's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qlora_wgpu.checkpoint.gguf.architecture import ROPE_TENSORS, GGUFArchitecture, Placement
from qlora_wgpu.checkpoint.gguf.architectures import ERNIE_CORRECTION
from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.mixtures import SPARE
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError, brief

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = re.compile(r"blk\.([0-9]{1,5})\.([a-z0-9_]+(?:\.[a-z0-9_]+)?)\.(weight|bias|scale)")
_BARE = "ssm_a"  # which files have without such an ending
_LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Stacks of experts: their parts by rows, and what these are called; some number them.
_STACKS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_CONVOLUTIONS = ("conv.conv", "linear_attn.conv1d")  # which have an axis of one there
_SCALARS = {"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,)}
_ITSELF = (
    "self_attn.sinks",
    "linear_attn.A_log",
    "layer_scalar",
    "router.scale",
    "router.per_expert_scale",
)
_ROUTERS = {
    "mixtral": "block_sparse_moe.gate",
    "granitemoe": "block_sparse_moe.router.layer",
    "granitemoeshared": "block_sparse_moe.router.layer",
    "hunyuan_v1_moe": "mlp.gate.wg",
    "lfm2_moe": "feed_forward.gate",
}
_EXPERTS = {"gemma4_text": "experts"}  # where they are not within the MLP
_NUMBERED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_HAS_NUMBERED = ("mixtral", "lfm2_moe")
# Tables that follow from the keys, which old files hold as well.
_REPEATED = re.compile(r"(blk\.[0-9]+\.)?(attn_rot_embd|rope_freqs)\.weight")


def placements(
    file: GGUFFile, architecture: GGUFArchitecture, config: dict[str, Any]
) -> dict[str, Placement]:
    """Where each tensor lies, by its name in Hugging Face's files."""
    found: dict[str, Placement] = {}
    for stored in file.names():
        if stored in ROPE_TENSORS or _REPEATED.fullmatch(stored):
            continue
        for name, placement in _of_tensor(file, stored, architecture, config):
            found[name] = placement
    _join(found, file, architecture)
    architecture.arrange(found, file, config)
    return found | dict(_scalars(file, architecture, config["num_hidden_layers"]))


def _join(found: dict[str, Placement], file: GGUFFile, architecture: GGUFArchitecture) -> None:
    """Makes one of two tensors that are one in Hugging Face's files."""
    for whole, first, second in architecture.joined:
        for name in [name for name in found if name.endswith(f".{first}.weight")]:
            at = name.removesuffix(f"{first}.weight")
            one, two = found.pop(name), found.pop(f"{at}{second}.weight", None)
            kinds = {file.tensor(p.stored).place.type.name for p in (one, two) if p is not None}
            if two is None or len(kinds) != 1 or one.shape[1:] != two.shape[1:]:
                raise UnsupportedModelError(
                    f"{file.path}: {one.stored} has no other half of its type and width: take the "
                    "model's safetensors version"
                )
            rows = one.shape[0] + two.shape[0]
            found[f"{at}{whole}.weight"] = replace(one, shape=(rows, *one.shape[1:]), then=two)


def _scalars(
    file: GGUFFile, architecture: GGUFArchitecture, layers: int
) -> Iterator[tuple[str, Placement]]:
    """What is a number of each layer among the keys, by names that the file finds it by."""
    keys = Keys(file.metadata, file.path, prefix="")
    for key, leaf in architecture.scalars:
        for i, value in enumerate(keys.each(key, layers)):
            stored = f"{key}.{i}"
            file.add_number(stored, value)
            yield f"{architecture.layers}.{i}.{leaf}", Placement(stored, _SCALARS.get(leaf, ()))


def _of_tensor(
    file: GGUFFile, stored: str, architecture: GGUFArchitecture, config: dict[str, Any]
) -> Iterator[tuple[str, Placement]]:
    shape = file.tensor(stored).place.shape
    module = (_OUTSIDE | dict(architecture.outside)).get(stored.rpartition(".")[0])
    if module is not None and stored.endswith((".weight", ".bias")):
        name = f"{module}.{stored.rpartition('.')[2]}"
        yield name, Placement(stored, shape, offset=_offset(name, architecture))
        return
    block = _BLOCK.fullmatch(f"{stored}.weight" if stored.endswith(f".{_BARE}") else stored)
    if _is_spare(file, stored, config["num_hidden_layers"]):
        return
    if block is not None and block[2] in _STACKS and block[3] != "scale":
        yield from _experts(file, stored, int(block[1]), _STACKS[block[2]], config)
        return
    leaf = None if block is None else _leaf(block, _LEAVES | dict(architecture.names))
    if block is None or leaf is None:
        raise UnsupportedModelError(
            f"{file.path} holds the tensor {brief(stored)}, which is not computed for the "
            f"architecture {config['model_type']}: take the model's safetensors version"
        )
    leaf = _ROUTERS.get(config["model_type"], leaf) if leaf == "mlp.gate" else leaf
    is_itself = leaf in _ITSELF or leaf.endswith("_bias")  # a parameter, where others are modules
    name = f"{architecture.layers}.{int(block[1])}.{leaf}" + ("" if is_itself else f".{block[3]}")
    heads = _heads(leaf, config) if architecture.pairs else 0
    if heads and (shape[0] % (2 * heads)):
        raise CheckpointError(
            f"{file.path}: {stored} has {shape[0]} rows, which are no pairs of {heads} heads"
        )
    if "*" in name:  # rows that are tensors of their own in Hugging Face's files
        for row in range(shape[0]):
            yield name.replace("*", str(row)), Placement(stored, shape[1:], row)
        return
    shape = (shape[0], 1, shape[1]) if leaf in _CONVOLUTIONS else shape
    shape = (1, *shape) if leaf == ERNIE_CORRECTION else shape
    yield name, Placement(stored, shape, heads=heads, offset=_offset(name, architecture))


def _leaf(block: re.Match[str], names: Mapping[str, str]) -> str | None:
    """What a tensor is called within its layer; a factor has a name of its own."""
    return names.get(f"{block[2]}.scale" if block[3] == "scale" else block[2])


def _is_spare(file: GGUFFile, stored: str, layers: int) -> bool:
    """Whether a tensor is of the layers at the end for multi-token prediction."""
    found = re.match(r"blk\.([0-9]{1,5})\.", stored)
    key = f"{file.metadata.get('general.architecture')}.{SPARE}"
    return bool(found and int(found[1]) >= layers and file.metadata.get(key, 0))


def _heads(leaf: str, config: dict[str, Any]) -> int:
    keys = {
        "self_attn.q_proj": "num_attention_heads",
        "self_attn.k_proj": "num_key_value_heads",
    }
    heads: int = config[keys[leaf]] if leaf in keys else 0
    return heads


def _offset(name: str, architecture: GGUFArchitecture) -> float:
    is_offset = name.endswith("norm.weight") and not name.endswith(architecture.as_stored)
    return architecture.norm_offset if is_offset else 0.0


def _experts(
    file: GGUFFile, stored: str, layer: int, leaves: tuple[str, ...], config: dict[str, Any]
) -> Iterator[tuple[str, Placement]]:
    shape, kind = file.tensor(stored).place.shape, stored.rpartition(".")[2]
    if kind == "bias" and len(shape) == 2 and len(leaves) == 1:
        shape = (shape[0], 1, shape[1])  # a row of the file's is a bias
    if len(shape) != 3 or shape[1] % len(leaves):
        raise CheckpointError(f"{file.path}: {stored} has shape {shape}, which is no stack's")
    count, rows, columns = shape[0], shape[1] // len(leaves), shape[2]
    own = (columns,) if kind == "bias" else (rows, columns)
    is_numbered = config["model_type"] in _HAS_NUMBERED
    at = _ROUTERS.get(config["model_type"], "mlp").partition(".")[0]
    at = f"model.layers.{layer}.{_EXPERTS.get(config['model_type'], f'{at}.experts')}"
    for number in range(count):
        for part, leaf in enumerate(leaves):
            first = (number * len(leaves) + part) * rows
            leaf = _NUMBERED[leaf] if is_numbered else leaf
            yield f"{at}.{number}.{leaf}.{kind}", Placement(stored, own, first)
