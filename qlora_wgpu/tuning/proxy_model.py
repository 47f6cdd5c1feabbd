"""One layer of a model with its adapter, which is timed instead of the whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.config import ALL_LINEAR, LoraConfig
from qlora_wgpu.families.family import Architecture, LinearSpec, find_family
from qlora_wgpu.families.parts.decoder import Decoder
from qlora_wgpu.lora.layout import AdapterLayout

_MAX_VOCABULARY = 16_384  # rows of the head that are timed


@dataclass(frozen=True)
class OneLayer:
    """A model of one layer."""

    # config.json of the whole model, or of one layer if the architecture is read from it
    config: Mapping[str, Any]
    architecture: Architecture
    lora: LoraConfig  # of its layer

    @classmethod
    def of(cls, config: Mapping[str, Any], lora: LoraConfig) -> OneLayer:
        """A model's first adapted layer of the most frequent kind."""
        architecture = find_family(config).read(config)
        decoder = architecture.config
        if not isinstance(decoder, Decoder):
            return cls._by_config(config, lora)
        plain = lora.model_copy(update={"trainable_token_indices": None, "modules_to_save": None})
        adapter = AdapterLayout.of(architecture, plain)
        index = _adapted_layer(decoder, adapter.targets)
        dimensions = decoder.dimensions
        small = replace(
            decoder.alone(index),
            dimensions=replace(dimensions, vocab_size=min(dimensions.vocab_size, _MAX_VOCABULARY)),
        )
        head = architecture.head.name
        return cls(config, small.architecture(), _moved(adapter, decoder, index, head))

    @classmethod
    def _by_config(cls, config: Mapping[str, Any], lora: LoraConfig) -> OneLayer:
        """One layer for a user-defined family, by the usual keys of config.json."""
        layers = config.get("num_hidden_layers")
        # Lists with an entry per layer are shortened
        first = {
            name: value[:1]
            for name, value in config.items()
            if isinstance(value, list) and len(value) == layers
        }
        small = {**config, **first, "num_hidden_layers": 1}
        if isinstance(rows := config.get("vocab_size"), int):
            small["vocab_size"] = min(rows, _MAX_VOCABULARY)
        everywhere: dict[str, Any] = {
            "target_modules": ALL_LINEAR,
            "layers_to_transform": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "trainable_token_indices": None,  # of the whole vocabulary
            "modules_to_save": None,
        }
        adapted = lora.model_copy(update=everywhere)
        return cls(small, find_family(small).read(small), adapted)


def _adapted_layer(decoder: Decoder, targets: Sequence[LinearSpec]) -> int:
    prefix = re.escape(decoder.layer_prefix)
    adapted = sorted({int(m[1]) for s in targets if (m := re.match(rf"{prefix}(\d+)\.", s.name))})
    kinds = [decoder.layers[i] for i in adapted]
    return max(adapted, key=lambda i: kinds.count(decoder.layers[i]), default=0)


def _moved(adapter: AdapterLayout, decoder: Decoder, index: int, head: str) -> LoraConfig:
    """The adapter of one layer, renamed as the first layer's."""
    old, new = (f"{decoder.layer_prefix}{i}." for i in (index, 0))
    ranks = {
        new + spec.name.removeprefix(old): adapter.peft.rank_of(spec.name)
        for spec in adapter.targets
        if spec.name.startswith(old) or spec.name == head
    }
    changes = {
        "target_modules": list(ranks),
        "layers_to_transform": None,
        "rank_pattern": {f"^{re.escape(name)}$": rank for name, rank in ranks.items()},
        "alpha_pattern": {},
        "trainable_token_indices": None,  # of the whole vocabulary
        "modules_to_save": None,
    }
    return adapter.config.model_copy(update=changes)
