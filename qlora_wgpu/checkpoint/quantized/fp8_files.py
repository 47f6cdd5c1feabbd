"""Folders with 8-bit floats, as DeepSeek's, Qwen's and Ministral's have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.quantized.files import QuantizedFiles
from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile
from qlora_wgpu.quant import QuantizedWeight, WeightFormat
from qlora_wgpu.quant.quantized_weight import E8M0
from qlora_wgpu.quant.safetensors_formats import FP8_MAPS, fp8_format, of_bytes
from qlora_wgpu.weight_format import WHOLE

POWERS_OF_TWO = ("F8_E8M0", "U8")


class Fp8Files(QuantizedFiles):
    """``X.weight`` in 8 bits times ``X.weight_scale`` or ``X.weight_scale_inv``.

    Scales are one for the tensor, one for each row, or one for each tile. The scales of activations
    are left: activations are not quantized here.
    """

    companions = ("weight_scale_inv", "weight_scale", "activation_scale", "input_scale")

    def __init__(
        self,
        files: Mapping[str, SafetensorsFile],
        config: Mapping[str, Any],
        tile: tuple[int, int] | None,
    ) -> None:
        """Notes where tensors are.

        Args:
            files: Which open file holds which tensor.
            config: The config.json.
            tile: Rows and columns of a tile, where config.json says so.
        """
        super().__init__(files, config)
        self._tile = tile

    def holds(self, name: str) -> bool:
        """Whether a weight is of 8-bit floats and has scales."""
        file = self._files.get(name)
        return file is not None and file.dtype(name) in FP8_MAPS and self._scales(name) is not None

    def shape(self, name: str) -> tuple[int, int]:
        """Its tensor's."""
        return self._matrix(name, self.codes_leaf)

    def format(self, name: str) -> WeightFormat:
        """FP8 with the tiles that the scales' shape tells."""
        rows, columns = self.shape(name)
        leaf = self._scales(name)
        assert leaf is not None
        scales = self._shape_of(name, leaf)
        stored = self._dtype_of(name, self.codes_leaf)
        if int(np.prod(scales)) == 1:
            return fp8_format(stored, (WHOLE, WHOLE))
        if scales in ((rows,), (rows, 1)):
            return fp8_format(stored, (1, WHOLE))
        form = fp8_format(stored, self._tile or (1, 1))
        assert form.block_rows is not None
        across, down = form.blocks_per_row(columns), -(-rows // form.block_rows)
        if self._tile is None or scales != (down, across):
            raise self._wrong(
                self._name(name, leaf),
                f"has shape {scales}, which is no scale for each "
                f"{'row' if self._tile is None else f'{self._tile[0]} x {self._tile[1]} tile'} of "
                f"a weight of {rows} x {columns}",
            )
        return form

    def read(self, name: str) -> QuantizedWeight:
        """Codes and scales as stored."""
        form, shape = self.format(name), self.shape(name)
        codes = self._raw(name, self.codes_leaf, tuple(FP8_MAPS), shape)
        if not np.isfinite(form.quant_map)[codes].all():
            raise self._wrong(name, "holds NaN or infinity, so the model is damaged")
        return of_bytes(form, codes, self._scale_values(name), self._dtype)

    def _scales(self, name: str) -> str | None:
        return next((leaf for leaf in self.companions[:2] if self._has(name, leaf)), None)

    def _scale_values(self, name: str) -> npt.NDArray[np.float32]:
        leaf = self._scales(name)
        assert leaf is not None
        if self._dtype_of(name, leaf) not in POWERS_OF_TWO:
            return self._floats(name, leaf)
        values: npt.NDArray[np.float32] = E8M0[self._raw(name, leaf, POWERS_OF_TWO)]
        if not np.isfinite(values).all():
            raise self._wrong(self._name(name, leaf), "holds NaN, so the model is damaged")
        return values
