"""A traced computation: a flat list of kernel launches, and reverse mode over the ops that made it.

An op is a Python function that adds launches to a graph and records how a gradient passes back
through it (its VJP), which is again a function that adds launches. Nobody writes a model's
backward; nothing is decided while a step runs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import fold_workgroups
from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.gpu.wgsl import Constant, Shader, load_shader
from qlora_wgpu.graph.tensor import Storage, Tensor, matrix, vector

VJP = Callable[[Tensor], None]


class GraphError(Exception):
    """An op was launched or differentiated wrongly: a programming error, not a user's."""


@dataclass(eq=False)
class Launch:
    """One dispatch of one shader.

    Attributes:
        shader: What runs.
        tensors: What is bound, by the shader's names.
        params: Bytes of the shader's uniform.
        workgroups: How many, along x, y, z.
        label: The op, for timing tables.
        flops: Floating-point operations, of products only.
    """

    shader: Shader
    tensors: dict[str, Tensor]
    params: bytes
    workgroups: tuple[int, int, int]
    label: str
    flops: int

    def written(self) -> list[Tensor]:
        """The tensors this launch may write."""
        return [t for n, t in self.tensors.items() if self.shader.bindings[n].writable]


class Graph:
    """Launches in the order they run, and the tape of a reverse pass.

    Attributes:
        dtype: Element type of matmul operands, ``"bfloat16"`` or ``"float32"``.
        profile: How kernels are cut for the adapter.
        max_binding: Largest number of bytes that one binding may show.
        launches: What has been traced.
        images: The image made of a tensor (or of a whole storage), so that it is made once.
    """

    def __init__(self, dtype: str, profile: Profile, max_binding: int = 128 << 20) -> None:
        """Starts an empty graph."""
        self.dtype = dtype
        self.profile = profile
        self.max_binding = max_binding
        self.launches: list[Launch] = []
        self.images: dict[Tensor | Storage, Tensor] = {}
        self._tape: list[tuple[Tensor, VJP]] | None = []
        self._gradients: dict[Tensor, Tensor] = {}

    @property
    def bf16(self) -> bool:
        """Whether matmul operands are bfloat16."""
        return self.dtype == "bfloat16"

    # -- tensors ---------------------------------------------------------------------------

    def operand(self, name: str, rows: int, columns: int, *, image: bool = False) -> Tensor:
        """An intermediate matrix that matmuls read, in the graph's element type.

        Args:
            name: For messages and plans.
            rows: Number of rows.
            columns: Elements of a row.
            image: Whether it may lie in an image, where the adapter's kernels read those.
        """
        made = matrix(name, rows, columns, self.dtype)
        made.image = image and self.profile.images
        return made

    def float32(self, name: str, rows: int, columns: int) -> Tensor:
        """An intermediate float32 matrix."""
        return matrix(name, rows, columns, "float32")

    def float_vector(self, name: str, length: int) -> Tensor:
        """An intermediate float32 vector."""
        return vector(name, length, "float32")

    def constant(self, name: str, array: npt.NDArray[np.float32]) -> Tensor:
        """A table made on the host once and kept beside the plan."""
        storage = Storage(name, "tables", array.nbytes, data=array)
        return vector(name, array.size, "float32", storage)

    # -- launches --------------------------------------------------------------------------

    def launch(
        self,
        path: str,
        workgroups: tuple[int, int, int] | int,
        tensors: dict[str, Tensor],
        params: Mapping[str, int | float] | None = None,
        constants: Mapping[str, Constant] | None = None,
        flops: int = 0,
        label: str = "",
    ) -> None:
        """Adds one dispatch.

        Args:
            path: The shader's file.
            workgroups: How many, along x, y, z; or for an element-wise kernel
                (``common/flat.wgsl``) how many elements.
            tensors: One per binding of the shader, by name.
            params: The fields of its uniform ``Params``.
            constants: What is appended to its source; booleans choose its lines.
            flops: Floating-point operations, of products only.
            label: Shown in timing tables; the file's name by default.

        Raises:
            GraphError: If a binding is missing, unknown, or of another type or kind of memory.
        """
        chosen = dict(constants or {})
        if isinstance(workgroups, int):
            flat, turns = self.profile.flat_group, self.profile.flat_turns
            chosen |= {"FLAT": flat, "TURNS": turns}
            workgroups = fold_workgroups(ceil_div(workgroups, flat * turns))
        shader = load_shader(path, tuple(sorted(chosen.items())))
        if set(tensors) != set(shader.bindings):
            wrong = sorted(set(tensors) ^ set(shader.bindings))
            raise GraphError(f"{shader.label}: bindings {wrong} are missing or unknown")
        for name, tensor in tensors.items():
            binding = shader.bindings[name]
            if tensor.dtype not in binding.dtypes:
                allowed = " or ".join(sorted(binding.dtypes))
                raise GraphError(f"{shader.label}: {name} = {tensor} is not {allowed}")
            if tensor.image != binding.image:
                raise GraphError(
                    f"{shader.label}: {name} = {tensor} is of the other kind of memory"
                )
        try:
            packed = shader.pack_params(params or {}) if shader.params else b""
        except struct.error:
            raise OutOfMemoryError(
                f"{label or path} would need tensors of more elements than kernels count (2³²): "
                "lower the batch size or data.max_seq_length"
            ) from None
        self.launches.append(
            Launch(shader, tensors, packed, workgroups, label or path.removesuffix(".wgsl"), flops)
        )

    # -- reverse mode ----------------------------------------------------------------------

    def record(
        self, output: Tensor, inputs: list[Tensor], vjp: VJP, *, trains: bool = False
    ) -> None:
        """Notes how a gradient passes back from an op's output.

        Args:
            output: What the op made.
            inputs: What it was made from.
            vjp: Adds the launches that pass ``output``'s gradient on.
            trains: Whether the op itself holds parameters that want a gradient.
        """
        output.requires_grad = trains or any(t.requires_grad for t in inputs)
        if output.requires_grad and self._tape is not None:
            self._tape.append((output, vjp))

    def gradient_into(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Where a contribution to a tensor's gradient goes, and whether to add to what is there."""
        found = self._gradients.get(tensor)
        if found is not None:
            if found.dtype != "float32" or found.image:
                raise GraphError(f"{found} cannot be added to")
            return found, True
        made = matrix(f"d {tensor.name}", tensor.rows, tensor.columns, "float32")
        self._gradients[tensor] = made
        return made, False

    def gradient_of(self, tensor: Tensor) -> Tensor:
        """What has been gathered of a tensor's gradient."""
        return self._gradients[tensor]

    def hand_over(self, tensor: Tensor, gradient: Tensor) -> None:
        """Makes ``gradient`` a tensor's own, without a copy: its giver must be done with it."""
        if tensor in self._gradients:
            raise GraphError(f"{tensor} has a gradient already")
        self._gradients[tensor] = gradient

    def backward(self) -> None:
        """Runs the tape backwards from the gradients handed over so far."""
        if self._tape is None:
            raise GraphError("nothing was recorded")
        tape, self._tape = self._tape, None
        for output, vjp in reversed(tape):
            gradient = self._gradients.pop(output, None)
            if gradient is not None:
                vjp(gradient)
        self._tape = []

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Calls ``function(x)`` and keeps nothing but x for the backward, which calls it again.

        What the first call computed besides its result is read by nobody later, so its slots are
        free at once; what the second computes and nobody needs is never launched.
        """
        with self._without_tape():
            y = function(x)

        def vjp(dy: Tensor) -> None:
            outer, self._tape = self._tape, []
            again = function(x)
            self.hand_over(again, dy)
            self.backward()
            self._tape = outer

        self.record(y, [y], vjp)
        return y

    @contextmanager
    def _without_tape(self) -> Iterator[None]:
        outer, self._tape = self._tape, None
        try:
            yield
        finally:
            self._tape = outer


def ceil_div(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)
