"""What a GGUF file says of a model, while it is put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.decoder import Decoder


@dataclass
class ModelKeys:
    """What a file says of a model.

    Attributes:
        model_type: config.json's name of it.
        config: Its text part of config.json.
        decoder: What that describes.
        llama_cpp: llama.cpp's architecture.
        values: The keys, without the architecture's name.
        notes: What llama.cpp does otherwise, for the user to know.
    """

    model_type: str
    config: Mapping[str, Any]
    decoder: Decoder
    llama_cpp: LlamaCpp
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for what llama.cpp computes otherwise."""
        return UnsupportedModelError(
            f"llama.cpp does not compute {what} for {self.model_type} models, so nothing is "
            "exported: keep to transformers (qlora-wgpu merge)"
        )

    @property
    def attentions(self) -> list[Attention]:
        """The layers' attentions."""
        halves = [layer.attention for layer in self.decoder.layers]
        return [half for half in halves if isinstance(half, Attention)]
