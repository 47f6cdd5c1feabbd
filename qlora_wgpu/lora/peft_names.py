"""PEFT's names of tensors, put together and taken apart: the one place that knows them.

They take the place of the base's own. Nothing here trains them; they are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

LORA_A = "lora_A"
LORA_B = "lora_B"
EMBEDDING_A = "lora_embedding_A"  # (r, vocab_size), of an embedding
EMBEDDING_B = "lora_embedding_B"  # (hidden_size, r)
MAGNITUDE = "lora_magnitude_vector"  # of DoRA
WHOLE = "weight"  # an embedding or a head that is trained whole
TOKENS = "token_adapter.trainable_tokens_delta"  # trained rows of an embedding or a head

_PREFIX = "base_model.model."
# PEFT leaves the adapter's own name out of files; some tools keep it: lora_A.default.weight.
_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+)\."
    rf"(?:(?P<matrix>{LORA_A}|{LORA_B})(?:\.[^.]+)?\.weight|(?P<vector>{MAGNITUDE})(?:\..+)?"
    rf"|(?P<embedding>{EMBEDDING_A}|{EMBEDDING_B})(?:\.[^.]+)?"
    rf"|(?P<rows>{re.escape(TOKENS)})(?:\.[^.]+)?)"
)


_WHOLE = re.compile(rf"{re.escape(_PREFIX)}(?P<module>(?:(?!\.lora_|\.base_layer).)+)\.{WHOLE}")
_BEFORE = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}
_WITHOUT_SUFFIX = (EMBEDDING_A, EMBEDDING_B, MAGNITUDE, TOKENS, WHOLE)

_OTHER = {LORA_A: LORA_B, LORA_B: LORA_A, EMBEDDING_A: EMBEDDING_B, EMBEDDING_B: EMBEDDING_A}


def tensor_name(module: str, leaf: str) -> str:
    """PEFT's name in files of a module's A, B, magnitude, trained rows or whole weight."""
    return f"{_PREFIX}{module}.{leaf}" + ("" if leaf in _WITHOUT_SUFFIX else ".weight")


def parse_name(name: str) -> tuple[str, str] | None:
    """The module and the leaf of a name, the adapter's own name in it or not; None if neither."""
    match = _NAME.fullmatch(name)
    if match is None:
        whole = _WHOLE.fullmatch(name)
        return None if whole is None else (_called_now(whole["module"]), WHOLE)
    leaf = match["matrix"] or match["vector"] or match["embedding"] or match["rows"]
    return _called_now(match["module"]), leaf


def _called_now(module: str) -> str:
    """A module's name since transformers 4.52, before which text parts of models were models."""
    for before, now in _BEFORE.items():
        if module.startswith(before):
            return now + module.removeprefix(before)
    return module


def other_of_pair(leaf: str) -> str | None:
    """What belongs to an A or a B; None of what is no part of a pair."""
    return _OTHER.get(leaf)


def is_a(leaf: str) -> bool:
    """Whether of a pair it is the one with r rows."""
    return leaf in (LORA_A, EMBEDDING_A)


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer's tensors: what is added to its weight as it is stored is scaling · b·a.

    Attributes:
        module: The layer's full name.
        a: (r, in_features); of an embedding (r, hidden_size), PEFT's B transposed.
        b: (out_features, r); of an embedding (vocab_size, r), PEFT's A transposed.
        magnitude: DoRA's, (out_features), if it is one.
    """

    module: str
    a: Float32Array
    b: Float32Array
    magnitude: Float32Array | None


def adapted_layers(tensors: Mapping[str, Float32Array]) -> Iterator[AdaptedLayer]:
    """The layers of an adapter as ``load_adapter`` reads it."""
    for name, a in tensors.items():
        parsed = parse_name(name)
        if parsed is not None and parsed[1] == LORA_A:
            module = parsed[0]
            b = tensors[tensor_name(module, LORA_B)]
            yield AdaptedLayer(module, a, b, tensors.get(tensor_name(module, MAGNITUDE)))
        if parsed is not None and parsed[1] == EMBEDDING_A:
            yield AdaptedLayer(parsed[0], tensors[tensor_name(parsed[0], EMBEDDING_B)].T, a.T, None)


KINDS = ("none", "lora_only", "all")

_BIAS = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+?)(?<!\.lora_[AB])(?:\.base_layer)?\.bias")


def bias_name(module: str) -> str:
    """The name of a module's bias among an adapter's tensors, whether that has a pair or not."""
    return f"{_PREFIX}{module}.bias"


def module_of(name: str) -> str | None:
    """The module whose bias a tensor of a file is; None if it is no bias.

    PEFT wraps layers that have a pair, and calls their own biases ``base_layer.bias``.
    """
    match = _BIAS.fullmatch(name)
    return None if match is None else match["module"]


def split_biases(
    tensors: Mapping[str, Float32Array],
) -> tuple[dict[str, Float32Array], dict[str, Float32Array]]:
    """An adapter's tensors without biases, and its biases by their modules."""
    pairs, biases = {}, {}
    for name, array in tensors.items():
        module = module_of(name)
        if module is None:
            pairs[name] = array
        else:
            biases[module] = array
    return pairs, biases
