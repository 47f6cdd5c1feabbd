"""A base model's folder, its architecture by config.json, and each weight's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import lt
from os import PathLike
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.quantized import PlannedFormats
from qlora_wgpu.checkpoint.safetensors_file import FLOATS
from qlora_wgpu.checkpoint.stored_weight import StoredWeight
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import SCORE, Architecture, Family, find_family
from qlora_wgpu.lora import AdapterConfig
from qlora_wgpu.lora.compatibility import rows_for
from qlora_wgpu.lora.peft_names import WHOLE, Float32Array, tensor_name
from qlora_wgpu.model.checkpoint_reader import stored_embedding, stored_name
from qlora_wgpu.quant import WeightFormat, nf4_format

_ROWS = 4096  # compared at a time
SCORED = frozenset((
    "arcee", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4",
    "gpt_neox", "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "ministral3",
    "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "zamba2",
))  # fmt: skip
"""The model types that have a ``…ForSequenceClassification`` in transformers 5.23."""


def stored_classes(config: Mapping[str, Any]) -> int:
    """The classes of a config.json of a reward model or classifier; 0 for a language model."""
    names = config.get("architectures")
    is_scored = isinstance(names, list) and any(
        str(name).endswith("ForSequenceClassification") for name in names
    )
    if not is_scored:
        return 0
    labels, count = config.get("id2label"), config.get("num_labels", 2)
    count = len(labels) if isinstance(labels, Mapping) and labels else count
    if type(count) is not int or count < 1:
        raise UnsupportedModelError(f"num_labels in config.json must be an integer, got {count!r}")
    return count


def has_own_head(folder: ModelFolder, architecture: Architecture) -> bool:
    """Whether the files have a head other than the embedding; transformers then uses both."""
    names = architecture.embed_name, architecture.head_name
    embedding, head = (stored_name(folder, architecture, name) for name in names)
    one, other = folder.find(embedding), folder.find(head)
    return one is not None and other is not None and not _equal(one, other)


def _equal(one: StoredWeight, other: StoredWeight) -> bool:
    if one.shape != other.shape:
        return False
    if one.stored_dtype != other.stored_dtype:
        return np.array_equal(one.read(), other.read())
    a, b = one.raw(), other.raw()
    return all(np.array_equal(a[i : i + _ROWS], b[i : i + _ROWS]) for i in range(0, len(a), _ROWS))


def check_stored_shapes(folder: ModelFolder, architecture: Architecture) -> None:
    """Refuses a config.json with larger shapes than the files' headers.

    Smaller shapes are checked when the tensors are read.
    """
    embedding = {architecture.embed_name: stored_embedding(folder, architecture)}
    for name, expected in tensor_shapes(architecture).items():
        stored = stored_name(folder, architecture, embedding.get(name, name))
        weight = folder[stored]
        if not weight.is_quantized and weight.stored_dtype not in FLOATS:
            continue  # refused when it is read
        shape = weight.shape
        if len(shape) != len(expected) or any(map(lt, shape, expected)):
            raise CheckpointError(
                f"{folder.path}: {stored} has shape {shape}, expected {expected} by config.json"
            )


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    size = (architecture.vocab_size, architecture.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {architecture.embed_name: size}
    if not architecture.tied and not architecture.classes:  # whose head the adapter has
        shapes[architecture.head_name] = size
    shapes |= architecture.stored_norms
    shapes |= architecture.tables
    shapes |= architecture.router_shapes
    for spec in architecture.every_linear:
        shapes[f"{spec.stored}.weight"] = spec.out_features, spec.in_features
        if spec.bias:
            shapes[f"{spec.stored}.bias"] = (spec.out_features,)
    return shapes


class QuantizationPolicy:
    """Chooses the quantized format, or floats, of each layer.

    A quantized folder decides for each of its layers: what it keeps in 16 bits is so on purpose.
    The scheme quantizes a folder that is not.
    """

    def __init__(
        self,
        quant: QuantConfig,
        folder: ModelFolder | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._scheme, self._own = quant.scheme, nf4_format(quant.blocksize, quant.double_quant)
        self._folder = folder if folder is not None and folder.is_quantized else None
        plan = None if folder is not None or config is None else config.get("quantization_config")
        self._planned = PlannedFormats(plan) if isinstance(plan, Mapping) else None

    def of(self, names: Sequence[str], columns: int) -> WeightFormat | None:
        """The quantized format of a layer, or of several experts' layers; None for floats."""
        if self._scheme == "none":
            return None
        if self._planned is not None:
            return self._planned.format(names[0], columns)
        if self._folder is None:
            return self._own
        forms = [self._form(self._folder, name) for name in names]
        return None if None in forms else forms[0]

    def _form(self, folder: ModelFolder, name: str) -> WeightFormat | None:
        weight = folder[name]
        return self._own if weight.must_requantize else weight.format


def stored_formats(folder: ModelFolder, architecture: Architecture) -> Counter[str]:
    """The number of linear layers of a quantized folder in each format, by name.

    A layer's first expert stands for all. Layers in floats, or in a format that no kernel supports,
    are left out.
    """
    counts: Counter[str] = Counter()
    if not folder.is_quantized:
        return counts
    several = [(stack.linears[0], len(stack.linears)) for stack in architecture.experts]
    for spec, count in [*((spec, 1) for spec in architecture.linears), *several]:
        form = folder[stored_name(folder, architecture, f"{spec.stored}.weight")].format
        if form is not None:
            counts[form.name] += count
    return counts


