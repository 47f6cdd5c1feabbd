"""What is known of an architecture of llama.cpp: its names in config.json, and its own keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.checkpoint.gguf.file import GGUFFile
from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.checkpoint.gguf.placement import Placement

Config = dict[str, Any]
More = Callable[[Keys, GGUFFile, Config], Config]
Arrange = Callable[[dict[str, Placement], GGUFFile, Config], None]
RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
MEAN = "attention.layer_norm_epsilon"


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture.

    Attributes:
        model_type: config.json's name of it.
        causal_class: transformers' class.
        more: The keys that this architecture has beside what all have.
        pairs: Whether q and k are stored for a rotation of neighbours instead of halves.
        norm_offset: What was added to the norms' weights.
        names: What its blocks' tensors are called in Hugging Face's files, where others differ.
        outside: The same of tensors outside of blocks.
        epsilon: The key of what norms add, and config.json's.
        scalars: Keys without the architecture's name that tell a number of each layer, and what
            these are called in Hugging Face's files, which hold them as tensors.
        joined: Tensors that are one in Hugging Face's files: its name, and those of its halves.
        some_attend: Whether layers without heads of keys do something else.
        as_stored: How norms end to which nothing was added, whatever was to the others.
        own_sizes: Whether ``more`` reads the sizes of heads and MLPs, which may differ from layer
            to layer.
        layers: What the modules of its blocks begin with in Hugging Face's files.
        arrange: Changes placements of tensors that the file has in another order or form.
    """

    model_type: str
    causal_class: str
    more: More
    pairs: bool = False
    norm_offset: float = 0.0
    names: tuple[tuple[str, str], ...] = ()
    outside: tuple[tuple[str, str], ...] = ()
    epsilon: tuple[str, str] = RMS
    scalars: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[str, str, str], ...] = ()
    some_attend: bool = False
    as_stored: tuple[str, ...] = ()
    own_sizes: bool = False
    layers: str = "model.layers"
    arrange: Arrange = lambda *given: None
