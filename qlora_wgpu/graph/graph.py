"""A traced computation: a flat list of kernel launches, and reverse mode over its ops.

An op is a Python function that adds launches to a graph and records its VJP, which is again a
function that adds launches. No model has a hand-written backward pass; nothing is decided while a
step runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.wgsl import Constant, Workgroups, fold_grid, fold_workgroups
from qlora_wgpu.graph.autodiff import VJP, Checkpointed, Tape
from qlora_wgpu.graph.launch import GraphError, Launch
from qlora_wgpu.graph.offload import CheckpointPolicy, OffloadedTensor, StagingBuffers
from qlora_wgpu.graph.rewrite import Rule
from qlora_wgpu.graph.tensor import TEXEL, Storage, Tensor, ceil_div, matrix, vector

__all__ = ["VJP", "Graph", "GraphError", "Launch"]


class Graph(Tape):
    """Launches in the order they run, and the tape of a reverse pass."""

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

        With ``sized`` it is traced only for its sizes: one launch stands for all its repetitions.
        """
        self.dtype = dtype  # of matmul operands, ``"bfloat16"`` or ``"float32"``
        self.profile = profile  # the configuration of kernels for the GPU
        self.max_binding = max_binding  # bytes
        # uint32; the counter of values that kernels clamp to their type's range, if any
        self.saturated = saturated
        self.recomputation = recomputation or CheckpointPolicy()
        self.rules = rules  # fusion rules, applied before planning
        self.launches: list[Launch] = []
        super().__init__()
        self._fetched = 0  # tensors restored from the host
        self._sized = sized

    # -- tensors ---------------------------------------------------------------------------

    def operand(self, name: str, rows: int, columns: int) -> Tensor:
        """An intermediate matrix for matmuls, in the graph's element type."""
        return matrix(name, rows, columns, self.dtype)

    @property
    def weight_dtype(self) -> str:
        return self.profile.weight_dtype(self.dtype)

    def weight(self, name: str, rows: int, columns: int) -> Tensor:
        return matrix(name, rows, columns, self.weight_dtype)

    def float32(self, name: str, rows: int, columns: int) -> Tensor:
        return matrix(name, rows, columns, "float32")

    def float_vector(self, name: str, length: int) -> Tensor:
        return vector(name, length, "float32")

    def integers(self, name: str, length: int) -> Tensor:
        return vector(name, length, "uint32")

    def constant(self, name: str, array: npt.NDArray[np.float32]) -> Tensor:
        """A table computed once on the host, and stored with the plan."""
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
        """Adds one dispatch of the shader at ``path``, whose variant depends on the bound tensors.

        ``workgroups`` is their number along x, y, z without limits, or for an element-wise kernel
        (``common/flat.wgsl``) the number of elements. ``tensors`` has one per binding, None if not
        bound, ``params`` the fields of ``Params``, ``constants`` those appended to the source,
        whose booleans select lines. ``flops`` counts products only. ``turns`` is a bound on the
        iterations of an invocation's loops if they grow with batch or model; for an element-wise
        kernel, those for one element.
        """
        label = label or path.removesuffix(".wgsl")
        most = self.profile.most_turns
        if 0 < most < turns:
            raise OutOfMemoryError(
                f"{label} needs {turns:,} loop iterations for this batch, but software GPUs "
                f"support at most {most:,}: lower data.max_seq_length or "
                "train.per_device_train_batch_size, or use a GPU"
            )
        chosen = dict(constants or {})
        if isinstance(workgroups, int):
            flat, each = self.profile.flat_group, self.profile.elements_per_thread
            if most and turns:  # the loop over elements has iterations, too
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
        """Adds earlier launches again, which is cheaper than tracing them; no VJP is recorded.

        ``shared`` maps bound tensors to replacements: all other intermediates that they write
        become new ones. ``params`` are fields that change, for shaders that have them. If
        ``launches`` are repetitions themselves (``stands_for_all``), another one changes no size.
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

    def checkpoint_offloaded(
        self, function: Checkpointed, xs: Sequence[Tensor], staging: StagingBuffers
    ) -> Sequence[Tensor]:
        """``checkpoint`` whose first argument is offloaded in between."""
        offloaded = self._offload(xs[0], staging)
        return self.checkpoint(function, xs, lambda: self._restore(offloaded, xs[0], staging))

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

    def _add(self, total: Tensor, a: Tensor | None, b: Tensor) -> None:
        units = total.rows * total.units(8)
        constants = {"ACCUMULATE": a is None}
        tensors = {"y": total, "a": a, "b": b}
        self.launch("tensor/add.wgsl", units, tensors, constants=constants)
