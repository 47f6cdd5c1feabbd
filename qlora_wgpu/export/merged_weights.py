"""A base's weights with an adapter in them, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.export.merged_rows import check_vocabulary, trained_rows_by_name, wholes_by_name
from qlora_wgpu.export.untied_ends import untied_ends
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.compatibility import adapter_shapes, refuse_other_base, rows_for
from qlora_wgpu.lora.init import started_in
from qlora_wgpu.lora.peft_names import adapted_layers, split_biases
from qlora_wgpu.model.checkpoint_reader import stored_name
from qlora_wgpu.model.pretrained import check_stored_shapes
from qlora_wgpu.quant import quantize_nf4

Base = Literal["original", "dequantized"]
FloatArray = npt.NDArray[np.float32]


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
        """Opens a base and an adapter.

        Args:
            model: Folder or hub name of the base.
            adapter: Folder of the PEFT adapter.
            base: Weights to add the adapter to: those that are stored, or what they are after
                quantization, which the adapter was trained with.
            quant: How they were quantized, for "dequantized"; by default as the config.yaml of
                the adapter's run says, or with ``QuantConfig``'s defaults where it belongs to
                none.

        Raises:
            CheckpointError: If a file is missing or damaged, or the adapter does not fit.
            UnsupportedModelError: If the base is none that is computed here.
        """
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
        routers = architecture.routers
        refuse_other_base(adapter, config, tensors, shapes, model, whole=False, routers=routers)
        check_vocabulary(folder, architecture, tensors, config)
        modules = {spec.name: name for name, spec in self._linears.items()}
        for end in (architecture.embed_name, architecture.head_name):
            modules[end.removesuffix(".weight")] = stored_name(folder, architecture, end)
        self._pairs: dict[str, tuple[FloatArray, FloatArray, float, FloatArray | None]] = {}
        for layer in adapted_layers(tensors):
            scaling = config.scaling_of(layer.module)
            self._pairs[modules[layer.module]] = (layer.a, layer.b, scaling, layer.magnitude)
        self.untied = untied_ends(folder, architecture, self._pairs)
        self._biases = self._trained_biases(tensors, adapter)
        self._rows = trained_rows_by_name(folder, architecture, tensors, config)
        self._wholes = wholes_by_name(folder, architecture, tensors)
        if base == "dequantized" and started_in(adapter, split_biases(tensors)[0], config):
            raise UnsupportedModelError(
                f"{adapter} began as a part of its base and was trained beside the quantized rest, "
                "which no base has: merge it into the original weights (--base original)"
            )
        self._base = base
        self._quant = quant or _quant_of(adapter)
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
        """Whether a stored tensor goes into the result as it is.

        Raises:
            UnsupportedModelError: If it is quantized, and the original weights are wanted.
        """
        if self.folder.holds_quantized(name):
            if self._base == "original":
                raise UnsupportedModelError(
                    f"{self.folder.path} is stored quantized, so its original weights are not "
                    "known: merge into the dequantized ones (--base dequantized), or into the "
                    "unquantized model"
                )
            return False
        return not self.is_adapted(name) and not (self._quantizes and name in self._linears)

    def float32(self, name: str) -> FloatArray:
        """The merged weight that is stored by this name.

        Raises:
            CheckpointError: If there is none, or it is damaged.
        """
        folder, settings = self.folder, self._quant
        if name in self._biases:
            return self._biases[name]
        if name in self._wholes:
            return self._wholes[name]
        weight = folder.dequantized(self.source_of(name))
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
        shape = self.folder.weight_shape(self.source_of(name))
        return (self.architecture.vocab_size, *shape[1:]) if name in self._rows else shape

    @property
    def is_resized(self) -> bool:
        """Whether the adapter has added tokens."""
        return self.architecture.stored_rows is not None

    def config(self) -> dict[str, Any]:
        """The base's config.json with the size of the vocabulary, and the head untied if it is."""
        config: dict[str, Any] = dict(self.folder.config)
        if self.untied:
            config["tie_word_embeddings"] = False
            if isinstance(config.get("text_config"), dict):
                config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
        if not self.is_resized:
            return config
        size = {"vocab_size": self.architecture.vocab_size}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], **size}
        if "vocab_size" in config or "text_config" not in config:
            config |= size
        return config

    def _resized(self, weight: FloatArray) -> FloatArray:
        """A matrix with rows for the tokens that the adapter has added, all of which it has."""
        more = self.architecture.vocab_size - len(weight)
        return np.concatenate([weight, np.zeros((more, weight.shape[1]), np.float32)])

    def _trained_biases(
        self, tensors: Mapping[str, FloatArray], adapter: str | PathLike[str]
    ) -> dict[str, FloatArray]:
        """The biases that were trained beside the adapter, by the names of those they replace.

        Raises:
            CheckpointError: If the base has no such bias.
        """
        _, trained = split_biases(tensors)
        biases = {self.stored_name(f"{module}.bias"): a for module, a in trained.items()}
        for name, array in biases.items():
            if not self.folder.has(name) or self.folder.shape(name) != array.shape:
                raise CheckpointError(
                    f"{adapter} has a trained {name} of {array.size} numbers, which "
                    f"{self.folder.path} has not: merge it into the model that it was trained on"
                )
        return biases

    def _was_requantized(self, name: str) -> bool:
        """Whether training had a weight in NF4 that is stored in another form."""
        return self._base == "dequantized" and self.folder.must_requantize(name)


def _quant_of(adapter: str | PathLike[str]) -> QuantConfig:
    run = find_run(adapter)
    return QuantConfig() if run is None else load_config(run / "config.yaml").quant
