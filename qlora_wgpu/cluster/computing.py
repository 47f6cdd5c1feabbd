"""A run's micro-batches on the workers of a cluster, summed on the owner's own device."""

from __future__ import annotations

import queue
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from qlora_wgpu.cluster import actor
from qlora_wgpu.cluster.blocks import (
    Expected,
    FloatArray,
    Identity,
    RemoteWorker,
    RunningSums,
    Specification,
    Sums,
    expected,
)
from qlora_wgpu.cluster.connection import Connection, LoopThread, connect
from qlora_wgpu.cluster.engine import Block, Engine
from qlora_wgpu.config import ClusterConfig
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.steps import LossSums, StepKind
from qlora_wgpu.ops.optimizers import STATS_CORRECT, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.tensor import add_to
from qlora_wgpu.training.executor import Arrays, Done, MicroBatch
from qlora_wgpu.training.observers import WorkerFigures

# ---- the sum on the owner's device ---------------------------------------------------------------


def received_gradient(adapter: AdapterLayout) -> ShardedVector:
    """Room for a gradient that has come from a worker."""
    return ShardedVector.laid_out(
        "received gradient", "gradients", "float32", adapter.piece_lengths
    )


class GradientSum:
    """Adds one block's gradient after another, as the kernels of a single device do.

    Attributes:
        model: The adapter.
        sums: What blocks of the step have given beside their gradients.
    """

    def __init__(self, model: AdapterModel) -> None:
        """Allocates room for a gradient that has come."""
        self.model = model
        self._received = received_gradient(model.adapter)
        graph = model.layout.new_graph()
        add_to(graph, model.adapter.gradient, self._received)
        self._program = model.programs.from_graph(graph)
        self.begin()

    def parameters(self) -> FloatArray:
        """The adapter's parameters; waits for the device."""
        return self.model.read_flat(self.model.adapter.parameters)

    def begin(self) -> None:
        """A step begins."""
        self.sums = RunningSums()

    def add(self, sums: Sums) -> None:
        """Adds a block's sums."""
        assert sums.gradient is not None
        self.model.write_flat(self._received, sums.gradient)
        self._program.run()
        self.sums.add(sums)

    def end(self) -> None:
        """Puts the step's loss, label tokens and the rest where update and log read them."""
        self.model.write_stats(self.sums.stats, self.sums.saturated)


# ---- the workers ---------------------------------------------------------------------------------

_T = TypeVar("_T")
_END = 20.0  # seconds for an orderly end of everything
_PERIOD = 0.1  # seconds between two looks at whether the user wants to stop


