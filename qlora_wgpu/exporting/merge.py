"""An adapter merged into its base model: W + scaling · B·A, in the base's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import FLOATS, Entry
from qlora_wgpu.checkpoint.stored_weight import ExpertStack, StoredWeight
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.config.loading import config_of_run, find_run
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.exporting.folders import Tensors, as_dtype, without_keys, write_folder
from qlora_wgpu.exporting.scored import ScoredHead
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.lora import AdapterConfig, load_adapter
from qlora_wgpu.lora.compatibility import adapter_shapes, refuse_other_base, rows_for
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.lora.peft_files import stored_rows
from qlora_wgpu.lora.peft_names import WHOLE, adapted_layers, of_kind, split_biases
from qlora_wgpu.lora.targets import saved_modules
from qlora_wgpu.lora.trained_tokens import Vocabulary, check_ends
from qlora_wgpu.model.adapter_state import config_of
from qlora_wgpu.model.checkpoint_reader import stored_embedding, stored_name
from qlora_wgpu.model.pretrained import check_stored_shapes, has_own_head
from qlora_wgpu.quant import quantize_nf4

Base = Literal["original", "dequantized"]
FloatArray = npt.NDArray[np.float32]
Change = TypeVar("Change")


class MergedWeights:
    """W + scaling · B·A of adapted layers, trained rows and matrices, and all other weights.

    Attributes:
        folder: The base.
        architecture: The model in its config.json, with the adapter's new tokens.
        untied: The stored tensors of embedding and head by their new names, if they were tied and
            the adapter has a pair on either; otherwise empty.
        scored: The head of a reward model or classifier, which replaces ``lm_head``, if the adapter
            has one.
    """

    folder: ModelFolder
    architecture: Architecture
    scored: ScoredHead | None

    def __init__(
        self,
        model: str | PathLike[str],
        adapter: str | PathLike[str],
        base: Base = "original",
        quant: QuantConfig | None = None,
    ) -> None:
        if base not in get_args(Base):
            raise ConfigError(f"base must be 'original' or 'dequantized', got {base!r}")
        self.folder = folder = ModelFolder.open(model)
        self.architecture = architecture = find_family(folder.config).read(folder.config)
        check_stored_shapes(folder, architecture)
        tensors, config = load_adapter(adapter, biases=True, stacking=architecture.stacking)
        self.scored = ScoredHead.of(adapter, folder, architecture, tensors)
        if self.scored is not None:
            self.architecture = architecture = self.scored.architecture
        rows = rows_for(architecture, config, tensors)
        self.architecture = architecture = architecture.resized(rows)
        self._linears = {
            stored_name(folder, architecture, f"{s.stored}.weight"): s
            for s in architecture.every_linear
        }
        shapes = adapter_shapes(architecture, config)
        refuse_other_base(adapter, config, tensors, shapes, model, whole=False)
        self._is_tied = architecture.tied and not has_own_head(folder, architecture)
        self._check_vocabulary(tensors, config)
        modules = {
            spec.name: stored_name(folder, architecture, f"{spec.stored}.weight")
            for spec in architecture.every_linear
        }
        others = [f"{spec.name}.weight" for spec in architecture.routers]
        for weight in (architecture.embed_name, architecture.head_name, *others):
            modules[weight.removesuffix(".weight")] = stored_name(folder, architecture, weight)
        self._pairs: dict[str, tuple[FloatArray, FloatArray, float, FloatArray | None]] = {}
        sources = {spec.name: spec.stored for spec in architecture.linears}
        for layer in adapted_layers(tensors):
            if sources.get(layer.module) in architecture.shared_linears:
                raise UnsupportedModelError(
                    f"{adapter} adapts {layer.module}, whose weight other layers also use, so it "
                    "cannot be merged: use the adapter with its base"
                )
            scaling = config.scaling_of(layer.module)
            self._pairs[modules[layer.module]] = (layer.a, layer.b, scaling, layer.magnitude)
        self.untied = self._untied_ends()
        self._biases = self._trained_biases(tensors, adapter)
        self._rows = self._for_both_ends(
            {f"{rows.module}.weight": rows for rows in stored_rows(tensors, config)}
        )
        self._wholes = self._for_both_ends(
            {f"{module}.weight": array for module, array in of_kind(tensors, WHOLE).items()}
        )
        if base == "dequantized" and started_in(adapter, split_biases(tensors)[0], config):
            raise UnsupportedModelError(
                f"{adapter} was initialized from the base's weights and trained with the quantized "
                "residual, so it cannot be merged into dequantized weights: merge it into the "
                "original weights (--base original)"
            )
        self._base = base
        run = find_run(adapter)
        self._quant = quant or (QuantConfig() if run is None else config_of_run(run).quant)
        # Unquantized weights of a quantized folder were not quantized in training either.
        self._quantizes = (
            base == "dequantized" and self._quant.scheme == "nf4" and not folder.is_quantized
        )

    def stored_name(self, name: str) -> str:
        """The name of a model's tensor in the base's files."""
        return stored_name(self.folder, self.architecture, name)

    def source_of(self, name: str) -> str:
        """The stored tensor of a merged weight: its own, or the tied matrix it had been."""
        return self.untied.get(name, name)

    def untied_from(self, name: str) -> list[str]:
        """The merged weights of other names that a stored tensor is the source of."""
        return [new for new, source in self.untied.items() if source == name != new]

    def is_adapted(self, name: str) -> bool:
        """Whether the adapter changes a stored weight."""
        changed = (self._pairs, self._biases, self._rows, self._wholes)
        return any(name in each for each in changed)

    def is_as_stored(self, name: str) -> bool:
        """Whether a stored tensor is copied unchanged."""
        if self.folder[name].is_quantized:
            if self._base == "original":
                raise UnsupportedModelError(
                    f"{self.folder.path} is quantized and its original weights are unknown: "
                    "merge into the dequantized weights (--base dequantized), or into the "
                    "unquantized model"
                )
            return False
        return not self.is_adapted(name) and not (self._quantizes and name in self._linears)

    def float32(self, name: str) -> FloatArray:
        """A merged weight, by its name in the files."""
        folder, settings = self.folder, self._quant
        if name in self._biases:
            return self._biases[name]
        if name in self._wholes:
            return self._wholes[name]
        weight = folder[self.source_of(name)].read()
        if name in self._rows:
            weight = self._resized(weight)
            weight[list(self._rows[name].indices)] = self._rows[name].rows
        if name in self._linears and (self._quantizes or self._was_requantized(name)):
            weight = quantize_nf4(weight, settings.blocksize, settings.double_quant).dequantize()
        if name not in self._pairs:
            return weight
        a, b, scaling, magnitude = self._pairs[name]
        weight += np.float32(scaling) * (b @ a)
        if magnitude is not None:
            weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        return weight

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a merged weight."""
        if name in self._wholes:
            return self._wholes[name].shape
        shape = self.folder[self.source_of(name)].shape
        return (self.architecture.vocab_size, *shape[1:]) if name in self._rows else shape

    @property
    def is_resized(self) -> bool:
        """Whether the adapter has added tokens."""
        return self.architecture.stored_rows is not None

    def config(self) -> dict[str, Any]:
        """The base's config.json with the new size of the vocabulary, and untied if need be."""
        config: dict[str, Any] = dict(self.folder.config)
        inner = config.get("text_config")
        changes: dict[str, Any] = {"tie_word_embeddings": False} if self.untied else {}
        config |= changes
        if self.is_resized:
            size = {"vocab_size": self.architecture.vocab_size}
            changes |= size
            config |= size if "vocab_size" in config or "text_config" not in config else {}
        if isinstance(inner, dict):
            config["text_config"] = {**inner, **changes}
        return config if self.scored is None else self.scored.config(config)

    def _was_requantized(self, name: str) -> bool:
        return self._base == "dequantized" and self.folder[name].must_requantize

    def _resized(self, weight: FloatArray) -> FloatArray:
        """A matrix with rows for added tokens, all of which the adapter has."""
        more = self.architecture.vocab_size - len(weight)
        return np.concatenate([weight, np.zeros((more, weight.shape[1]), np.float32)])

    def _check_vocabulary(self, tensors: Mapping[str, FloatArray], config: AdapterConfig) -> None:
        vocabulary = replace(Vocabulary.of(self.architecture), tied=self._is_tied)
        adapted = {layer.module for layer in adapted_layers(tensors)}
        has_pair = not adapted.isdisjoint((vocabulary.embedding, vocabulary.head))
        if not (has_pair or config.modules_to_save or config.trainable_token_indices):
            return
        own = config_of(config, tensors, self.architecture)
        saved_modules(own, vocabulary)
        rows = vocabulary.trained(own.trainable_token_indices)
        check_ends(own, vocabulary, adapted, trains_rows=bool(rows))

    def _for_both_ends(self, found: dict[str, Change]) -> dict[str, Change]:
        """Changes of embedding and head by their stored names; both get a tied one's change."""
        if self._is_tied and found:
            ends = self.architecture.embed_name, self.architecture.head_name
            found = dict.fromkeys(ends, next(iter(found.values())))
        by_name = {self.stored_name(name): each for name, each in found.items()}
        return {name: each for name, each in by_name.items() if name in self.folder}

    def _untied_ends(self) -> dict[str, str]:
        """See ``untied``."""
        ends = [
            self.stored_name(name)
            for name in (self.architecture.embed_name, self.architecture.head_name)
        ]
        if not self._is_tied or not any(name in self._pairs for name in ends):
            return {}
        shared = self.stored_name(stored_embedding(self.folder, self.architecture))
        return {name: name if name in self.folder else shared for name in ends}

    def _trained_biases(
        self, tensors: Mapping[str, FloatArray], adapter: str | PathLike[str]
    ) -> dict[str, FloatArray]:
        """Trained biases, by the stored names of those that they replace."""
        _, trained = split_biases(tensors)
        biases = {self.stored_name(f"{module}.bias"): a for module, a in trained.items()}
        for name, array in biases.items():
            if name not in self.folder or self.folder[name].shape != array.shape:
                raise CheckpointError(
                    f"{adapter} has a trained {name} of {array.size} numbers, which does not exist "
                    f"in {self.folder.path}: merge it into the model that it was trained on"
                )
        return biases


