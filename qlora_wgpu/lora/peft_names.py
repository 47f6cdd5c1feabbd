"""PEFT's tensors of an adapter: their kinds, their names in files, and their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.families.family import LinearSpec

Float32Array = npt.NDArray[np.float32]

LORA_A = "lora_A"  # (r, in_features)
LORA_B = "lora_B"  # (out_features, r)
EMBEDDING_A = "lora_embedding_A"  # (r, vocab_size), of an embedding
EMBEDDING_B = "lora_embedding_B"  # (hidden_size, r)
MAGNITUDE = "lora_magnitude_vector"  # (out_features), of DoRA
WHOLE = "weight"  # an embedding or a head that is trained whole
TOKENS = "token_adapter.trainable_tokens_delta"  # trained rows of an embedding or a head

RANK_AXIS = {LORA_A: 0, LORA_B: 1, EMBEDDING_A: 0, EMBEDDING_B: 1}
"""The axis of a pair's matrices that has r elements."""
OTHER_OF_PAIR = {
    LORA_A: LORA_B, LORA_B: LORA_A, EMBEDDING_A: EMBEDDING_B, EMBEDDING_B: EMBEDDING_A,
}  # fmt: skip
BIAS_KINDS = ("none", "lora_only", "all")
"""PEFT's ``bias``: which of the base's biases were trained; here none are."""

_PREFIX = "base_model.model."
# PEFT leaves the adapter's name out of files; some tools keep it: lora_A.default.weight.
_NAME = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+)\."
    rf"(?:(?P<matrix>{LORA_A}|{LORA_B})(?:\.[^.]+)?\.weight|(?P<vector>{MAGNITUDE})(?:\..+)?"
    rf"|(?P<embedding>{EMBEDDING_A}|{EMBEDDING_B})(?:\.[^.]+)?"
    rf"|(?P<rows>{re.escape(TOKENS)})(?:\.[^.]+)?)"
)
_WHOLE = re.compile(rf"{re.escape(_PREFIX)}(?P<module>(?:(?!\.lora_|\.base_layer).)+)\.{WHOLE}")
# PEFT wraps layers that have a pair, and calls their own biases base_layer.bias.
_BIAS = re.compile(rf"{re.escape(_PREFIX)}(?P<module>.+?)(?<!\.lora_[AB])(?:\.base_layer)?\.bias")
# The prefix of names before transformers 4.52, when a model's text part was a model by itself.
_BEFORE = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}


def tensor_name(module: str, leaf: str) -> str:
    """PEFT's name in files of a module's A, B, magnitude, trained rows or whole weight."""
    return f"{_PREFIX}{module}.{leaf}" + (".weight" if leaf in (LORA_A, LORA_B) else "")


def parse_name(name: str) -> tuple[str, str] | None:
    """The module and the leaf of a tensor's name, which may contain the adapter's; else None."""
    match = _NAME.fullmatch(name)
    if match is not None:
        leaf = match["matrix"] or match["vector"] or match["embedding"] or match["rows"]
    elif (match := _WHOLE.fullmatch(name)) is not None:
        leaf = WHOLE
    else:
        return None
    module = match["module"]
    for before, now in _BEFORE.items():
        if module.startswith(before):
            module = now + module.removeprefix(before)
    return module, leaf


def parsed_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The modules and leaves of all names that ``parse_name`` knows."""
    return filter(None, map(parse_name, names))


def of_kind(tensors: Mapping[str, Float32Array], leaf: str) -> dict[str, Float32Array]:
    parsed = ((parse_name(name), array) for name, array in tensors.items())
    return {each[0]: array for each, array in parsed if each is not None and each[1] == leaf}


def pair_shapes(
    spec: LinearSpec, rank: int, leaves: tuple[str, str] = (LORA_A, LORA_B)
) -> dict[str, tuple[int, int]]:
    a, b = (tensor_name(spec.name, leaf) for leaf in leaves)
    return {a: (rank, spec.in_features), b: (spec.out_features, rank)}


def is_named(name: str, target: str) -> bool:
    """Whether a target is a module's or parameter's name, or the last parts of it."""
    return name == target or name.endswith("." + target)


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer's tensors; scaling · b·a is added to its stored weight."""

    module: str
    a: Float32Array  # (r, in_features); of an embedding (r, hidden_size), PEFT's B transposed
    b: Float32Array  # (out_features, r); of an embedding (vocab_size, r), PEFT's A transposed
    magnitude: Float32Array | None  # DoRA's, (out_features), if it is one


def adapted_layers(tensors: Mapping[str, Float32Array]) -> Iterator[AdaptedLayer]:
    for module, a in of_kind(tensors, LORA_A).items():
        b, magnitude = tensors[tensor_name(module, LORA_B)], tensor_name(module, MAGNITUDE)
        yield AdaptedLayer(module, a, b, tensors.get(magnitude))
    for module, a in of_kind(tensors, EMBEDDING_A).items():
        yield AdaptedLayer(module, tensors[tensor_name(module, EMBEDDING_B)].T, a.T, None)


def bias_name(module: str) -> str:
    return f"{_PREFIX}{module}.bias"


def split_biases(
    tensors: Mapping[str, Float32Array],
) -> tuple[dict[str, Float32Array], dict[str, Float32Array]]:
    pairs, biases = {}, {}
    for name, array in tensors.items():
        if match := _BIAS.fullmatch(name):
            biases[match["module"]] = array
        else:
            pairs[name] = array
    return pairs, biases
