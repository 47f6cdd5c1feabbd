"""A traced computation: a flat list of kernel launches, and reverse mode over the ops that made it.

An op is a Python function that adds launches to a graph and records how a gradient passes back
through it (its VJP), which is again a function that adds launches. Nobody writes a model's
backward; nothing is decided while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import Constant, Workgroups, fold_grid, fold_workgroups
from qlora_wgpu.graph.autodiff import VJP, Checkpointed, JointVJP, RematRule, Tape
from qlora_wgpu.graph.launch import GraphError, Launch
from qlora_wgpu.graph.offload import CheckpointPolicy, OffloadedTensor, StagingBuffers
from qlora_wgpu.graph.rewrite import Rule
from qlora_wgpu.graph.tensor import TEXEL, Storage, Tensor, ceil_div, matrix, vector

__all__ = ["VJP", "Graph", "GraphError", "Launch"]


class Graph:
    """Launches in the order they run, and the tape of a reverse pass.

    Attributes:
        dtype: Element type of matmul operands, ``"bfloat16"`` or ``"float32"``.
        profile: How kernels are cut for the GPU.
        max_binding: Largest number of bytes that one binding may show.
        launches: What has been traced.
        saturated: uint32; where kernels count values that they had to hold at the end of their
            type, if anywhere.
        recomputation: What is computed again in the backward.
        rules: What rewrites its launches before they are planned.
    """

    def __init__(
        self,
        dtype: str,
        profile: Profile,
        max_binding: int = 128 << 20,
        saturated: Tensor | None = None,
        recomputation: CheckpointPolicy | None = None,
        *,
        rules: Sequence[Rule] = (),
        sized: bool = False,
    ) -> None:
        """Starts an empty graph.

        With ``sized`` it is traced for its sizes alone: a few launches stand for all that repeat.
        """
        self.dtype = dtype
        self.profile = profile
        self.max_binding = max_binding
        self.saturated = saturated
        self.recomputation = recomputation or CheckpointPolicy()
        self.rules = rules
        self.launches: list[Launch] = []
        self._tape = Tape(self.launches, self._add)
        self._fetched = 0  # tensors that come back from the host
        self._sized = sized

    # -- tensors ---------------------------------------------------------------------------

    def operand(self, name: str, rows: int, columns: int) -> Tensor:
        """An intermediate matrix that matmuls read, in the graph's element type."""
        return matrix(name, rows, columns, self.dtype)

    @property
    def weight_dtype(self) -> str:
        """Element type of frozen weights that products read."""
        return self.profile.weight_dtype(self.dtype)

    def weight(self, name: str, rows: int, columns: int) -> Tensor:
        """An intermediate matrix of frozen weights, in their type."""
        return matrix(name, rows, columns, self.weight_dtype)

    def float32(self, name: str, rows: int, columns: int) -> Tensor:
        """An intermediate float32 matrix."""
        return matrix(name, rows, columns, "float32")

    def float_vector(self, name: str, length: int) -> Tensor:
        """An intermediate float32 vector."""
        return vector(name, length, "float32")

    def integers(self, name: str, length: int) -> Tensor:
        """An intermediate uint32 vector."""
        return vector(name, length, "uint32")

    def constant(self, name: str, array: npt.NDArray[np.float32]) -> Tensor:
        """A table made on the host once and kept beside the plan."""
        storage = Storage(name, "tables", array.nbytes, data=array)
        return vector(name, array.size, "float32", storage)

    # -- launches --------------------------------------------------------------------------

    def launch(
        self,
        path: str,
        workgroups: Workgroups | int,
        tensors: Mapping[str, Tensor | None],
        params: Mapping[str, int | float] | None = None,
        constants: Mapping[str, Constant] | None = None,
        flops: int = 0,
        label: str = "",
        turns: int = 0,
    ) -> None:
        """Adds one dispatch; what is bound decides which variant of the shader runs.

        Args:
            path: The shader's file.
            workgroups: How many, along x, y, z, in any number; or for an element-wise kernel
                (``common/flat.wgsl``) how many elements.
            tensors: One per binding of the shader, by name; None for one that is not bound.
            params: The fields of its uniform ``Params``.
            constants: What is appended to its source; booleans choose its lines.
            flops: Floating-point operations, of products only.
            label: Shown in timing tables; the file's name by default.
            turns: Most turns that the loops of an invocation take together, where they grow with
                a batch or a model; of an element-wise kernel those of an element, of which an
                invocation takes fewer then.
        """
        label = label or path.removesuffix(".wgsl")
        most = self.profile.most_turns
        if 0 < most < turns:
            raise OutOfMemoryError(
                f"{label} takes {turns:,} turns of a loop for such a batch, and software GPUs "
                f"leave loops after {most:,}: lower data.max_seq_length or "
                "train.per_device_train_batch_size, or use a GPU"
            )
        chosen = dict(constants or {})
        if isinstance(workgroups, int):
            flat, each = self.profile.flat_group, self.profile.elements_per_thread
            if most and turns:  # the loop over elements has turns, too
                each = max(min(each, most // (turns + 1)), 1)
            chosen |= {"FLAT": flat, "ELEMENTS": each}
            workgroups = fold_workgroups(ceil_div(workgroups, flat * each))
        else:
            workgroups, folding = fold_grid(workgroups)
            chosen |= folding
        bound = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self.launches.append(Launch(path, bound, params or {}, chosen, workgroups, label, flops))

    def repeat(
        self,
        launches: Sequence[Launch],
        shared: Mapping[Tensor, Tensor],
        params: Mapping[str, int | float],
        *,
        stands_for_all: bool = False,
    ) -> Sequence[Launch]:
        """Adds launches that were added before once more, which is cheaper than tracing them again.

        Args:
            launches: Those, as they were added; nothing of them is recorded for a gradient.
            shared: What they write of others', and what takes its place. All other intermediates
                that they write are fresh ones.
            params: Fields of ``Params`` that are others, where a shader has them.
            stands_for_all: Whether ``launches`` are repeated ones, and one more changes no size.
        """
        if self._sized and stands_for_all:
            for launch in launches:
                launch.times += 1
            return launches
        begin, tensors = len(self.launches), dict(shared)
        for launch in launches:
            for tensor in launch.written():
                if tensor.storage is None and tensor not in tensors:
                    tensors[tensor] = copy(tensor)
            self.launches.append(launch.repeated(tensors, params))
        return self.launches[begin:]

    # -- reverse mode ----------------------------------------------------------------------

    def record(
        self,
        output: Tensor,
        inputs: list[Tensor],
        vjp: VJP,
        *,
        trains: bool = False,
        wanted: str | None = None,
        remake: RematRule | None = None,
    ) -> None:
        """Notes how a gradient passes back from an op's output.

        Args:
            output: What the op made.
            inputs: What it was made from.
            vjp: Adds the launches that pass ``output``'s gradient, of any type, on.
            trains: Whether the op itself holds parameters that want a gradient.
            wanted: The type that it reads ``output``'s gradient in, if not ``output``'s.
            remake: Makes the output's bits again in a cheap launch, from tensors that its VJP reads
                anyway.
        """

        def joint(gradients: list[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    vjp(gradient)

        self._tape.record([output], inputs, joint, trains=trains, wanted=wanted)
        if remake is not None:
            self.set_remat_rule(output, remake)

    def set_remat_rule(self, output: Tensor, remake: RematRule) -> None:
        """Notes how an output's bits are made again; ``remake`` as for ``record``."""
        if self.recomputation.remakes:
            self._tape.set_remat_rule(output, remake)

    def can_remake_jointly(
        self, outputs: Sequence[Tensor], remake: Callable[[], Sequence[Tensor]]
    ) -> None:
        """``set_remat_rule`` of several outputs, which one launch makes."""
        made = cache(remake)

        def one(i: int) -> Tensor:
            return made()[i]

        for i, output in enumerate(outputs):
            self.set_remat_rule(output, partial(one, i))

    def is_rematerialized(self, tensor: Tensor) -> bool:
        """Whether a backward makes an op's output again, which is not kept then."""
        return self._tape.is_rematerialized(tensor)

    def record_jointly(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        vjp: JointVJP,
        *,
        trains: bool = False,
        wanted: str | None = None,
    ) -> None:
        """``record`` of an op with several outputs.

        Args:
            outputs: What the op made.
            inputs: What it was made from.
            vjp: Is given the gradients of all outputs, None for those that lead to nothing.
            trains: Whether the op itself holds parameters that want a gradient.
            wanted: The type that it reads their gradients in, if not their own.
        """
        self._tape.record(outputs, inputs, vjp, trains=trains, wanted=wanted)

    def again(self, tensor: Tensor) -> Tensor:
        """An op's output for another one's VJP to read: itself, or the same made again."""
        return self._tape.again(tensor)

    def new_gradient(self, tensor: Tensor) -> Tensor:
        """A fresh matrix for a contribution to a tensor's gradient, in the type that suits it."""
        dtype = self._tape.gradient_dtype(tensor)
        return matrix(f"d {tensor.name}", tensor.rows, tensor.columns, dtype)

    def add_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds a contribution, of any type, to a tensor's gradient; its giver is done with it."""
        self._tape.add_gradient(tensor, gradient)

    def gradient_of(self, tensor: Tensor) -> Tensor:
        """The gradient of a tensor as gathered so far."""
        return self._tape.gradient_of(tensor)

    def backward(self) -> None:
        """Runs the tape backwards from the gradients added so far."""
        self._tape.backward()

    def checkpoint(
        self, function: Callable[[Tensor], Tensor], x: Tensor, parking: StagingBuffers | None = None
    ) -> Tensor:
        """``checkpoint_jointly`` of a function of one tensor that makes one."""

        def listed(xs: Sequence[Tensor]) -> Sequence[Tensor]:
            return [function(*xs)]

        return self.checkpoint_jointly(listed, [x], parking)[0]

    def checkpoint_jointly(
        self, function: Checkpointed, xs: Sequence[Tensor], parking: StagingBuffers | None = None
    ) -> Sequence[Tensor]:
        """Calls ``function(xs)`` and keeps nothing but xs for the backward, which calls it again.

        What the first call computed besides its results is read by nobody later, so its slots are
        free at once; what the second computes and nobody needs is never launched.

        Args:
            function: What is called twice; its results are fresh tensors, none of xs.
            xs: Its arguments.
            parking: What the first of them passes through to wait in host memory in between; by
                default it stays, as the others do.
        """
        if parking is None:
            return self._tape.checkpoint(function, xs)
        first = xs[0]
        waiting = self._park(first, parking)
        return self._tape.checkpoint(function, xs, lambda: self._unpark(waiting, first, parking))

    def _park(self, x: Tensor, parking: StagingBuffers) -> OffloadedTensor:
        parked = OffloadedTensor(x.name, x.nbytes)
        out = parking.download_buffer(x.nbytes)
        self._copy(x, matrix(x.name, *x.shape, x.dtype, out))
        self.launches[-1].saves = {"y": parked}
        return parked

    def _unpark(self, parked: OffloadedTensor, like: Tensor, parking: StagingBuffers) -> Tensor:
        back = parking.upload_buffer(parked.nbytes, self._fetched)
        self._fetched += 1
        x = matrix(parked.name, *like.shape, like.dtype)
        self._copy(matrix(parked.name, *like.shape, like.dtype, back), x)
        self.launches[-1].fetches = {"x": parked}
        return x

    def _copy(self, x: Tensor, y: Tensor) -> None:
        units = ceil_div(x.nbytes, TEXEL)
        self.launch("tensor/copy.wgsl", units, {"x": x, "y": y})

    def end(self) -> None:
        """Lets go of the tape, which would keep graph and memory until Python looks for cycles."""
        self._tape.end()

    def _add(self, total: Tensor, a: Tensor | None, b: Tensor) -> None:
        units = total.rows * total.units(8)
        constants = {"ACCUMULATE": a is None}
        tensors = {"y": total, "a": a, "b": b}
        self.launch("tensor/add.wgsl", units, tensors, constants=constants)
