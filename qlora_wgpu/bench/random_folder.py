"""A model folder that is not there: random weights in the shapes that a config.json asks for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.quant import QuantizedWeight, quantize_nf4

_SCALE = np.float32(0.02)  # Hugging Face's initializer_range
_PERIOD = 1_000_003  # values before they repeat; prime, so that no two rows are alike
_BLOCKS = 31_249  # the same of quantized blocks


class RandomFolder(ModelFolder):
    """Weights made when they are asked for, the same for the same config.json.

    Norms are ones, all else is normal with a standard deviation of 0.02.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        architecture: Architecture | None = None,
        quant: QuantConfig | None = None,
    ) -> None:
        """Makes a folder for a config.json.

        Args:
            config: The config.json.
            architecture: A part of what it asks for; by default all.
            quant: In which form linear layers are given, so that nothing is left to be quantized;
                None gives floats.

        Raises:
            UnsupportedModelError: If it asks for something that is not computed here.
        """
        super().__init__(Path("random weights"), dict(config), {})
        if architecture is None:
            architecture = find_family(config).read(config)
        size = (architecture.vocab_size, architecture.hidden_size)
        self._norms = set(architecture.stored_norms)
        self._form = quant if quant is not None and quant.scheme == "nf4" else None
        self._linears = {f"{spec.name}.weight" for spec in architecture.every_linear}
        self._shapes: dict[str, tuple[int, ...]] = {architecture.embed_name: size}
        if not architecture.tied:
            self._shapes[architecture.head_name] = size
        for spec in architecture.every_linear:
            self._shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
            if spec.bias:
                self._shapes[f"{spec.name}.bias"] = (spec.out_features,)
        self._shapes |= architecture.routers
        self._shapes |= architecture.tables
        self._shapes |= architecture.stored_norms

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(int(np.prod(shape)) for shape in self._shapes.values())

    def names(self) -> list[str]:
        """All tensors."""
        return list(self._shapes)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self._shapes[name]

    def float_dtype(self, name: str) -> str:
        """Of all of them."""
        return "F32"

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, made anew."""
        shape = self._shapes[name]
        if name in self._norms:
            return np.ones(shape, np.float32)
        # Billions of random numbers would take minutes; repeated ones compute as fast.
        random = np.random.default_rng(zlib.crc32(name.encode()))
        count = min(math.prod(shape), _PERIOD)
        block = random.standard_normal(count, dtype=np.float32) * _SCALE
        return _repeated(block, math.prod(shape)).reshape(shape)

    def quantized(self, name: str, *, mapped: bool = False) -> QuantizedWeight | None:
        """A linear layer's codes and scales, made anew; None of what is not quantized."""
        if self._form is None or name not in self._linears:
            return None
        rows, columns = self._shapes[name]
        sample, first = self._sample, zlib.crc32(name.encode()) % _BLOCKS
        blocks = -(-rows * columns // sample.blocksize)
        codes: npt.NDArray[np.uint8] = np.roll(sample.codes, -first * sample.blocksize // 2)
        absmax: npt.NDArray[Any] = np.roll(sample.absmax, -first)
        nested = sample.nested_absmax
        if nested is not None:
            nested = _repeated(nested, -(-blocks // sample.nested_blocksize))
        return replace(
            sample,
            shape=(rows, columns),
            codes=_repeated(codes, -(-rows * columns // 2)),
            absmax=_repeated(absmax, blocks),
            nested_absmax=nested,
        )

    @cached_property
    def _sample(self) -> QuantizedWeight:
        """Quantized weights, of which others are repetitions: billions would take minutes."""
        assert self._form is not None
        size = (1, _BLOCKS * self._form.blocksize)
        weights = np.random.default_rng(0).standard_normal(size, dtype=np.float32) * _SCALE
        return quantize_nf4(weights, self._form.blocksize, self._form.double_quant)


def _repeated(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """As ``numpy.resize``, which would hold twice as much."""
    whole = np.empty(count, values.dtype)
    for start in range(0, count, values.size):
        piece = whole[start : start + values.size]
        piece[:] = values[: piece.size]
    return whole
