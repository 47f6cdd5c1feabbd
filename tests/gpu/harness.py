"""Runs ops on a device with inputs from NumPy, outputs poisoned with NaN before the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.profile import CPU_PROFILE, GPU_PROFILE, Profile, cpu_profile
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.plan import make_plan
from qlora_wgpu.graph.program import Program, SlotPool
from qlora_wgpu.graph.tensor import (
    Storage,
    Tensor,
    from_bfloat16,
    matrix,
    pad_rows,
    to_bfloat16,
    vector,
)
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers

PROFILES = {"cpu": CPU_PROFILE, "image": cpu_profile(16), "gpu": GPU_PROFILE}
DTYPES = ("float32", "bfloat16")
VARIANTS = [(p, d) for p in PROFILES for d in DTYPES]


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """What the device holds of an array, as float64."""
    array = np.asarray(array, np.float32)
    return (from_bfloat16(to_bfloat16(array)) if dtype == "bfloat16" else array).astype(np.float64)


@dataclass
class Bench:
    """A graph under test."""

    device: Device
    dtype: str
    profile: Profile
    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        if self.profile.image_lanes:  # as wide as this driver's subgroups
            own = cpu_profile(self.device.profile.image_lanes)
            names = ("logits_bytes", "head_block", "image_nt_rows", "image_nn_rows")
            self.profile = replace(own, **{name: getattr(self.profile, name) for name in names})
        self.graph = Graph(self.dtype, self.profile, self.device.max_binding)

    def given(self, array: np.ndarray, dtype: str = "float32", *, grad: bool = False) -> Tensor:
        """A tensor that holds an array: 2-D padded as matrices are, 1-D padded to a row."""
        array = np.asarray(array)
        if dtype in ("uint32", "int32"):
            data = np.ascontiguousarray(array.reshape(-1).astype(dtype))
            return vector("given", data.size, dtype, Storage("given", "test", data.nbytes, data))
        data = pad_rows(array.astype(np.float32))
        if dtype == "bfloat16":
            data = to_bfloat16(data)
        storage = Storage("given", "test", data.nbytes, data)
        if array.ndim == 1:
            tensor = vector("given", array.size, dtype, storage)
        else:
            tensor = matrix("given", *array.shape, dtype, storage)
        tensor.requires_grad = grad
        return tensor

    def operand(self, array: np.ndarray, *, grad: bool = False) -> Tensor:
        return self.given(array, self.dtype, grad=grad)

    def output(self, rows: int, columns: int) -> Tensor:
        """A float32 matrix of ones' complement bits (NaN) that outlives the run."""
        tensor = matrix("output", rows, columns, "float32")
        data = np.full(tensor.nbytes // 4, 0xFFFFFFFF, np.uint32)
        tensor.storage = Storage("output", "test", tensor.nbytes, data)
        return tensor

    def batch(
        self,
        size: int,
        seq: int,
        *,
        segments: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        ids: np.ndarray | None = None,
        dropout_key: int | None = None,
    ) -> BatchBuffers:
        batch = make_batch_buffers(size, seq)
        data = np.zeros(batch.storage.nbytes, np.uint8)

        def put(offset: int, values: np.ndarray) -> None:
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            data[offset : offset + raw.size] = raw

        put(batch.positions.offset, np.tile(np.arange(seq, dtype=np.uint32), size))
        given = np.ones((size, seq)) if segments is None else segments
        put(batch.segments.offset, given.astype(np.uint32))
        info = np.zeros(4, np.uint32)
        if targets is not None:
            rows = np.flatnonzero(targets.reshape(-1) != -100)
            info[0] = len(rows)
            put(batch.targets.offset, targets.astype(np.int32))
            put(batch.label_rows.offset, rows.astype(np.uint32))
        if ids is not None:
            put(batch.input_ids.offset, ids.astype(np.uint32))
        if dropout_key is not None:
            info[1:3] = 1, dropout_key
        put(batch.info.offset, info)
        batch.storage.data = data
        return batch

    def gradients(self, output: Tensor, cotangent: Tensor, *inputs: Tensor) -> list[Tensor]:
        """Runs the reverse pass from an output's gradient; returns those of the inputs."""
        self.graph.hand_over(output, cotangent)
        self.graph.backward()
        return [self.graph.gradient_of(x) for x in inputs]

    def run(self, *outputs: Tensor) -> list[np.ndarray]:
        """Runs the graph with all slots full of NaN; checks that padding came out zero."""
        plan = make_plan(self.graph, tuple(t for t in outputs if t.storage is None))
        program = Program(self.device, plan, SlotPool(self.device))
        for slot, size, image in zip(program._slots, plan.slots, plan.images, strict=True):
            write = self.device.write_image if image else self.device.write
            write(slot, np.full(-(-size // 4), 0xFFFFFFFF, np.uint32))
        program.run()
        return [self._array(program, tensor) for tensor in outputs]

    @staticmethod
    def _array(program: Program, tensor: Tensor) -> np.ndarray:
        raw = program.read(tensor)
        if tensor.dtype == "bfloat16":
            flat = from_bfloat16(np.frombuffer(raw, np.uint16))
        else:
            flat = np.frombuffer(raw, np.float32)
        rows = flat.reshape(tensor.rows, tensor.stride)
        assert not rows[:, tensor.columns :].any(), f"{tensor}: padding is not zero"
        return rows[:, : tensor.columns].astype(np.float64)


def assert_close(
    actual: np.ndarray, expected: np.ndarray, tolerance: float, why: str, terms: float = 0.0
) -> None:
    """Each element within tolerance x (largest |expected| + its own); NaN never passes.

    `terms` is the size of summed terms, where they may cancel to much less.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.size:
        return
    bound = tolerance * (max(np.abs(expected).max(), terms) + np.abs(expected)) + 1e-30
    good = np.abs(actual - expected) <= bound  # False for NaN
    worst = np.unravel_index(np.argmax(np.where(good, 0, 1)), good.shape)
    assert good.all(), (
        f"{(~good).sum()} of {good.size} differ beyond {tolerance} ({why}); "
        f"first at {worst}: {actual[worst]} for {expected[worst]}"
    )


def tolerance(dtype: str, depth: int = 1) -> float:
    """float32 sums of `depth` terms in any order; one rounding of results to bfloat16 (2^-9)."""
    exact = 4e-6 * max(1.0, np.sqrt(depth) / 8)
    return exact + (2**-8 if dtype == "bfloat16" else 0.0)


def finite_difference(f: Callable[[np.ndarray], float], x: np.ndarray, d: np.ndarray) -> float:
    """Central difference of f at x along d, in float64."""
    h = 1e-5
    return (f(x + h * d) - f(x - h * d)) / (2 * h)
