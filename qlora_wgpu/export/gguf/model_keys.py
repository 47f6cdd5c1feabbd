"""What a GGUF file says of a model while it is put together: scalars, scales, windows, pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.gguf.architectures import XIELU
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import LlamaCpp
from qlora_wgpu.export.merge import MergedWeights
from qlora_wgpu.families.parts.attention import Attention
from qlora_wgpu.families.parts.decoder import Decoder


@dataclass
class ModelKeys:
    """What a file says of a model."""

    model_type: str  # config.json's name of it
    config: Mapping[str, Any]  # its text part of config.json
    decoder: Decoder  # what that describes
    llama_cpp: LlamaCpp  # llama.cpp's architecture
    # The keys, without the architecture's name
    values: dict[str, Any] = field(default_factory=dict)
    # What llama.cpp does otherwise, for the user to know
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


def scalar_keys(merged: MergedWeights) -> dict[str, Any]:
    """The keys, an array with a number of each layer; none where a model has no such tensors."""
    layers, names = merged.architecture.num_layers, merged.architecture.norms
    keys: dict[str, Any] = {}
    for key, leaf in XIELU:
        own = [f"model.layers.{i}.{leaf}" for i in range(layers)]
        if own[0] in names:
            values = [merged.float32(merged.stored_name(name)).reshape(()) for name in own]
            keys[key] = np.array(values, np.float32)
    return keys


_SAME = 1e-5  # relative: files have float32


def check_scales(keys: ModelKeys, **told: float | None) -> None:
    """Refuses factors that are neither usual nor told by a key of the architecture."""
    decoder, head_dim = keys.decoder, keys.decoder.dimensions.head_dim
    usual: dict[str, tuple[Any, Any]] = {
        "embedding_scale": (decoder.embedding_scale, 1.0),
        "residual_scale": (decoder.layers[0].residual_scale, 1.0),
        "logit_scale": (decoder.logit_scale, 1.0),
        "final softcap": (decoder.logit_softcap, None),
    }
    for attention in keys.attentions:
        usual["score scale"] = (attention.scale or head_dim**-0.5, head_dim**-0.5)
        usual["score softcap"] = (attention.softcap, None)
    for name, (value, expected) in usual.items():
        expected = told.get(name.replace(" ", "_"), expected)
        if value is None or expected is None:
            is_same = value is expected
        else:
            is_same = math.isclose(value, expected, rel_tol=_SAME)
        if not is_same:
            raise keys.refuse(f"a {name.replace('_', ' ')} of {value:.6g}")


def granite_scales(keys: ModelKeys) -> None:
    """Tells Granite's factors, each of which has a key."""
    decoder, attention = keys.decoder, keys.attentions[0]
    scale = attention.scale or decoder.dimensions.head_dim**-0.5
    keys.values |= {
        "attention.scale": float(scale),
        "embedding_scale": float(decoder.embedding_scale),
        "residual_scale": float(decoder.layers[0].residual_scale),
        "logit_scale": 1.0 / decoder.logit_scale,
    }
    check_scales(
        keys,
        embedding_scale=decoder.embedding_scale,
        residual_scale=decoder.layers[0].residual_scale,
        logit_scale=decoder.logit_scale,
        score_scale=scale,
    )


def window_keys(keys: ModelKeys) -> None:
    """Adds the window and its pattern."""
    windows = [attention.window for attention in keys.attentions]
    widths = {window for window in windows if window is not None}
    kind = keys.llama_cpp.windows
    if kind == "of 64 layers":  # llama.cpp knows that family's largest model by it
        kind = "periodic" if len(windows) == 64 else "none"
    if not widths and kind != "every other":
        return
    if len(widths) > 1:
        raise keys.refuse(f"windows of {len(widths)} widths")
    if kind == "none":
        [width] = widths
        keys.notes.append(
            f"llama.cpp has no sliding window for {keys.model_type} models: texts of more than "
            f"{width:,} tokens are computed otherwise there than here"
        )
        if keys.llama_cpp.label in ("LLAMA", "PHI3"):  # by which the file is read back
            keys.values["attention.sliding_window"] = width
        return
    slides = [window is not None for window in windows]
    period = _period(slides)
    if period is None or (kind == "every other" and period != 2):
        raise keys.refuse("this order of layers with and without a window")
    if widths:
        keys.values["attention.sliding_window"] = widths.pop()
    if kind == "periodic":
        keys.values["attention.sliding_window_pattern"] = period


def _period(slides: list[bool]) -> int | None:
    """The n by which each n-th layer sees everything, all others slide; 0 where all slide."""
    if all(slides):
        return 0
    period = slides.index(False) + 1
    expected = [(i + 1) % period != 0 for i in range(len(slides))]
    return period if slides == expected else None


Number = TypeVar("Number", bound="np.generic[Any]")


def to_pairs(array: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Rows of each head, from halves that rotate together to neighbours."""
    if not heads:
        return array
    halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
