"""Reverse-mode differentiation: a tape of ops, and accumulation of their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial

from qlora_wgpu.graph.launch import GraphError, Launch
from qlora_wgpu.graph.offload import CheckpointPolicy
from qlora_wgpu.graph.tensor import Tensor, matrix

VJP = Callable[[Tensor], None]
JointVJP = Callable[[list[Tensor | None]], None]
RematRule = Callable[[], Tensor]
Checkpointed = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Tape:
    """The recorded ops, and the gradients accumulated so far.

    Several tensors may share a gradient (a residual addition passes it on), so nothing is added to
    it in place unless it has one owner and no running VJP may still read it.
    """

    launches: list[Launch]  # the trace, which VJPs append to
    recomputation: CheckpointPolicy  # what is recomputed in the backward pass

    def __init__(self) -> None:
        self._ops: list[tuple[Sequence[Tensor], JointVJP]] | None = []
        self._gradients: dict[Tensor, Tensor] = {}
        self._holders: Counter[Tensor] = Counter()
        self._uses: Counter[Tensor] = Counter()  # uses by recorded ops
        self._grad_dtypes: dict[
            Tensor, str
        ] = {}  # types of gradients that differ from their tensors'
        self._handed: list[Tensor | None] = []  # the gradients passed to the running VJP
        self._begin = 0  # the running VJP's first launch
        self._remat_rules: dict[Tensor, RematRule] = {}
        self._rematerialized: dict[Tensor, Tensor] = {}

    def _add(self, total: Tensor, a: Tensor | None, b: Tensor) -> None:
        """Launches ``total = a + b``, or ``total += b`` if ``a`` is None."""
        raise NotImplementedError

    # -- recording -------------------------------------------------------------------------

    def record(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        vjp: VJP,
        *,
        trains: bool = False,
        grad_dtype: str | None = None,
        remat: RematRule | None = None,
    ) -> None:
        """Records an op: ``vjp`` receives the gradient of its output, of any type.

        ``trains`` is whether the op itself has trained parameters, ``grad_dtype`` the type in which
        it reads the gradient, if not the output's. ``remat`` recomputes the output bit-exactly in a
        cheap launch, from tensors that the VJP reads anyway.
        """

        def joint(gradients: list[Tensor | None]) -> None:
            for gradient in gradients:
                if gradient is not None:
                    vjp(gradient)

        self.record_jointly([output], inputs, joint, trains=trains, grad_dtype=grad_dtype)
        if remat is not None:
            self.set_remat_rule(output, remat)

    def record_jointly(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        vjp: JointVJP,
        *,
        trains: bool = False,
        grad_dtype: str | None = None,
    ) -> None:
        """``record`` for an op with several outputs.

        ``vjp`` receives the gradients of all outputs, None for unused ones.
        """
        requires_grad = trains or any(t.requires_grad for t in inputs)
        for output in outputs:
            output.requires_grad = requires_grad
        if requires_grad and self._ops is not None:
            self._ops.append((tuple(outputs), vjp))
            self._uses.update(inputs)
            self._grad_dtypes.update(
                dict.fromkeys(outputs, grad_dtype) if grad_dtype is not None else {}
            )

    def set_remat_rule(self, output: Tensor, remat: RematRule) -> None:
        """Sets how the output just recorded is rematerialized; ``remat`` as for ``record``."""
        if self.recomputation.remakes and output.requires_grad and self._ops is not None:
            self._remat_rules[output] = remat

    def set_joint_remat_rule(
        self, outputs: Sequence[Tensor], remat: Callable[[], Sequence[Tensor]]
    ) -> None:
        """``set_remat_rule`` for several outputs of one launch."""
        remat_once = cache(remat)

        def one(i: int) -> Tensor:
            return remat_once()[i]

        for i, output in enumerate(outputs):
            self.set_remat_rule(output, partial(one, i))

    def is_rematerialized(self, tensor: Tensor) -> bool:
        """Whether an op's output is recomputed in the backward pass instead of kept."""
        return tensor in self._remat_rules

    def rematerialize(self, tensor: Tensor) -> Tensor:
        """An op's output for a VJP: itself, or recomputed by the first VJP that reads it."""
        if tensor in self._remat_rules:
            self._rematerialized[tensor] = self._remat_rules.pop(tensor)()
        return self._rematerialized.get(tensor, tensor)

    # -- gradients -------------------------------------------------------------------------

    def new_gradient(self, tensor: Tensor) -> Tensor:
        """A new matrix for a contribution to a tensor's gradient, in the best type.

        If a single recorded op reads the tensor, and so computes its whole gradient, that is the
        type that the op before reads; sums of several contributions are float32.
        """
        dtype = "float32"
        if self._uses[tensor] == 1:
            dtype = self._grad_dtypes.get(tensor, tensor.dtype)
        return matrix(f"d {tensor.name}", tensor.rows, tensor.columns, dtype)

    def gradient_of(self, tensor: Tensor) -> Tensor:
        return self._gradients[tensor]

    def add_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        """Adds a contribution, of any type, to a tensor's gradient, and takes ownership of it.

        The first contribution is kept without a copy. Later ones are added to it by the kernels
        that compute them, if these can add and nothing else reads them.
        """
        if gradient.shape != tensor.shape:
            raise GraphError(f"{gradient} is not a gradient of {tensor}")
        if not tensor.requires_grad:
            return
        total = self._gradients.get(tensor)
        if total is None:
            self._hold(tensor, gradient)
        elif not self._is_own(total):
            self._release(tensor)
            fresh = matrix(f"d {tensor.name}", *tensor.shape, "float32")
            self._add(fresh, total, gradient)
            self._hold(tensor, fresh)
        elif not self._accumulate_in_producer(total, gradient):
            self._add(total, None, gradient)

    def backward(self) -> None:
        """Runs the tape backwards from the gradients added so far."""
        if self._ops is None:
            raise GraphError("nothing was recorded")
        ops, self._ops = self._ops, None
        for outputs, vjp in reversed(ops):
            if any(output in self._gradients for output in outputs):
                gradients = [
                    self._release(output) if output in self._gradients else None
                    for output in outputs
                ]
                before = self._handed, self._begin
                self._handed, self._begin = gradients, len(self.launches)
                vjp(gradients)
                self._handed, self._begin = before
        self._ops = []

    def checkpoint(
        self,
        function: Checkpointed,
        xs: Sequence[Tensor],
        first: Callable[[], Tensor] | None = None,
    ) -> Sequence[Tensor]:
        """Calls ``function(xs)`` and keeps only xs for the backward pass, which calls it again.

        Intermediates of the first call are not read later, so their slots are free at once;
        unneeded launches of the second call are dropped. If the first of xs does not stay on the
        device, ``first`` restores it as another tensor for the second call.
        """
        outer, self._ops = self._ops, None
        try:
            ys = function(xs)
        finally:
            self._ops = outer

        def vjp(gradients: list[Tensor | None]) -> None:
            outer, self._ops = self._ops, []
            x = xs[0]
            same = x if first is None else first()
            same.requires_grad = x.requires_grad
            for again, dy in zip(function([same, *xs[1:]]), gradients, strict=True):
                if dy is not None:
                    self.add_gradient(again, dy)
            self.backward()
            self._ops = outer
            if same is not x and same in self._gradients:
                self.add_gradient(x, self._release(same))

        if self._ops is not None and any(y.requires_grad for y in ys):
            self._ops.append((ys, vjp))
            self._uses.update(xs)
        return ys

    def end(self) -> None:
        """Clears the tape, whose records would keep the graph alive until a garbage collection."""
        Tape.__init__(self)

    def _hold(self, tensor: Tensor, gradient: Tensor) -> None:
        self._gradients[tensor] = gradient
        self._holders[gradient] += 1

    def _release(self, tensor: Tensor) -> Tensor:
        gradient = self._gradients.pop(tensor)
        self._holders[gradient] -= 1
        return gradient

    def _is_own(self, total: Tensor) -> bool:
        return (
            total.dtype == "float32"
            and total.storage is None
            and self._holders[total] == 1
            and not any(total is handed for handed in self._handed)
        )

    def _accumulate_in_producer(self, total: Tensor, gradient: Tensor) -> bool:
        """Makes the launches that computed a gradient add to the total instead, if possible."""
        producers = [
            launch for launch in self.launches[self._begin :] if gradient in launch.tensors.values()
        ]
        if self._holders[gradient] or gradient.dtype != "float32" or not producers:
            return False
        if gradient.stride != total.stride or not all(_can_add(p, gradient) for p in producers):
            return False
        if any(total in launch.tensors.values() for launch in self.launches[self._begin :]):
            return False
        for producer in producers:
            name = next(n for n, t in producer.tensors.items() if t is gradient)
            producer.tensors[name] = total
            producer.accumulate()
        return True


def _can_add(launch: Launch, gradient: Tensor) -> bool:
    names = [name for name, tensor in launch.tensors.items() if tensor is gradient]
    return len(names) == 1 and launch.shader.bindings[names[0]].sums
