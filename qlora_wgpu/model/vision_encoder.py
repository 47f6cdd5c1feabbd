"""A frozen vision tower on a device: from processed images to their features."""

from __future__ import annotations

import hashlib
import importlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.family import Modules
from qlora_wgpu.families.parts.vision import (
    Arranged,
    TowerInputs,
    TowerMatrix,
    TowerOps,
    VisionTower,
)
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.offload import WeightGroup, WeightStream
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.program import BufferPool, Program, allocate
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, pad_rows, row, stored_bits, vector
from qlora_wgpu.images.pixels import ProcessedImage
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.checkpoint_reader import CheckpointReader, bits_of
from qlora_wgpu.model.image_inputs import FloatArray, ImageFeatures
from qlora_wgpu.model.tiles import joined_tiles
from qlora_wgpu.model.weight_placement import row_pieces
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.fusion import FUSIONS
from qlora_wgpu.ops.modules import DenseMatrix, Linear

MOST_PATCHES = 4096
"""Patches that are processed at once, unless memory is short or a single image has more."""
IMAGES_AT_ONCE = 8
"""Images that are given to the tower together."""
_NO_MATRIX = DenseMatrix(0, 0, ())


def read_tower(config: Mapping[str, Any]) -> VisionTower:
    """The vision tower of a config.json, by its ``model_type``.

    Raises:
        UnsupportedModelError: If the model has none that is supported.
    """
    kind = config.get("model_type")
    try:
        family = importlib.import_module(f"qlora_wgpu.families.{kind}")
        compose = family.compose_vision
    except (ModuleNotFoundError, AttributeError):
        raise UnsupportedModelError(
            f"config.json: images are not supported for model_type {brief(kind)}"
        ) from None
    tower: VisionTower = compose(parts.ConfigReader(config))
    return tower


# ---- a tower without its bytes -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TowerStep:
    """A tower's plan for a number of patches."""

    plan: Plan
    given: TowerInputs
    whole: BatchBuffers  # whose blocks are images
    windowed: BatchBuffers  # whose blocks are windows
    features: tuple[Tensor, ...]  # float32 (merged patches, hidden_size) each


