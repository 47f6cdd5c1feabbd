"""Granite as mixtures of experts with sliding windows (IBM, 2026)."""

from dataclasses import replace

from qlora_wgpu.families import granitemoeshared, parts
from qlora_wgpu.families.granite_swa import sliding


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """Files have the router's weight by its name in transformers, unlike older mixtures."""
    decoder = sliding(read, granitemoeshared.compose(read))
    layers = []
    for layer in decoder.layers:
        assert isinstance(layer.mlp, parts.SparseMoeBlock)
        layers.append(replace(layer, mlp=replace(layer.mlp, router="router", router_held=None)))
    return replace(decoder, layers=tuple(layers))