def planned_formats(config: Mapping[str, Any], architecture: Architecture) -> list[str]:
    plan = config.get("quantization_config")
    if not isinstance(plan, Mapping):
        return []
    planned = PlannedFormats(plan)
    forms = [planned.format(f"{s.name}.weight", s.in_features) for s in architecture.linears]
    return sorted({form.name for form in forms if form is not None})


def kept_in_floats(folder: ModelFolder, architecture: Architecture) -> list[str]:
    """The linear layers that a quantized folder keeps as floats; none if it is not quantized."""
    if not folder.is_quantized:
        return []
    return [
        spec.name
        for spec in architecture.every_linear
        if not folder[stored_name(folder, architecture, f"{spec.stored}.weight")].is_quantized
    ]


@dataclass(frozen=True)
class Pretrained:
    """A base model before anything of it is on a device."""

    name_or_path: str  # as the user named it
    config: Mapping[str, Any]  # the contents of config.json
    family: Family  # the code that computes it
    architecture: Architecture  # the architecture that the family reads in config.json
    folder: ModelFolder | None = None  # the open files; None if only config.json is known
    notes: tuple[str, ...] = ()  # notes for the user about the files
    # The formats in which linear layers are quantized already, "Q4_K, Q6_K"; empty for floats.
    stored_as: str = ""

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Pretrained:
        folder = ModelFolder.open(str(path))
        pretrained = cls.from_folder(folder, str(path))
        check_stored_shapes(folder, pretrained.architecture)
        return pretrained

    @classmethod
    def from_folder(cls, folder: ModelFolder, name_or_path: str) -> Pretrained:
        family = find_family(folder.config)
        architecture = family.read(folder.config)
        if classes := stored_classes(folder.config):
            architecture = architecture.scored(classes)
        notes = list(folder.notes)
        formats = stored_formats(folder, architecture)
        if formats.keys() - {"NF4"}:
            counts = ", ".join(f"{count} in {name}" for name, count in formats.most_common())
            notes.append(f"linear layers stay as stored: {counts}")
        if kept := kept_in_floats(folder, architecture):
            notes.append(
                f"{len(kept)} of {len(architecture.every_linear)} linear layers are stored as "
                f"floats and stay so, while the others are quantized ({kept[0]} is the first)"
            )
        if architecture.tied and has_own_head(folder, architecture):
            architecture = replace(architecture, tied=False)
            notes.append(
                f"config.json ties the head to the embedding, but the files contain another "
                f"{architecture.head_name}, which is used, as in transformers"
            )
        if more := sum(name.startswith("mtp.") for name in folder.names()):
            notes.append(f"{more} tensors of multi-token prediction layers (mtp.*) are ignored")
        stored_as = ", ".join(sorted(formats))
        return cls(
            name_or_path, folder.config, family, architecture, folder, tuple(notes), stored_as
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> Pretrained:
        family = find_family(config)
        architecture = family.read(config)
        if classes := stored_classes(config):
            architecture = architecture.scored(classes)
        stored_as = ", ".join(planned_formats(config, architecture))
        return cls(name, config, family, architecture, stored_as=stored_as)

    def resized(self, rows: int, new_tokens: tuple[int, ...] = ()) -> Pretrained:
        """The same base with a larger vocabulary; see ``Architecture.resized``."""
        return replace(self, architecture=self.architecture.resized(rows, new_tokens))

    def without_new(self) -> Pretrained:
        """The same base without added tokens, so that only an adapter's own rows are trained."""
        return replace(self, architecture=replace(self.architecture, new_tokens=()))

    def scored(self, classes: int) -> Pretrained:
        """The same base with the head of a reward model or classifier."""
        kind = self.config.get("model_type")
        if kind not in SCORED:
            raise UnsupportedModelError(
                f"reward models and classifiers of model_type {kind!r} are not supported, since "
                "transformers has no ForSequenceClassification for it"
            )
        own = self.architecture.classes
        if own and own != classes:
            raise UnsupportedModelError(
                f"{self.name_or_path} is a classifier with {own} classes, but {classes} are "
                "required: use its language model as the base"
            )
        return replace(self, architecture=self.architecture.scored(classes))

    def for_adapter(self, stored: AdapterConfig, tensors: Mapping[str, Float32Array]) -> Pretrained:
        head = tensors.get(tensor_name(SCORE.removesuffix(".weight"), WHOLE))
        if head is not None and not self.architecture.classes:
            return self.scored(len(head)).for_adapter(stored, tensors)
        rows = rows_for(self.architecture, stored, tensors)
        return self if rows == self.architecture.vocab_size else self.resized(rows)

    def scheme(self, quant: QuantConfig) -> str:
        """The format of linear layers in a few words: the requested scheme, or the stored one."""
        if quant.scheme == "none" or self.stored_as in ("", "NF4"):
            return quant.scheme
        return self.stored_as
