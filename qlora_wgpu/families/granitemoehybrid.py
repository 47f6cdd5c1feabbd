"""Granite 4 without state-space layers (IBM, 2025): as Granite 3, with gate and up fused."""

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import parts
from qlora_wgpu.families.granite import compose_with
from qlora_wgpu.families.granitemoe import read_experts, shared_mlp


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """An MLP, next to experts if there are any; hybrids with state-space layers are refused."""
    read = read.with_defaults(intermediate_size=11008)  # the experts' size
    dimensions = parts.Dimensions.read(read)
    _check_attending(read, dimensions.num_hidden_layers)
    kind = read.choice("position_embedding_type", (None, "rope", "nope"))
    rope = parts.read_rope(read.config, dimensions.head_dim) if kind == "rope" else None
    size = read.integer("shared_intermediate_size", 1024)
    mlp = shared_mlp(dimensions, size, parts.read_activation(read))
    if read.count("num_local_experts", 8) == 0:
        return compose_with(read, mlp.dimensions, mlp, rope)
    decoder = compose_with(read, dimensions, read_experts(read, dimensions, mlp), rope)
    return replace(decoder, balance=parts.read_balance_loss(read))


def _check_attending(read: parts.ConfigReader, layers: int) -> None:
    types = read.config.get("layer_types", read.config.get("layers_block_type"))
    if not parts.name_kinds(types, ("attention", "full_attention"), layers):
        raise UnsupportedModelError(
            f"config.json: layer_types must be 'attention' for each of the {layers} layers: "
            "Granite 4's state-space layers are not supported"
        )
