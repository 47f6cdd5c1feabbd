"""An adapter merged into its base model: W + scaling · B·A, in the base's own element type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import FLOATS, Entry
from qlora_wgpu.checkpoint.stored_weight import ExpertStack
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.config.loading import config_of_run, find_run
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.exporting.folders import Tensors, as_dtype, without, write_folder
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
    """W + scaling · B·A of each layer that an adapter has, and all other weights as they are.

    Trained rows of the embedding, or of a head, are in their places.

    Attributes:
        folder: The base.
        architecture: What its config.json describes.
        untied: Embedding and head, and the stored tensors that they are made of, where they were
            one and the adapter has a pair on either; else empty.
    """

    folder: ModelFolder
    architecture: Architecture

    def __init__(
        self,
        model: str | PathLike[str],
        adapter: str | PathLike[str],
        base: Base = "original",
        quant: QuantConfig | None = None,
    ) -> None:
        """Opens a base and an adapter; arguments as for ``merge``."""
        self.folder = folder = ModelFolder.open(model)
        self.architecture = architecture = find_family(folder.config).read(folder.config)
        check_stored_shapes(folder, architecture)
        tensors, config = load_adapter(adapter, biases=True, stacking=architecture.stacking)
        rows = rows_for(architecture, config, tensors)
        self.architecture = architecture = architecture.resized(rows)
        self._linears = {
            stored_name(folder, architecture, f"{s.name}.weight"): s
            for s in architecture.every_linear
        }
        shapes = adapter_shapes(architecture, config)
        refuse_other_base(adapter, config, tensors, shapes, model, whole=False)
        self._is_tied = architecture.tied and not has_own_head(folder, architecture)
        self._check_vocabulary(tensors, config)
        modules = {spec.name: name for name, spec in self._linears.items()}
        others = [f"{spec.name}.weight" for spec in architecture.routers]
        for weight in (architecture.embed_name, architecture.head_name, *others):
            modules[weight.removesuffix(".weight")] = stored_name(folder, architecture, weight)
        self._pairs: dict[str, tuple[FloatArray, FloatArray, float, FloatArray | None]] = {}
        for layer in adapted_layers(tensors):
            scaling = config.scaling_of(layer.module)
            self._pairs[modules[layer.module]] = (layer.a, layer.b, scaling, layer.magnitude)
        self.untied = self._untied_ends()
        self._biases = self._trained_biases(tensors, adapter)
        self._rows = self._by_ends(
            {f"{rows.module}.weight": rows for rows in stored_rows(tensors, config)}
        )
        self._wholes = self._by_ends(
            {f"{module}.weight": array for module, array in of_kind(tensors, WHOLE).items()}
        )
        if base == "dequantized" and started_in(adapter, split_biases(tensors)[0], config):
            raise UnsupportedModelError(
                f"{adapter} began as a part of its base and was trained beside the quantized rest, "
                "which no base has: merge it into the original weights (--base original)"
            )
        self._base = base
        run = find_run(adapter)
        self._quant = quant or (QuantConfig() if run is None else config_of_run(run).quant)
        # What a quantized folder keeps as floats was not quantized in training either.
        self._quantizes = (
            base == "dequantized" and self._quant.scheme == "nf4" and not folder.is_quantized
        )

    def stored_name(self, name: str) -> str:
        """The name of a model's tensor in the base's files."""
        return stored_name(self.folder, self.architecture, name)

    def source_of(self, name: str) -> str:
        """The stored tensor that one is made of: it, or for an end that is untied the other one."""
        return self.untied.get(name, name)

    def besides(self, name: str) -> list[str]:
        """What else the result holds that is made of a stored tensor."""
        return [new for new, source in self.untied.items() if source == name != new]

    def is_adapted(self, name: str) -> bool:
        """Whether the adapter changes the weight that is stored by this name."""
        changed = (self._pairs, self._biases, self._rows, self._wholes)
        return any(name in each for each in changed)

    def is_as_stored(self, name: str) -> bool:
        """Whether a stored tensor goes into the result as it is."""
        if self.folder[name].is_quantized:
            if self._base == "original":
                raise UnsupportedModelError(
                    f"{self.folder.path} is stored quantized, so its original weights are not "
                    "known: merge into the dequantized ones (--base dequantized), or into the "
                    "unquantized model"
                )
            return False
        return not self.is_adapted(name) and not (self._quantizes and name in self._linears)

    def float32(self, name: str) -> FloatArray:
        """The merged weight that is stored by this name."""
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
        """The shape of the merged weight that is stored by this name."""
        if name in self._wholes:
            return self._wholes[name].shape
        shape = self.folder[self.source_of(name)].shape
        return (self.architecture.vocab_size, *shape[1:]) if name in self._rows else shape

    @property
    def is_resized(self) -> bool:
        """Whether the adapter has added tokens."""
        return self.architecture.stored_rows is not None

    def config(self) -> dict[str, Any]:
        """The base's config.json with the size of the vocabulary, and the head untied if it is."""
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
        return config

    def _was_requantized(self, name: str) -> bool:
        """Whether training had a weight in NF4 that is stored in another form."""
        return self._base == "dequantized" and self.folder[name].must_requantize

    def _resized(self, weight: FloatArray) -> FloatArray:
        """A matrix with rows for the tokens that the adapter has added, all of which it has."""
        more = self.architecture.vocab_size - len(weight)
        return np.concatenate([weight, np.zeros((more, weight.shape[1]), np.float32)])

    def _check_vocabulary(self, tensors: Mapping[str, FloatArray], config: AdapterConfig) -> None:
        """Makes sure that what an adapter trained of embedding and head goes into the base's."""
        vocabulary = replace(Vocabulary.of(self.architecture), tied=self._is_tied)
        adapted = {layer.module for layer in adapted_layers(tensors)}
        has_pair = not adapted.isdisjoint((vocabulary.embedding, vocabulary.head))
        if not (has_pair or config.modules_to_save or config.trainable_token_indices):
            return
        own = config_of(config, tensors, self.architecture)
        saved_modules(own, vocabulary)
        rows = vocabulary.trained(own.trainable_token_indices)
        check_ends(own, vocabulary, adapted, trains_rows=bool(rows))

    def _by_ends(self, found: dict[str, Change]) -> dict[str, Change]:
        """What changes the ends, by their stored names; a tied one that files hold twice, twice."""
        if self._is_tied and found:
            ends = self.architecture.embed_name, self.architecture.head_name
            found = dict.fromkeys(ends, next(iter(found.values())))
        by_name = {self.stored_name(name): each for name, each in found.items()}
        return {name: each for name, each in by_name.items() if name in self.folder}

    def _untied_ends(self) -> dict[str, str]:
        """Each end by the stored tensor that it is made of; empty where they stay as they are."""
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
        """The biases that were trained beside the adapter, by the names of those they replace."""
        _, trained = split_biases(tensors)
        biases = {self.stored_name(f"{module}.bias"): a for module, a in trained.items()}
        for name, array in biases.items():
            if name not in self.folder or self.folder[name].shape != array.shape:
                raise CheckpointError(
                    f"{adapter} has a trained {name} of {array.size} numbers, which "
                    f"{self.folder.path} has not: merge it into the model that it was trained on"
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
    """Writes a merged model that transformers loads, one tensor in memory at a time.

    It has the tokenizer and the chat template that are kept beside the adapter, if there are any.

    Args:
        model: Folder or hub name of the base.
        adapter: Folder of the PEFT adapter.
        out: The new folder.
        base: Weights to add the adapter to: the stored 16-bit weights, or what they are after
            quantization, which the adapter was trained with.
        quant: How they were quantized, for "dequantized"; by default as the config.yaml of the
            adapter's run says, or with ``QuantConfig``'s defaults where it belongs to none.
        progress: Called with each tensor's name before it is written.
    """
    if ModelFolder.without_weights(model).parts_stacks:
        raise UnsupportedModelError(
            f"{model}: transformers reads the experts of a layer together, which are by themselves "
            "here: merge into the model's safetensors version"
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
        if besides := merged.besides(name):
            return {each: floats(each, dtype) for each in (name, *besides)}
        if merged.is_as_stored(name):
            return {name: (Entry(dtype, weight.shape), weight.raw)}
        if dtype not in FLOATS:
            raise UnsupportedModelError(f"{model}: {name} is stored as {dtype}, not as floats")
        return {name: floats(name, dtype)}

    def floats(name: str, dtype: str) -> tuple[Entry, Callable[[], npt.NDArray[Any]]]:
        return Entry(dtype, merged.shape(name)), lambda: as_dtype(merged.float32(name), dtype)

    def merged_stack(stack: ExpertStack, dtype: str) -> npt.NDArray[Any]:
        return stack.joined([as_dtype(merged.float32(part), dtype) for part in stack.parts])

    config_json: dict[str, Any] = without(merged.config(), ["quantization_config"])
    write_folder(folder, Path(out), config_json, tensors_of, progress, adapter=adapter)