class TowerPlan:
    """A tower's weights and programs, laid out for one device profile.

    Streamed weights of matrices are in host memory; their layers take turns on the device.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        dtype: str,
        *,
        profile: Profile,
        max_binding: int,
        streamed: bool = False,
    ) -> None:
        self.tower = read_tower(config)
        self.dtype = dtype  # of matmul operands
        # Textures are no windows of a buffer, and take more memory.
        self._profile = replace(profile, in_textures=False) if streamed else profile
        self._max_binding = max_binding
        self._stream = WeightStream() if streamed else None
        self._groups: dict[str, WeightGroup] = {}  # of streamed weights by their module
        weights = self.tower.weights()
        self.matrices = {spec.name: spec for spec in weights.matrices}
        self.host_shapes = weights.host
        self.rows = weights.rows
        self.weight_dtype = profile.weight_dtype(dtype)
        self.linears = {name: self._linear(spec) for name, spec in self.matrices.items()}
        self.small = {
            name: row(name, of.size, "float32", Storage(name, "base", 4 * (of.size + -of.size % 8)))
            for name, of in weights.rows.items()
        }
        self._steps: dict[int, TowerStep] = {}
        # Counts values that kernels clamp to float16's range, if they have it.
        self.saturated: Tensor | None = None
        if profile.counts_saturated:
            storage = Storage("saturated", "base", 16, np.zeros(4, np.uint32))
            self.saturated = vector("saturated", 4, "uint32", storage)

    def _linear(self, spec: TowerMatrix) -> Linear:
        dtype = self.weight_dtype
        row_bytes = matrix("", 1, spec.in_features, dtype).nbytes
        pieces = []
        for first, count in row_pieces(spec.out_features, max(self._max_binding // row_bytes, 1)):
            storage = self._matrix_storage(spec.name, count * row_bytes)
            pieces.append((first, matrix(spec.name, count, spec.in_features, dtype, storage)))
        bias = None
        if spec.bias:
            size = spec.out_features
            storage = Storage(f"{spec.name}.bias", "base", 4 * (size + -size % 8))
            bias = row(f"{spec.name}.bias", size, "float32", storage)
        held = DenseMatrix(spec.out_features, spec.in_features, tuple(pieces))
        return Linear(spec.name, held, bias, None)

    def _matrix_storage(self, name: str, nbytes: int) -> Storage:
        if self._stream is None:
            return Storage(name, "base", nbytes, texture=self._profile.textures)
        prefix = self.tower.layer_prefix
        module = name.rpartition(".")[0]
        if name.startswith(prefix):
            module = prefix + name.removeprefix(prefix).partition(".")[0]
        if module not in self._groups:
            self._groups[module] = self._stream.new_group(module)
        return self._groups[module].storage(name, nbytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of streamed weights, which are in host memory."""
        return sum(group.nbytes for group in self._groups.values())

    def memory(self, sizes: Sequence[int]) -> Counter[str]:
        """Bytes on the device by kind, with programs of these numbers of rows.

        Programs share slots, so those with the most rows are allocated first.
        """
        plans = [self.step(rows).plan for rows in sorted(sizes, reverse=True)]
        return reading_memory(plans)

    def capacity(self, patches: int) -> int:
        """The rows of the program for that many patches.

        There are few sizes, each at most half as large again as the one before.
        """
        unit = 16 * self.tower.merge**2
        count = -(-patches // unit)
        power = 1 << max(count - 1, 0).bit_length()
        return unit * (3 * power // 4 if 4 * count <= 3 * power and power >= 4 else power)

    def step(self, rows: int) -> TowerStep:
        """The plan for that many rows, traced on the first call."""
        if rows not in self._steps:
            self._steps[rows] = self._traced(rows)
        return self._steps[rows]

    def _traced(self, rows: int) -> TowerStep:
        tower = self.tower
        g = Graph(self.dtype, self._profile, self._max_binding, self.saturated, rules=FUSIONS)
        given = self._inputs(rows)
        whole = make_batch_buffers(1, rows, blocked=True)
        windowed = make_batch_buffers(1, rows, blocked=True) if tower.window else whole
        modules = Modules(_NO_MATRIX, _NO_MATRIX, self.linears, self.small)
        ops = TowerOps(g, modules, whole), TowerOps(g, modules, windowed)
        features = tuple(tower.trace(*ops, given))
        return TowerStep(compile_plan(g, features), given, whole, windowed, features)

    def _inputs(self, rows: int) -> TowerInputs:
        tower = self.tower

        def held(name: str, columns: int, dtype: str) -> Tensor:
            made = matrix(name, rows, columns, dtype)
            made.storage = Storage(name, "inputs", made.nbytes)
            return made

        added = angles = None
        if tower.positions is not None:
            added = held("positions", tower.hidden_size, "float32")
        if tower.rope is not None:
            length = rows * tower.rope.head_dim
            storage = Storage("angles", "inputs", 4 * length)
            angles = vector("angles", length, "float32", storage)
        numbers = np.arange(rows, dtype=np.uint32)
        storage = Storage("row numbers", "tables", numbers.nbytes, numbers)
        row_numbers = vector("row numbers", rows, "uint32", storage)
        pixels = held("patches", tower.embedding.columns, self.dtype)
        return TowerInputs(pixels, added, angles, row_numbers)


@dataclass(frozen=True, eq=False)
class PlacedTower:
    """A tower laid out within the memory of a device."""

    plan: TowerPlan
    most_patches: int  # that are processed at once, unless a single image has more
    sizes: tuple[int, ...]  # rows of its programs, the most first

    @property
    def memory(self) -> Counter[str]:
        """Bytes on the device by kind."""
        return self.plan.memory(self.sizes)


def batches(rows: Sequence[int], most: int) -> list[list[int]]:
    """The rows of crops that are processed together, at most ``most`` unless a crop has more."""
    made: list[list[int]] = []
    for count in rows:
        if not made or sum(made[-1]) + count > most:
            made.append([])
        made[-1].append(count)
    return made


# ---- loaded --------------------------------------------------------------------------------------


class VisionEncoder:
    """A vision tower with its connector on a device.

    It runs forward only, for several images at once. ``close`` frees its memory.
    """

    def __init__(
        self,
        folder: ModelFolder,
        config: Mapping[str, Any],
        device: Device,
        compute_dtype: str = "bfloat16",
        *,
        most_patches: int = MOST_PATCHES,
        placed: PlacedTower | None = None,
    ) -> None:
        """Loads the weights onto a device.

        Args:
            folder: The model's files.
            config: Its config.json.
            device: The device that will hold the tower.
            compute_dtype: Type of matmul operands, ``"bfloat16"`` or ``"float32"``.
            most_patches: Maximum number of patches that are processed at once, unless a single
                image has more.
            placed: The tower laid out within the device's memory, with a maximum of its own.

        Raises:
            UnsupportedModelError: If the model has no tower that is supported.
            CheckpointError: If a tensor is missing, damaged or of another shape.
        """
        if placed is None:
            self.plan = TowerPlan(
                config, compute_dtype, profile=device.profile, max_binding=device.max_binding
            )
        else:
            self.plan, most_patches = placed.plan, placed.most_patches
        self._device = device
        self._config = config
        self._most_patches = most_patches
        self._reader = CheckpointReader(folder, QuantConfig(scheme="none"))
        self._reader.prefixes = self.plan.tower.stored_prefixes
        self._pool = BufferPool(device)
        self._programs: dict[int, Program] = {}
        self._warned = False  # whether values were clamped
        self._load()
        for rows in () if placed is None else placed.sizes:  # the largest first
            self._programs[rows] = Program(device, self.plan.step(rows).plan, self._pool)
        self._tables = {
            name: self._reader.read(name, shape) for name, shape in self.plan.host_shapes.items()
        }

    def close(self) -> None:
        """Frees the tower's memory at once, even if something still refers to it."""
        self.__dict__.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def hash(self) -> str:
        """A hash of the tower's weights and config, and of the type of its operands."""
        own = {key: value for key, value in self._config.items() if key != "transformers_version"}
        made = hashlib.sha256(json.dumps([own, self.plan.dtype], sort_keys=True).encode())
        for name, array in self._arrays():
            made.update(name.encode())
            made.update(np.ascontiguousarray(array).data)
        for name in sorted(self._tables):
            made.update(self._tables[name].data)
        return made.hexdigest()

    def _arrays(self) -> Iterator[tuple[str, FloatArray]]:
        """All weights of the device, by the names of their tensors here."""
        read: dict[str, FloatArray] = {}  # the last tensor, which may have the next layer, too
        for name, spec in self.plan.matrices.items():
            if spec.tensor not in read:
                read = {spec.tensor: self._reader.read(spec.tensor, spec.shape)}
            end = spec.first + spec.out_features
            whole = spec.make(read[spec.tensor])
            yield name, np.ascontiguousarray(whole[spec.first : end])
            if spec.bias:
                length = spec.shape[0] if spec.shape[0] >= end else spec.out_features
                yield f"{name}.bias", self._reader.read(spec.bias, (length,))[spec.first : end]
        for name, of in self.plan.rows.items():
            yield (
                name,
                of.make(self._reader.read(name, of.shape)).reshape(-1) + np.float32(of.offset),
            )

    def _load(self) -> None:
        linears = self.plan.linears
        for name, array in self._arrays():
            if name in self.plan.small:
                self._upload(self.plan.small[name], pad_rows(array))
            elif name not in linears:
                bias = linears[name.removesuffix(".bias")].bias
                assert bias is not None
                self._upload(bias, pad_rows(array))
            else:
                weight = linears[name].weight
                assert isinstance(weight, DenseMatrix)
                bits = bits_of(name, array, self.plan.weight_dtype)
                for first, piece in weight.resident:
                    self._upload(piece, bits[first : first + piece.rows])

    def _upload(self, tensor: Tensor, values: npt.NDArray[Any]) -> None:
        storage = tensor.storage
        assert storage is not None
        if storage.group is not None:
            storage.group.put(storage, values)
            return
        storage.data = np.ascontiguousarray(values)
        allocate(self._device, storage)
        storage.data = None

    # -- images ------------------------------------------------------------------------------

    def encode(self, images: Sequence[ProcessedImage]) -> list[ImageFeatures]:
        """The features of images, in their order.

        Values beyond float16's range, on matrix units that have it, are clamped, with a warning.
        """
        tower = self.plan.tower
        crops = [tower.arrange(crop, self._tables) for image in images for crop in image.crops]
        features = iter(self._features(crops))
        arranged = iter(crops)
        made = []
        for image in images:
            own = [next(features)[tower.skip :] for _ in image.crops]
            grids = [next(arranged).grid for _ in image.crops]
            rows = np.concatenate(own)
            if tower.newline:
                rows = joined_tiles(own, image.layout, grids[-1], self._tables[tower.newline])
            made.append(ImageFeatures(rows, grids[0] if tower.has_grid else None))
        return made

    def _features(self, crops: Sequence[Arranged]) -> list[FloatArray]:
        """The features of each crop, those of merged patches in the order of the image."""
        made: list[FloatArray] = []
        left = iter(crops)
        for rows in batches([len(crop.pixels) for crop in crops], self._most_patches):
            together = [next(left) for _ in rows]
            made += self._run(together, self.plan.capacity(sum(rows)))
        return made

    def _run(self, crops: Sequence[Arranged], rows: int) -> list[FloatArray]:
        step, device = self.plan.step(rows), self._device
        with device.in_turn:
            if rows not in self._programs:
                self._programs[rows] = Program(device, step.plan, self._pool)
            program = self._programs[rows]
            self._write(step, crops, rows)
            program.run()
            outputs = [np.frombuffer(program.read(t), np.float32) for t in step.features]
            self._check_saturated()
        tower = self.plan.tower
        shaped = (
            values.reshape(tensor.rows, tensor.stride)[:, : tensor.columns]
            for values, tensor in zip(outputs, step.features, strict=True)
        )
        joined = np.concatenate(list(shaped), axis=1)
        made, first = [], 0
        for crop in crops:
            count = len(crop.pixels) // tower.merge**2
            own = np.empty((count, joined.shape[1]), np.float32)
            own[crop.places] = joined[first : first + count]
            made.append(own)
            first += count
        return made

    def _check_saturated(self) -> None:
        counter = None if self.plan.saturated is None else self.plan.saturated.storage
        if counter is None or counter.buffer is None or self._warned:
            return  # no kernel of these shapes counts them
        (count, *_) = np.frombuffer(self._device.read(counter.buffer, 16), np.uint32)
        if count:
            self._warned = True
            warnings.warn(
                f"{count:,} values of the vision tower exceed the maximum of matrix units (65,504 "
                "in float16) and were clamped, so the images' features are wrong; "
                "use train.compute_dtype: float32 or device.backend: wgpu",
                stacklevel=3,
            )

    def _write(self, step: TowerStep, crops: Sequence[Arranged], rows: int) -> None:
        given, device = step.given, self._device

        def put(tensor: Tensor | None, arrays: Sequence[FloatArray | None], dtype: str) -> None:
            if tensor is None:
                return
            assert tensor.storage is not None
            together = np.concatenate([array for array in arrays if array is not None])
            values = together.reshape(len(together), -1)
            whole = np.zeros((rows, values.shape[1]), np.float32)
            whole[: len(values)] = values
            padded = whole if tensor.rows == 1 else pad_rows(whole)
            device.write(tensor.storage.buffer, stored_bits(padded, dtype))

        put(given.pixels, [crop.pixels for crop in crops], self.plan.dtype)
        put(given.added, [crop.added for crop in crops], "float32")
        put(given.angles, [crop.angles for crop in crops], "float32")
        of_image = [np.full(len(crop.pixels), i + 1) for i, crop in enumerate(crops)]
        self._write_blocks(step.whole, np.concatenate(of_image), rows)
        if step.windowed is not step.whole:
            self._write_blocks(step.windowed, np.concatenate(list(_windows(crops))), rows)

    def _write_blocks(self, batch: BatchBuffers, numbers: npt.NDArray[Any], rows: int) -> None:
        """Neighbours with one number are a block and see no other tokens."""
        mask = np.zeros((1, rows), np.int64)
        mask[0, : len(numbers)] = numbers
        edges = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1, append=numbers[-1] + 1))
        blocks = np.zeros((1, rows, 2), np.int64)
        lengths = np.diff(edges)
        blocks[0, : len(numbers), 0] = np.repeat(edges[:-1], lengths)
        blocks[0, : len(numbers), 1] = np.repeat(edges[1:], lengths)
        data = encode_batch(batch, np.zeros_like(mask), mask, blocks=blocks)
        self._device.write(batch.storage.buffer, data)


def _windows(crops: Sequence[Arranged]) -> Iterator[npt.NDArray[np.int64]]:
    """The windows of all crops, numbered from 1 in ascending order."""
    first = 1
    for crop in crops:
        _, own = np.unique(crop.windows, return_inverse=True)
        yield first + own
        first += int(own.max()) + 1
