"""Biases of an adapter's file in the place of the base's, on the device, and back again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.lora.biases import bias_name
from qlora_wgpu.model.adapter_state import read_vector, write_vector
from qlora_wgpu.model.layout import ModelLayout

FloatArray = npt.NDArray[np.float32]


class AdapterBiases:
    """The biases of a model's linear layers and norms that an adapter of a file brought."""

    def __init__(self, layout: ModelLayout, device: Device) -> None:
        """Nothing is replaced yet."""
        self._layout = layout
        self._device = device
        self._taken: dict[str, FloatArray] = {}
        self._base: dict[str, FloatArray] = {}

    @property
    def kind(self) -> str:
        """PEFT's word for what is replaced: "all", which also loads what "lora_only" means."""
        return "all" if self._taken else "none"

    @property
    def taken(self) -> Mapping[str, FloatArray]:
        """What is replaced, by the names of the layers."""
        return self._taken

    def check(self, biases: Mapping[str, FloatArray]) -> None:
        """Makes sure that the base has biases of these layers and sizes.

        Raises:
            CheckpointError: If it has not.
        """
        for name, array in biases.items():
            self._place(name, array)

    def tensors(self) -> dict[str, FloatArray]:
        """What is replaced, by the names that an adapter's tensors have."""
        return {bias_name(module): array for module, array in self._taken.items()}

    def take(self, biases: Mapping[str, FloatArray]) -> None:
        """Puts an adapter's biases in the base's place; those of the adapter before go.

        Args:
            biases: By the names of their layers; none to have the base's own again.

        Raises:
            CheckpointError: If the base has no such bias; nothing is changed then.
        """
        places = {name: self._place(name, array) for name, array in biases.items()}
        for name, own in self._base.items():
            write_vector(self._device, self._place(name, own), own)
        for name, array in biases.items():
            whole = read_vector(self._device, places[name])
            self._base.setdefault(name, whole[: array.size].copy())
            write_vector(self._device, places[name], array)
        self._taken = dict(biases)

    @contextmanager
    def off(self) -> Iterator[None]:
        """While it is entered, the base has its own."""
        taken = self._taken
        self.take({})
        try:
            yield
        finally:
            self.take(taken)

    def _place(self, name: str, array: FloatArray) -> Tensor:
        modules = self._layout.network.modules
        layer = modules.linears.get(name)
        bias = modules.norms.get(f"{name}.bias") if layer is None else layer.bias
        if bias is None or bias.columns != array.size:
            raise CheckpointError(
                f"the adapter has a trained bias of {name} of {array.size} numbers, which this "
                "model has not, or neither a linear layer nor a norm: open it with the model that "
                "it was trained on, or merge it with PEFT"
            )
        return bias