def merge(
    model: str | PathLike[str],
    adapter: str | PathLike[str],
    out: str | PathLike[str],
    *,
    base: Base = "original",
    quant: QuantConfig | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Writes a merged model for transformers, with one tensor in memory at a time.

    It has the adapter's tokenizer and chat template, if the adapter has them.

    Args:
        model: Folder or Hub name of the base.
        adapter: Folder of the PEFT adapter.
        out: The new folder.
        base: Weights to add the adapter to: the stored 16-bit weights ("original"), or the weights
            that it was trained with ("dequantized").
        quant: How the base was quantized, for "dequantized"; by default as in the config.yaml of
            the adapter's run, or ``QuantConfig``'s defaults without a run.
        progress: Called with each tensor's name before it is written.
    """
    if ModelFolder.without_weights(model).splits_experts:
        raise UnsupportedModelError(
            f"{model}: transformers requires stacked experts, which a GGUF file does not have: "
            "merge into the model's safetensors version"
        )
    merged = MergedWeights(model, adapter, base, quant)
    folder = merged.folder

    def tensors_of(tensor: str) -> Tensors:
        stack = folder.stack(tensor)
        if stack is not None and not all(map(merged.is_as_stored, stack.parts)):
            part = folder[stack.parts[0]]
            entry = Entry(part.dtype, stack.shape(*part.shape))
            return {stack.name: (entry, lambda: merged_stack(stack, part.dtype))}
        weight = folder.weight_in(tensor)
        if weight is None:
            return {}
        name, dtype = weight.name, weight.dtype
        if merged.scored is not None and name in merged.scored.replaced:
            return {}
        if merged.scored is not None and name == merged.scored.follows:
            return unscored(name, dtype, weight) | merged.scored.tensors()
        return unscored(name, dtype, weight)

    def unscored(name: str, dtype: str, weight: StoredWeight) -> Tensors:
        if others := merged.untied_from(name):
            return {each: floats(each, dtype) for each in (name, *others)}
        if merged.is_as_stored(name):
            return {name: (Entry(dtype, weight.shape), weight.raw)}
        if dtype not in FLOATS:
            raise UnsupportedModelError(f"{model}: {name} must be stored as floats, got {dtype}")
        return {name: floats(name, dtype)}

    def floats(name: str, dtype: str) -> tuple[Entry, Callable[[], npt.NDArray[Any]]]:
        return Entry(dtype, merged.shape(name)), lambda: as_dtype(merged.float32(name), dtype)

    def merged_stack(stack: ExpertStack, dtype: str) -> npt.NDArray[Any]:
        return stack.joined([as_dtype(merged.float32(part), dtype) for part in stack.parts])

    config_json: dict[str, Any] = without_keys(merged.config(), ["quantization_config"])
    write_folder(folder, Path(out), config_json, tensors_of, progress, adapter=adapter)
