"""Quantized weights within a model: their storages, what they take while they load, their bytes."""

from __future__ import annotations

from functools import partial

from qlora_wgpu.graph.tensor import Storage, Tensor
from qlora_wgpu.kernels.dequantize import fits_words
from qlora_wgpu.model import quantized_weights
from qlora_wgpu.model.weight_places import WeightPlaces
from qlora_wgpu.model.weight_source import WeightSource
from qlora_wgpu.ops.quantized import QuantizedMatrix
from qlora_wgpu.quant import WeightFormat

_COPIED = ("maps", "nested_absmax")  # what of a matrix is never a file's own bytes


class QuantizedLayout:
    """Lays out the quantized matrices of a model, which share their code books."""

    def __init__(
        self, source: WeightSource, places: WeightPlaces, max_binding: int, *, textures: bool
    ) -> None:
        """Has no matrix yet.

        Args:
            source: The files.
            places: Where weights are kept.
            max_binding: Largest number of bytes that one binding may show.
            textures: Whether kernels read pairs of codes by a code book in a texture.
        """
        self._source, self._places = source, places
        self._max_binding, self._textures = max_binding, textures
        self._codebooks: dict[bytes, Tensor] = {}

    def matrix(
        self, name: str, shape: tuple[int, int], form: WeightFormat, parts: list[str]
    ) -> QuantizedMatrix:
        """One matrix, or the matrices of all ``parts`` one below the other.

        Args:
            name: What it is called.
            shape: Rows and columns of each part.
            form: How it is stored on the device.
            parts: The weights' names: its own, or those of experts.
        """
        in_words = self._textures and fits_words(form, shape[1])
        matrix, storages = quantized_weights.lay_out(
            name,
            shape,
            form,
            len(parts),
            partial(self._places.storage, name, most=self._max_binding),
            self._codebook(form) if in_words else None,
        )
        self._expect(name, shape, parts, storages)
        load = partial(self._load, name, shape, parts, storages)
        self._places.when_loading(name, load, self._places.image_of(name))
        return matrix

    def _expect(
        self, name: str, shape: tuple[int, int], parts: list[str], storages: dict[str, Storage]
    ) -> None:
        """Counts what a matrix takes of the host, and whether its layer is as its files have it."""
        folder, image = self._source.folder, self._places.image_of(name)
        stored = [self._source.stored(part) for part in parts]
        mapped = folder is not None and len(parts) == 1 and folder.is_mapped(stored[0])
        if not mapped:
            quantized = sum(storage.nbytes for storage in storages.values())
            self._places.expect_load(4 * shape[0] * shape[1] + min(len(parts), 2) * quantized)
        if image is not None:
            image.as_stored &= mapped
            image.copied += sum(storages[leaf].nbytes for leaf in storages if leaf in _COPIED)

    def _load(
        self, name: str, shape: tuple[int, int], parts: list[str], storages: dict[str, Storage]
    ) -> None:
        assert self._source.folder is not None
        quantized = [self._source.quantized(part, shape) for part in parts]
        arrays = quantized_weights.stacked_arrays(quantized, name, self._source.folder.path)
        for leaf, storage in storages.items():
            self._places.fill(storage, arrays[leaf])

    def _codebook(self, form: WeightFormat) -> Tensor:
        """The values of pairs of codes, shared by all matrices with the same map."""
        key = form.quant_map.tobytes()
        if key not in self._codebooks:
            self._codebooks[key] = quantized_weights.codebook_tensor(form, Storage)
        return self._codebooks[key]
