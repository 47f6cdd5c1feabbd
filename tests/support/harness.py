"""Runs ops on a device with inputs from NumPy, outputs poisoned with NaN before the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, Profile, cpu_profile
from qlora_wgpu.graph import program
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.program import BufferPool, Program, allocate
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.selfcheck import runner
from qlora_wgpu.selfcheck.cases.common import compare_op
from qlora_wgpu.selfcheck.runner import POISON, Runner, rounded
from support.shaders import FEW_ROWS

__all__ = [
    "DTYPES",
    "PROFILES",
    "VARIANTS",
    "Bench",
    "assert_checked",
    "assert_close",
    "assert_formula",
    "finite_difference",
    "rounded",
    "tolerance",
]

PROFILES = {"cpu": CPU_PROFILE, "texture": cpu_profile(16, FEW_ROWS), "gpu": GPU_PROFILE}
DTYPES = ("float32", "bfloat16")
VARIANTS = [(p, d) for p in PROFILES for d in DTYPES]


ROOM = 256  # bytes behind what kernels make


def allocate_with_room(device: Device, storage: Storage) -> None:
    """As ``allocate`` does, with room behind a whole buffer that is its own."""
    whole = storage.whole
    elsewhere = whole.group is not None or whole.on_host is not None or whole.texture
    if elsewhere or whole.buffer is not None or whole.parts:
        allocate(device, storage)
        return
    whole.buffer = device.buffer(whole.nbytes + ROOM, whole.kind, whole.label)
    if whole.data is not None:
        device.fill(whole.buffer, whole.data)
    device.write(whole.buffer, np.full(ROOM // 4, POISON, np.uint32), whole.nbytes)
    vars(whole)["has_room"] = True


class Guarded(Program):
    """A program whose kernels may write behind what they make, and then are told."""

    def __init__(self, device: Device, plan: Plan, pool: BufferPool) -> None:
        self._ends = plan.slots
        roomy = (s + ROOM * (not t) for s, t in zip(plan.slots, plan.textures, strict=True))
        super().__init__(device, replace(plan, slots=tuple(roomy)), pool)
        for slot, end in self._slots_with_room():
            device.write(slot, np.full(ROOM // 4, POISON, np.uint32), end)

    def run(self) -> None:
        super().run()
        wholes = {id(s.whole): s.whole for s in self.plan.storages if "has_room" in vars(s.whole)}
        own = ((whole.buffer, whole.nbytes) for whole in wholes.values())
        for buffer, end in (*self._slots_with_room(), *own):
            behind = np.frombuffer(self._device.read(buffer, ROOM, end), np.uint32)
            assert (behind == POISON).all(), "a kernel has written behind its output"

    def _window(self, tensor: Tensor) -> tuple[Any, int, int]:
        buffer, offset, nbytes = super()._window(tensor)
        if tensor.texture:
            return buffer, offset, nbytes
        if tensor.storage is None:
            return buffer, offset, nbytes + ROOM
        # What follows a part is another one, whose values a test compares.
        more = ROOM if "has_room" in vars(tensor.storage.whole) else 0
        return buffer, offset, nbytes + more

    def read(self, tensor: Tensor) -> memoryview:
        return super().read(tensor)[: tensor.nbytes]

    def _slots_with_room(self) -> Iterator[tuple[Any, int]]:
        """The buffers of slots, and where their tensors end in them."""
        for slot, end, texture in zip(self._slots, self._ends, self.plan.textures, strict=True):
            if not texture:
                yield slot, end


class Bench(Runner):
    """A graph under test; its outputs' padding must come out zero, and what is behind them stay."""

    def __init__(self, device: Device, dtype: str, profile: Profile) -> None:
        if profile.subgroup_size:  # as wide as this driver's subgroups
            own = cpu_profile(device.profile.subgroup_size)
            names = ("logits_bytes", "head_block", "texture_nt_rows", "texture_nn_rows",
                     "in_textures", "short_loops")  # fmt: skip
            profile = replace(own, **{name: getattr(profile, name) for name in names})
        self.profile = profile
        super().__init__(device, profile, dtype, in_textures=profile.in_textures)

    def given(self, array: np.ndarray, dtype: str = "float32", *, grad: bool = False) -> Tensor:
        """A tensor that holds an array: 2-D padded as matrices are, 1-D padded to a row."""
        if dtype in ("uint32", "int32"):
            data = np.ascontiguousarray(np.asarray(array).reshape(-1).astype(dtype))
            return vector("given", data.size, dtype, Storage("given", "test", data.nbytes, data))
        return self._given(np.asarray(array, np.float32), dtype, grad)

    def output(self, rows: int, columns: int) -> Tensor:
        """A float32 matrix of ones' complement bits (NaN) that outlives the run."""
        tensor = matrix("output", rows, columns, "float32")
        data = np.full(tensor.nbytes // 4, 0xFFFFFFFF, np.uint32)
        tensor.storage = Storage("output", "test", tensor.nbytes, data)
        return tensor

    def batch_of(
        self,
        size: int,
        seq: int,
        *,
        segments: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        ids: np.ndarray | None = None,
        dropout_key: int | None = None,
        weights: np.ndarray | None = None,
    ) -> BatchBuffers:
        """A batch with segments and labels anywhere, which `inputs.pack` would not make."""
        batch = make_batch_buffers(
            size, seq, weighted=weights is not None, drops=dropout_key is not None
        )
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
            if weights is not None:
                put(batch.weights.offset, weights.reshape(-1)[rows].astype(np.float32))
        if ids is not None:
            put(batch.input_ids.offset, ids.astype(np.uint32))
        if dropout_key is not None:
            info[1:3] = 1, dropout_key
        put(batch.info.offset, info)
        batch.storage.data = data
        return batch

    def _run(self, outputs: tuple[Tensor, ...]) -> Program:
        with (
            mock.patch.object(runner, "Program", Guarded),
            mock.patch.object(runner, "allocate", allocate_with_room),
            mock.patch.object(program, "allocate", allocate_with_room),
        ):
            return super()._run(outputs)

    def _array(self, program: Program, tensor: Tensor) -> np.ndarray:
        if tensor.dtype == "uint32":
            return super()._array(program, tensor)
        rows = self._rows(program, tensor)
        assert not rows[:, tensor.columns :].any(), f"{tensor}: padding is not zero"
        return rows[:, : tensor.columns].astype(np.float64)


def assert_checked(
    device: Device, profile: str, dtype: str, check: Callable[..., None], *arguments: object
) -> Bench:
    """What a check of a driver runs with these arguments is as its reference has it."""
    bench = Bench(device, dtype, PROFILES[profile])
    check(bench, *arguments)
    assert bench.excess <= 1.0, f"{check.__name__}{arguments}: {bench.worst:.1e} off"
    return bench


def assert_formula(bench: Bench, *given: Any, sums: float = 4e-6, **options: Any) -> None:
    """Compares as ``compare_op`` does, with so much for sums of float32 in any order."""
    with mock.patch.object(runner, "SUMS", sums):
        compare_op(bench, *given, **options)
    assert bench.excess <= 1.0, bench.worst


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
