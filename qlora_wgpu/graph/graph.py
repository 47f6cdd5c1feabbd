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
        profile: How kernels are configured for the GPU.
        max_binding: The largest binding, in bytes.
        launches: What has been traced.
        saturated: uint32; where kernels count the values that they clamped to the range of their
            type, if anywhere.
        recomputation: What is computed again in the backward.
        rules: Fusions, which rewrite the launches before they are planned.
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

        With ``sized`` it is traced for its sizes alone: one launch stands for all that repeat it.
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
            turns: Upper bound of the iterations of an invocation's loops, where they grow with a
                batch or a model; of an element-wise kernel those for one element, of which an
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
        """Adds earlier launches once more, which is cheaper than tracing them again.

        Args:
            launches: Those, as they were added; nothing is recorded for a gradient.
            shared: Tensors that they bind, with what takes their place. All other intermediates
                that they write become fresh ones.
            params: Fields of ``Params`` that change, where a shader has them.
            stands_for_all: Whether ``launches`` are repeated ones, so that one more changes no
                size.
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
        remat: RematRule | None = None,
    ) -> None:
        """Notes how a gradient passes back from an op's output.

        Args:
            output: What the op made.
            inputs: What it was made from.
            vjp: Adds the launches that pass ``output``'s gradient, of any type, on.
            trains: Whether the op itself has trained parameters.
            wanted: The type that it reads ``output``'s gradient in, if not ``output``'s.
            remat: Recomputes the output bit for bit in a cheap launch, from tensors that its VJP
                reads anyway.
        """

        def joint(gradients: list[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    vjp(gradient)

        self._tape.record([output], inputs, joint, trains=trains, wanted=wanted)
        if remat is not None:
            self.set_remat_rule(output, remat)

    def set_remat_rule(self, output: Tensor, remat: RematRule) -> None:
        """Notes how an output is rematerialized; ``remat`` as for ``record``."""
        if self.recomputation.remakes:
            self._tape.set_remat_rule(output, remat)

    def set_joint_remat_rule(
        self, outputs: Sequence[Tensor], remat: Callable[[], Sequence[Tensor]]
    ) -> None:
        """``set_remat_rule`` of several outputs of one launch."""
        remat_once = cache(remat)

        def one(i: int) -> Tensor:
            return remat_once()[i]

        for i, output in enumerate(outputs):
            self.set_remat_rule(output, partial(one, i))

    def is_rematerialized(self, tensor: Tensor) -> bool:
        """Whether an op's output is recomputed in the backward instead of kept."""
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
            trains: Whether the op itself has trained parameters.
            wanted: The type that it reads their gradients in, if not their own.
        """
        self._tape.record(outputs, inputs, vjp, trains=trains, wanted=wanted)

    def rematerialize(self, tensor: Tensor) -> Tensor:
        """An op's output for a VJP to read: the tensor itself, or the same recomputed."""
        return self._tape.rematerialize(tensor)

    def new_gradient(self, tensor: Tensor) -> Tensor:
        """A fresh matrix for a contribution to a tensor's gradient, in the best type for it."""
        dtype = self._tape.gradient_dtype(tensor)
        return matrix(f"d {tensor.name}", tensor.rows, tensor.columns, dtype)

    def add_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds a contribution, of any type, to a tensor's gradient; the caller gives it away."""
        self._tape.add_gradient(tensor, gradient)

    def gradient_of(self, tensor: Tensor) -> Tensor:
        """The gradient of a tensor as accumulated so far."""
        return self._tape.gradient_of(tensor)

    def backward(self) -> None:
        """Runs the tape backwards from the gradients added so far."""
        self._tape.backward()

    def checkpoint(
        self, function: Callable[[Tensor], Tensor], x: Tensor, staging: StagingBuffers | None = None
    ) -> Tensor:
        """``checkpoint_jointly`` of a function of one tensor that makes one."""

        def listed(xs: Sequence[Tensor]) -> Sequence[Tensor]:
            return [function(*xs)]

        return self.checkpoint_jointly(listed, [x], staging)[0]

    def checkpoint_jointly(
        self, function: Checkpointed, xs: Sequence[Tensor], staging: StagingBuffers | None = None
    ) -> Sequence[Tensor]:
        """Calls ``function(xs)`` and keeps nothing but xs for the backward, which calls it again.

        What the first call computed besides its results is read by nobody later, so its slots are
        free at once; what the second computes and nobody needs is never launched.

        Args:
            function: What is called twice; its results are fresh tensors, none of xs.
            xs: Its arguments.
            staging: The buffers through which the first of them is offloaded to host memory in
                between; by default it stays on the device, as the others do.
        """
        if staging is None:
            return self._tape.checkpoint(function, xs)
        first = xs[0]
        offloaded = self._offload(first, staging)
        return self._tape.checkpoint(function, xs, lambda: self._restore(offloaded, first, staging))

    def _offload(self, x: Tensor, staging: StagingBuffers) -> OffloadedTensor:
        offloaded = OffloadedTensor(x.name, x.nbytes)
        out = staging.download_buffer(x.nbytes)
        self._copy(x, matrix(x.name, *x.shape, x.dtype, out))
        self.launches[-1].saves = {"y": offloaded}
        return offloaded

    def _restore(self, offloaded: OffloadedTensor, like: Tensor, staging: StagingBuffers) -> Tensor:
        back = staging.upload_buffer(offloaded.nbytes, self._fetched)
        self._fetched += 1
        x = matrix(offloaded.name, *like.shape, like.dtype)
        self._copy(matrix(offloaded.name, *like.shape, like.dtype, back), x)
        self.launches[-1].fetches = {"x": offloaded}
        return x

    def _copy(self, x: Tensor, y: Tensor) -> None:
        units = ceil_div(x.nbytes, TEXEL)
        self.launch("tensor/copy.wgsl", units, {"x": x, "y": y})

    def end(self) -> None:
        """Drops the tape, which would keep graph and memory alive until a garbage collection."""
        self._tape.end()

    def _add(self, total: Tensor, a: Tensor | None, b: Tensor) -> None:
        units = total.rows * total.units(8)
        constants = {"ACCUMULATE": a is None}
        tensors = {"y": total, "a": a, "b": b}
        self.launch("tensor/add.wgsl", units, tensors, constants=constants)
