"""A run's micro-batches on the workers of a cluster, summed on the owner's own device."""

from __future__ import annotations

import queue
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from qlora_wgpu.cluster.blocks import FloatArray, Identity, RemoteWorker, Specification, Sums
from qlora_wgpu.cluster.connection import Connection, connect
from qlora_wgpu.cluster.engine import Engine
from qlora_wgpu.cluster.gradient_sum import GradientSum
from qlora_wgpu.cluster.loop_thread import LoopThread
from qlora_wgpu.config.schema import ClusterConfig
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.loss_sums import LossSums
from qlora_wgpu.training.computing import Arrays, MicroBatch
from qlora_wgpu.training.observer import WorkerFigures

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

        Raises:
            ConfigError: If the extra is missing, or the way there is not safe.
            ClusterError: If there is no scheduler.
        """
        self._settings = settings
        self._warn = warn
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = LoopThread()
        self._connection: Connection | None = None
        self._engine: Engine | None = None
        self._sum: GradientSum | None = None
        try:
            self._connection = self._thread.run(
                connect(settings, processes, self._told.put), self._tell
            )
            self._engine = Engine(
                self._connection, worker_class, specify, check, self._told.put,
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
        """Waits until so many workers have opened the model; what they are, by name.

        Raises:
            ClusterError: If they do not come, or are all refused.
        """
        engine = self._own_engine()
        self._run(engine.begin(count))
        return engine.identities

    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing, as the first worker has it.

        Raises:
            ClusterError: If no worker is left.
        """
        return self._run(self._own_engine().neutral())

    def take(self, model: AdapterModel) -> None:
        """The adapter whose gradient is summed from now on, on the device that it is on."""
        self._sum = GradientSum(model)

    # -- as training asks for it -----------------------------------------------------------

    def prepare(self, batch: int, seq: int) -> None:
        """Nothing: workers have prepared the longest shape when they opened the model."""

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Adds summed gradients, losses and label tokens of a step to the device's.

        Raises:
            ClusterError: If no worker is left to compute them.
        """
        blocks = list(batches)
        if is_stopped() or not blocks:
            return not is_stopped()
        total = self._own_sum()
        total.begin()
        self._own_engine().publish(total.parameters())
        arguments = [(b.ids, b.targets, b.mask, b.dropout_key, b.weights) for b in blocks]
        sizes = [b.ids.size for b in blocks]
        done = self._compute("gradient", arguments, sizes, total.add, is_stopped)
        if done:
            total.end()
        return done

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all labels of some batches, their number and hits.

        Raises:
            ClusterError: If no worker is left to compute it.
        """
        arguments = [tuple(np.asarray(array) for array in batch) for batch in batches]
        self._own_engine().publish(self._own_sum().parameters())
        loss = tokens = correct = np.float32(0)

        def add(sums: Sums) -> None:
            nonlocal loss, tokens, correct
            loss, tokens = loss + np.float32(sums.loss), tokens + np.float32(sums.tokens)
            correct += np.float32(sums.correct)

        self._compute("loss", arguments, [block[0].size for block in arguments], add)
        self.figures()  # what is told is of training steps
        return LossSums(float(loss), int(tokens), int(correct))

    def text(self, ids: list[int], more: int, stop_ids: list[int], longest: int) -> list[int]:
        """A text's continuation by the adapter as it is, greedily.

        Args:
            ids: The text so far.
            more: Most tokens to add.
            stop_ids: What ends it.
            longest: Tokens of the longest text that will be asked for.

        Raises:
            ClusterError: If no worker is left to write it.
        """
        self._own_engine().publish(self._own_sum().parameters())
        return self._run(self._own_engine().text(ids, more, stop_ids, longest))

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

    def _compute(
        self, method: str, arguments: list[Any], sizes: list[int], add: Callable[[Sums], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Computes blocks and adds what they give in their order; False where it was stopped."""
        results: queue.SimpleQueue[tuple[int, Sums]] = queue.SimpleQueue()
        early: dict[int, Sums] = {}
        work = self._own_engine().compute(
            method, arguments, sizes, lambda block, sums: results.put((block, sums))
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