class Cluster:
    """Workers that compute for this process, the owner of the run.

    What they compute is summed in the order of the blocks, so that it has the bits that one
    device would give it.
    """

    def __init__(
        self,
        settings: ClusterConfig,
        worker_class: type[RemoteWorker],
        specify: Callable[[str], Specification],
        check: Callable[[Identity], str | None],
        warn: Callable[[str], None],
        *,
        processes: int,
    ) -> None:
        """Connects, and begins to have workers open the model.

        Args:
            settings: Where they are, and how they share the work.
            worker_class: What each worker process gets an instance of.
            specify: What a worker of a name opens.
            check: A sentence about what is wrong with a worker, or None.
            warn: Told of workers that come, go and fail, in the caller's thread.
            processes: How many are started with ``local``.
        """
        self._settings = settings
        self._warn = warn
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._devices: set[tuple[str, str]] = set()

        def checked(identity: Identity) -> str | None:
            problem = check(identity)
            if problem is None:
                self._devices.add((identity.device, identity.kernels))
            return problem

        self._thread = LoopThread()
        self._connection: Connection | None = None
        self._engine: Engine | None = None
        self._sum: GradientSum | None = None
        try:
            self._connection = self._thread.run(
                connect(settings, processes, self._told.put), self._tell
            )
            self._engine = Engine(
                self._connection, worker_class, specify, checked, self._told.put,
                fixed=settings.division == "fixed", patience=settings.patience,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Closes it in the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Lets go of the workers; those that were started here end."""
        self.close()

    def close(self) -> None:
        """Lets go of the workers; those that were started here end."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            work: Future[None] = self._thread.submit(_ended(self._engine, connection))
            try:
                work.result(_END)
            except Exception:  # the run is over; nothing is left to be told
                work.cancel()
        self._tell()
        self._thread.stop(_END)

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, where there is one."""
        return None if self._connection is None else self._connection.dashboard

    def wait_for(self, count: int) -> dict[str, Identity]:
        """Waits until so many workers have opened the model; what they are, by name."""
        engine = self._own_engine()
        self._run(engine.begin(count))
        return engine.identities

    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing, as the first worker has it."""
        return self._run(self._own_engine().neutral(self._own_sum().model.adapter.length))

    def take(self, model: AdapterModel) -> None:
        """The adapter whose gradient is summed from now on, on the device that it is on."""
        self._sum = GradientSum(model)

    # -- as training asks for it -----------------------------------------------------------

    def prepare(self, batch: int, seq: int, kind: StepKind = "train") -> None:
        """Nothing: workers have prepared the longest shape when they opened the model."""

    def devices(self) -> list[tuple[str, str]]:
        """Of all workers that there have been: a device's name, and how its kernels are cut."""
        return sorted(self._devices.copy())

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Adds summed gradients, losses and label tokens of a step to the device's."""
        blocks = list(batches)
        if is_stopped() or not blocks:
            return not is_stopped()
        total = self._own_sum()
        total.begin()
        self._publish()
        compute = partial(self._compute, is_stopped=is_stopped)
        if measured := [block for block in blocks if block.is_measured]:
            if not actor.measure(compute, measured, total.sums.add):
                return False
            self.figures()  # what is told is of gradients
        divergence = total.sums.divergence
        learnt = [actor.learnt(b, divergence) for b in blocks if not b.is_measured]
        done = compute("gradient", learnt, total.add)
        if done:
            total.end()
        return done

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all labels of some batches, their number and hits."""
        arguments = [tuple(np.asarray(array) for array in batch) for batch in batches]
        self._publish()
        total = RunningSums()
        self._compute("loss", arguments, total.add)
        self.figures()  # what is told is of training steps
        loss, tokens, correct = (total.stats[i] for i in (STATS_LOSS, STATS_TOKENS, STATS_CORRECT))
        return LossSums(float(loss), int(tokens), int(correct))

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
        """The summed log probability of each answer, a micro-batch at a time."""
        self._publish()
        yield from actor.said(self._compute, batches, done)
        self.figures()

    def answer_sums(self, batches: Iterable[MicroBatch], done: Done) -> FloatArray:
        """Loss and metrics summed over some micro-batches of answers, as ``stats`` has them."""
        self._publish()
        total = actor.summed(self._compute, batches, done)
        self.figures()
        return total.stats

    def text(self, ids: list[int], more: int, stop_ids: list[int], longest: int) -> list[int]:
        """A text's continuation by the adapter as it is, greedily."""
        self._publish()
        vocab_size = self._own_sum().model.architecture.vocab_size
        text = self._own_engine().text(ids, more, stop_ids, longest, vocab_size=vocab_size)
        return self._run(text)

    def figures(self) -> tuple[WorkerFigures, ...]:
        """What each worker has done since the last call."""
        work = self._run(self._own_engine().work())
        return tuple(
            WorkerFigures(
                name, each.tokens, each.timed_tokens, each.seconds, answers=not each.is_suspect
            )
            for name, each in work.items()
        )

    # -- within ----------------------------------------------------------------------------

    def _own_engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _own_sum(self) -> GradientSum:
        assert self._sum is not None
        return self._sum

    def _expected(self, method: str, given: actor.Arguments) -> Expected:
        model = self._own_sum().model
        return expected(method, given, model.adapter.length, model.options.objective.preference)

    def _publish(self) -> None:
        """Blocks are computed with the adapter as it is now."""
        self._own_engine().publish(self._own_sum().parameters())

    def _compute(
        self, method: str, arguments: list[actor.Arguments], add: Callable[[Sums], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Computes blocks and adds what they give in their order; False where it was stopped."""
        results: queue.SimpleQueue[tuple[int, Sums]] = queue.SimpleQueue()
        early: dict[int, Sums] = {}
        sizes = [given[0].size for given in arguments]  # a block's token ids come first
        blocks = [Block(given, self._expected(method, given)) for given in arguments]
        work = self._own_engine().compute(
            method, blocks, sizes, lambda block, sums: results.put((block, sums))
        )
        future = self._thread.submit(work)
        try:
            for turn in range(len(arguments)):
                while turn not in early:
                    if is_stopped():
                        return False
                    try:
                        early.update([results.get(timeout=_PERIOD)])
                    except queue.Empty:
                        if future.done():
                            future.result()
                    self._tell()
                add(early.pop(turn))
            return True
        finally:
            future.cancel()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._thread.run(work, self._tell)
        finally:
            self._tell()

    def _tell(self) -> None:
        """Passes on what the engine has told meanwhile."""
        while not self._told.empty():
            self._warn(self._told.get())


async def _ended(engine: Engine | None, connection: Connection) -> None:
    """Ends both, and the engine first: what the end does to workers is not told."""
    if engine is not None:
        await engine.stop()
    await connection.close()
