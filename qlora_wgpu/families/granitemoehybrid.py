"""Granite 4 where it is dense (IBM, 2025): as Granite 3, with gate and up in one layer."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families.config_reader import ConfigReader
from qlora_wgpu.families.decoder import Decoder, DecoderFamily
from qlora_wgpu.families.dimensions import Dimensions
from qlora_wgpu.families.granite import compose_with
from qlora_wgpu.families.mlp import FusedGatedMLP, read_activation
from qlora_wgpu.families.rope import read_rope


def compose(read: ConfigReader) -> Decoder:
    """Its hybrids and mixtures are refused."""
    read = read.with_defaults(intermediate_size=11008)  # which is of experts
    dimensions = Dimensions.read(read)
    _check_dense(read, dimensions.num_hidden_layers)
    dimensions = replace(
        dimensions, intermediate_size=read.integer("shared_intermediate_size", 1024)
    )
    mlp = FusedGatedMLP(
        dimensions,
        read_activation(read),
        name="shared_mlp",
        leaves=("input_linear", "output_linear"),
    )
    kind = read.choice("position_embedding_type", (None, "rope", "nope"))
    rope = read_rope(read.config, dimensions.head_dim) if kind == "rope" else None
    return compose_with(read, mlp, rope)


def _check_dense(read: ConfigReader, layers: int) -> None:
    """Makes sure that all layers attend, and that none has experts.

    Raises:
        UnsupportedModelError: If one does not, or has.
    """
    types = read.config.get("layer_types", read.config.get("layers_block_type"))
    attending = ("attention", "full_attention")
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in attending for kind in types)
    ):
        raise UnsupportedModelError(
            f"config.json: layer_types must be 'attention' for each of the {layers} layers: "
            "Granite 4's state-space layers are not computed here"
        )
    experts = read.config.get("num_local_experts", 8)
    if type(experts) is not int or experts != 0:
        raise UnsupportedModelError(
            f"config.json: num_local_experts = {brief(experts)} is not supported: of Granite 4 "
            "the dense models are computed here, which have 0"
        )


FAMILY = DecoderFamily(compose)
