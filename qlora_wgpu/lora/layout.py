"""The adapter on the device: all A and B in one flat float32 vector, gradient and moments alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div, padded
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector
from qlora_wgpu.kernels.lora import Lora
from qlora_wgpu.lora.flat_vector import FlatVector, aligned
from qlora_wgpu.lora.forms import FLOAT32, AdapterForms
from qlora_wgpu.lora.moments import moments_of
from qlora_wgpu.lora.names import LORA_A, LORA_B, MAGNITUDE, Float32Array, parse_name, tensor_name
from qlora_wgpu.lora.peft_differences import peft_differences
from qlora_wgpu.lora.targets import check_experts, in_layers, peft_config, targeted


class Adapter:
    """The places of each A and B, and the vectors they lie in.

    Attributes:
        config: The adapter's rank, scaling, dropout and targets.
        targets: The adapted layers.
        peft_differences: A sentence for each thing that PEFT computes otherwise.
        peft: ``config`` as PEFT writes it, without the base model's name.
        b_begin: Where in the flat vectors, in floats, A's end and B's begin.
        length: Length of the flat vectors, in floats.
        loras: Each layer's A and B, by module name.
        expert_loras: The first expert's, by the names of ``ExpertSpec``.
        parameters: The flat vector of all A and B.
        gradient: Their gradients, summed.
        forms: In which types gradient and moments are kept.
        moments: AdamW's moments.
    """

    def __init__(
        self,
        config: LoraConfig,
        linears: Sequence[LinearSpec],
        experts: Sequence[ExpertSpec] = (),
        forms: AdapterForms = FLOAT32,
    ) -> None:
        """Lays out an adapter for the targeted layers.

        Raises:
            ConfigError: If the configuration does not fit the layers.
        """
        self.config = config
        chosen = targeted(linears, config.target_modules, experts)
        self.targets = in_layers(chosen, config.layers_to_transform)
        self.peft = peft_config(config, self.targets, experts)
        adapted = {spec.name for spec in self.targets}
        stacks = [stack for stack in experts if stack.linears[0].name in adapted]
        check_experts(self.peft, stacks)
        self.peft_differences = peft_differences(self.peft, self.targets, experts)
        self._flat = FlatVector()
        self.b_begin = self._lay_out()
        stacked = {spec.name for stack in stacks for spec in stack.linears}
        self.length = self._flat.end + self._slack(stacked)
        self.forms = forms
        self.parameters = self._vector("adapter", "adapter")
        self.gradient = self._vector("gradient", "gradients", forms.gradient)
        self.moments = moments_of(self._flat, self.length, forms)
        self.loras = {s.name: self._lora(s) for s in self.targets if s.name not in stacked}
        self.expert_loras = {stack.name: self._lora(stack.linears[0], stack) for stack in stacks}

    @property
    def first_moment(self) -> Tensor:
        """AdamW's m."""
        return self.moments.first

    @property
    def second_moment(self) -> Tensor:
        """AdamW's v."""
        return self.moments.second

    def keep_moments(self, optimizer: Literal["adamw", "adamw_8bit"]) -> None:
        """Makes room for another optimizer's moments, unless they are its own already."""
        if optimizer != self.forms.optimizer:
            self.forms = replace(self.forms, optimizer=optimizer)
            self.moments = moments_of(self._flat, self.length, self.forms)

    @property
    def names(self) -> list[str]:
        """PEFT's names of all A and B."""
        return list(self._flat)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors as PEFT has them, by its names."""
        return {name: self._flat[name].shape for name in self._flat}

    @property
    def num_parameters(self) -> int:
        """Trained numbers, padding not counted."""
        return self._flat.num_parameters

    def initial(self, seed: int) -> Float32Array:
        """PEFT's starts: A uniform in ±1/√in_features (Kaiming, a = √5) or normal, B zero.

        Each matrix has its own stream, so the start does not depend on what else is adapted.
        """
        flat = np.zeros(self.length, np.float32)
        for spec in self.targets:
            name = tensor_name(spec.name, LORA_A)
            stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
            place = self._flat[name]
            if self.config.init_lora_weights == "gaussian":
                place.view(flat)[:] = stream.normal(0.0, 1 / place.rows, place.shape)
            else:
                bound = 1 / np.sqrt(place.columns)
                place.view(flat)[:] = stream.uniform(-bound, bound, place.shape)
        return flat

    def split(self, flat: Float32Array) -> dict[str, Float32Array]:
        """A flat vector as PEFT's tensors."""
        return self._flat.split(flat)

    def join(self, tensors: Mapping[str, Float32Array]) -> Float32Array:
        """PEFT's tensors as a flat vector.

        Raises:
            CheckpointError: If a tensor is missing, unknown, of another shape or not finite.
        """
        return self._flat.join(tensors, self.length)

    def _lay_out(self) -> int:
        """Gives all A's their places, then all B's, then all magnitudes; where B's begin."""
        for spec in self.targets:
            rank = self.peft.rank_of(spec.name)
            self._flat.append(tensor_name(spec.name, LORA_A), rank, spec.in_features)
        b_begin = self._flat.end
        for spec in self.targets:
            rank = self.peft.rank_of(spec.name)
            self._flat.append(tensor_name(spec.name, LORA_B), spec.out_features, rank)
        if self.config.use_dora:
            for spec in self.targets:
                self._flat.append(tensor_name(spec.name, MAGNITUDE), 0, spec.out_features)
        return b_begin

    def _slack(self, stacked: set[str]) -> int:
        """Floats at the end: bindings of experts' matrices are counted in rows, and may pass it."""
        rows = [
            padded(self._flat[name].columns)
            for name in self._flat
            if (parsed := parse_name(name)) is not None and parsed[0] in stacked
        ]
        return aligned(max(rows, default=0))

    def _vector(self, label: str, kind: str, dtype: str = "float32") -> Tensor:
        # 8-bit updates index all of the vectors, and rounded sums all of a gradient.
        in_windows = dtype == "float32" and self.forms.optimizer == "adamw"
        nbytes = ITEM_SIZE[dtype] * self.length
        storage = Storage(label, kind, nbytes, in_windows=in_windows)
        return vector(label, self.length, dtype, storage)

    def _lora(self, spec: LinearSpec, stack: ExpertSpec | None = None) -> Lora:
        """A layer's pair, or the first of a stack of experts'."""
        return Lora(
            r=self.peft.rank_of(spec.name),
            scaling=self.peft.scaling_of(spec.name),
            dropout=self.config.lora_dropout,
            key=zlib.crc32(spec.name.encode()),
            a=self._matrix(self.parameters, spec, LORA_A, stack),
            b=self._matrix(self.parameters, spec, LORA_B, stack),
            grad_a=self._matrix(self.gradient, spec, LORA_A, stack),
            grad_b=self._matrix(self.gradient, spec, LORA_B, stack),
            a_stride=self._stride(LORA_A, stack),
            b_stride=self._stride(LORA_B, stack),
            magnitude=self._magnitude(self.parameters, spec),
            grad_magnitude=self._magnitude(self.gradient, spec),
        )

    def _matrix(
        self, flat: Tensor, spec: LinearSpec, leaf: str, stack: ExpertSpec | None
    ) -> Tensor:
        """A or B within a flat vector, with the other experts' up to the last."""
        place = self._flat[tensor_name(spec.name, leaf)]
        rows, name = place.rows, f"{spec.name}.{leaf}"
        if stack is not None:
            others = (stack.experts - 1) * self._stride(leaf, stack)
            rows += ceil_div(others, padded(place.columns))
        offset = ITEM_SIZE[flat.dtype] * place.offset
        return matrix(name, rows, place.columns, flat.dtype, flat.storage, offset)

    def _stride(self, leaf: str, stack: ExpertSpec | None) -> int:
        """Floats from one expert's A or B to the next one's."""
        if stack is None or stack.experts == 1:
            return 0
        first, second = (
            self._flat[tensor_name(spec.name, leaf)].offset for spec in stack.linears[:2]
        )
        return second - first

    def _magnitude(self, flat: Tensor, spec: LinearSpec) -> Tensor | None:
        if not self.config.use_dora:
            return None
        place, name = self._flat[tensor_name(spec.name, MAGNITUDE)], f"{spec.name}.{MAGNITUDE}"
        offset = ITEM_SIZE[flat.dtype] * place.offset
        return vector(name, place.columns, flat.dtype, flat.storage, offset)
