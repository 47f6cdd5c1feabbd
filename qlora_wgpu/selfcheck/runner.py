"""Runs ops on NumPy arrays, for checks of a driver."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.program import BufferPool, Program, allocate
from qlora_wgpu.graph.tensor import (
    Storage,
    Tensor,
    ceil_div,
    matrix,
    pad_rows,
    row,
    stored_bits,
    stored_floats,
    vector,
)
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.steps import PolicyInputs, PreferenceInputs, SampleInputs, ScoreInputs
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.fusion import FUSIONS

Array = npt.NDArray[np.float64]


# The error of float32 sums in any order, relative to the largest value.
SUMS = 2e-5
# The relative rounding error of storing a value: half a unit of its last place.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}

# NaN as float32, and in both halves as bfloat16: shows reads before writes.
POISON = 0x7FC17FC1


def rounded(array: npt.ArrayLike, dtype: str) -> Array:
    """An array rounded to a type, as float64."""
    exact = np.asarray(array, np.float32)
    held = stored_floats(stored_bits(exact, dtype).tobytes(), dtype)
    return held.reshape(exact.shape).astype(np.float64)


class Runner:
    """A graph with NumPy inputs and outputs.

    Attributes:
        graph: The graph that ops are traced into.
        worst: The maximum error so far, relative to the largest value.
        excess: The maximum error as a multiple of the tolerance.
        launches: The launches that ran.
    """

    def __init__(
        self, device: Device, profile: Profile, dtype: str, *, in_textures: bool = False
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._in_textures = in_textures and profile.textures
        profile = replace(profile, in_textures=self._in_textures)
        self.graph = Graph(dtype, profile, device.max_binding, _counts(profile), rules=FUSIONS)
        self.worst = 0.0
        self.excess = 0.0
        self.launches: list[Launch] = []

    @property
    def shaders(self) -> set[str]:
        return {launch.path for launch in self.launches}

    def rounded(self, array: Array) -> Array:
        """An array rounded to operands."""
        return rounded(array, self.dtype)

    def rounded_weight(self, array: Array) -> Array:
        """An array rounded to frozen weights."""
        return rounded(array, self.graph.weight_dtype)

    def float32(self, array: Array, *, grad: bool = False) -> Tensor:
        return self._given(np.asarray(array, np.float32), "float32", grad)

    def operand(self, array: Array, *, grad: bool = False) -> Tensor:
        return self._given(np.asarray(array, np.float32), self.dtype, grad)

    def weight(self, array: Array) -> Tensor:
        return self._given(np.asarray(array, np.float32), self.graph.weight_dtype, False)

    def _given(self, array: npt.NDArray[np.float32], dtype: str, grad: bool) -> Tensor:
        data = stored_bits(pad_rows(np.asarray(array, np.float32)), dtype)
        storage = Storage("given", "check", data.nbytes, data)
        if array.ndim == 1:
            tensor = row("given", array.size, dtype, storage)
        else:
            tensor = matrix("given", array.shape[0], array.shape[1], dtype, storage)
        tensor.requires_grad = grad
        return tensor

    def batch(
        self,
        mask: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64] | None = None,
        targets: npt.NDArray[np.int64] | None = None,
        dropout_key: int | None = None,
        noise: float = 0.0,
        weights: npt.NDArray[np.float32] | None = None,
        samples: SampleInputs | None = None,
        blocks: npt.NDArray[np.int64] | None = None,
    ) -> BatchBuffers:
        buffers = make_batch_buffers(
            *mask.shape,
            noise=noise,
            weighted=weights is not None,
            drops=dropout_key is not None,
            sampled=isinstance(samples, PreferenceInputs | PolicyInputs),
            blocked=blocks is not None,
            completions=isinstance(samples, PolicyInputs),
            sequence_width=samples.targets.shape[1] if isinstance(samples, ScoreInputs) else 0,
        )
        ids = np.zeros_like(mask) if ids is None else ids
        buffers.storage.data = batch_encoding.encode_batch(
            buffers, ids, mask, targets, dropout_key=dropout_key, weights=weights, samples=samples,
            blocks=blocks,
        )  # fmt: skip
        return buffers

    def gradients(self, output: Tensor, cotangent: Tensor, *of: Tensor) -> list[Tensor]:
        self.graph.add_gradient(output, cotangent)
        self.graph.backward()
        return [self.graph.gradient_of(x) for x in of]

    def run(self, *outputs: Tensor) -> list[Array]:
        """Runs everything with slots initialized to NaN, and returns some results."""
        program = self._run(outputs)
        return [self._array(program, tensor) for tensor in outputs]

    def run_bits(self, *outputs: Tensor) -> list[npt.NDArray[np.uint32]]:
        """Like ``run``, but returns results as the bits of float32."""
        program = self._run(outputs)
        return [self._rows(program, t)[:, : t.columns].copy().view(np.uint32) for t in outputs]

    def _plan(self, outputs: tuple[Tensor, ...]) -> Plan:
        if self._in_textures:
            self._move_inputs()
        intermediates = tuple(t for t in outputs if t.storage is None)
        plan = compile_plan(self.graph, intermediates)
        self.launches += plan.launches
        return plan

    def _move_inputs(self) -> None:
        """Moves inputs into textures if all readers support that."""
        readers: dict[Storage, list[tuple[Tensor, str]]] = {}
        for launch in self.graph.launches:
            for name, tensor in launch.tensors.items():
                if tensor.storage is not None:
                    use = tensor, launch.shader.bindings[name].memory
                    readers.setdefault(tensor.storage, []).append(use)
        for storage, uses in readers.items():
            movable = storage.label == "given" and storage.buffer is None
            if movable and all(memory != "buffer" and t.rows > 1 for t, memory in uses):
                storage.texture = True
                for tensor, _ in uses:
                    tensor.texture = True

    def _run(self, outputs: tuple[Tensor, ...]) -> Program:
        plan = self._plan(outputs)
        for tensor in outputs:  # an op may return its input
            if tensor.storage is not None:
                allocate(self.device, tensor.storage)
        program = Program(self.device, plan, BufferPool(self.device))
        for slot, size, texture in zip(program._slots, plan.slots, plan.textures, strict=True):
            write = self.device.write_texture if texture else self.device.write
            write(slot, np.full(ceil_div(size, 4), POISON, np.uint32))
        program.run()
        return program

    @staticmethod
    def _rows(program: Program, tensor: Tensor) -> npt.NDArray[np.float32]:
        raw = program.read(tensor)
        return stored_floats(raw, tensor.dtype).reshape(tensor.rows, tensor.stride)

    def _array(self, program: Program, tensor: Tensor) -> Array:
        if tensor.dtype == "uint32":
            numbers = np.frombuffer(program.read(tensor), np.uint32)[: tensor.columns]
            return numbers.astype(np.float64)
        rows = self._rows(program, tensor)
        written = ~np.isnan(rows).all(axis=1)
        if rows[written, tensor.columns :].any():
            self.excess = float("inf")  # kernels rely on zeros there
        return rows[:, : tensor.columns].astype(np.float64)

    def compare(
        self,
        got: Array,
        expected: Array,
        dtype: str = "float32",
        *,
        inner: float | Array = 0.0,
        by_row: bool = False,
    ) -> None:
        """Records a result's error from its reference; NaN counts as infinite, in either of them.

        Also checks the sum of errors, since rounding should have no bias.
        """
        if not np.isfinite(expected).all():
            self.worst = self.excess = float("inf")
            return
        sizes = np.abs(expected)
        largest = sizes.max(axis=-1, keepdims=True, initial=0.0) if by_row else sizes.max(initial=0)
        scale = np.maximum(largest, 1e-30)
        apart = np.asarray(got) - expected
        apart = np.where(np.isfinite(apart), apart, np.inf)
        roundings = inner * scale if isinstance(inner, float) else inner
        roundings = roundings + ROUNDING[dtype] * sizes
        sums = SUMS * scale + np.zeros_like(sizes)
        self.worst = max(self.worst, float((np.abs(apart) / scale).max(initial=0.0)))
        excess = np.abs(apart) / (roundings + sums)
        self.excess = max(self.excess, float(excess.max(initial=0.0)))
        if not sizes.size or not np.isfinite(self.excess):
            return  # infinities have no sum
        outwards = abs(float(np.sum(np.where(expected < 0, -apart, apart))))
        likely = 4.0 * float(np.sqrt(np.sum(roundings**2))) + float(np.sum(sums))
        self.excess = max(self.excess, outwards / likely)

    def compare_each(self, got: Array, expected: npt.ArrayLike) -> None:
        """Compares numbers one by one, with relative errors."""
        for value, exact in zip(got, np.asarray(expected, np.float64), strict=True):
            self.compare(value, exact)

    def compare_exactly(self, got: Array, expected: Array) -> None:
        """Records whether a result is bit-exact; NaN equals NaN."""
        same = np.asarray(got) == expected
        if not (same | (np.isnan(got) & np.isnan(expected))).all():
            self.worst = self.excess = float("inf")


def _counts(profile: Profile) -> Tensor | None:
    """The counter of values that kernels clamp, if they do."""
    return new_counts() if profile.saturates else None


def new_counts() -> Tensor:
    storage = Storage("saturated", "check", 16, np.zeros(4, np.uint32))
    return vector("saturated", 4, "uint32", storage)


class TracingDone(Exception):
    """Raised after a check has traced all its launches."""


class Tracer(Runner):
    """Records a check's launches, and ends it before it runs."""

    def run(self, *outputs: Tensor) -> list[Array]:
        self._plan(outputs)
        raise TracingDone

    def run_bits(self, *outputs: Tensor) -> list[npt.NDArray[np.uint32]]:
        """Records the launches and returns zeros: checks that read bits continue with more."""
        self._plan(outputs)
        return [np.zeros((t.rows, t.columns), np.uint32) for t in outputs]
