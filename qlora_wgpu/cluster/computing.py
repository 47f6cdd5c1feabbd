"""A run's micro-batches on the workers of a cluster, summed on the owner's own device."""

import itertools
import queue
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from qlora_wgpu.cluster.blocks import (
    BlockResult,
    Expected,
    FloatArray,
    RunningSums,
    WorkerClass,
    WorkerInfo,
    WorkerSpec,
    check_parameters,
    check_text,
    expected,
)
from qlora_wgpu.cluster.connection import Connection, LoopThread, connect
from qlora_wgpu.cluster.engine import Block, Engine
from qlora_wgpu.config import ClusterConfig
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.steps import LossSums, PreferenceInputs, StepKind
from qlora_wgpu.ops.optimizers import STATS_CORRECT, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.tensor import add_to
from qlora_wgpu.training.executor import Arrays, Done, MicroBatch
from qlora_wgpu.training.observers import WorkerFigures

# ---- the sum on the owner's device ---------------------------------------------------------------


def received_gradient(adapter: AdapterLayout) -> ShardedVector:
    """The vector that a worker's gradient is uploaded to."""
    return ShardedVector.laid_out(
        "received gradient", "gradients", "float32", adapter.piece_lengths
    )


class GradientSum:
    """Adds up the blocks' gradients by the same kernel as a single device.

    Attributes:
        model: The adapter.
        sums: The step's loss, token counts and metrics so far.
    """

    def __init__(self, model: AdapterModel) -> None:
        """Allocates the vector for received gradients."""
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
        """Starts a step."""
        self.sums = RunningSums()

    def add(self, result: BlockResult) -> None:
        """Adds a block's gradient and sums."""
        assert result.gradient is not None
        self.model.write_flat(self._received, result.gradient)
        self._program.run()
        self.sums.add(result)

    def end(self) -> None:
        """Writes the step's sums to the device, where the update and the log read them."""
        self.model.write_stats(self.sums.stats, self.sums.saturated)


# ---- arguments of a block ------------------------------------------------------------------------

# Workers keep no state of preference objectives: the reference's log probabilities of a
# micro-batch, and KTO's divergence over a step or an evaluation, are sent with each call. So
# workers may join and leave at any time.

_AT_ONCE = 256  # maximum number of micro-batches whose tokens are in memory

Arguments = tuple[Any, ...]


def _tokens(batch: MicroBatch) -> Arguments:
    return batch.ids, batch.targets, batch.mask


def _samples(batch: MicroBatch) -> PreferenceInputs:
    assert batch.samples is not None
    return batch.samples


def _training_arguments(batch: MicroBatch, divergence: tuple[float, float]) -> Arguments:
    of_answers = () if batch.samples is None else (batch.samples, divergence)
    return (*_tokens(batch), batch.dropout_key, batch.weights, *of_answers)


# ---- the cluster ---------------------------------------------------------------------------------

_T = TypeVar("_T")
_END = 20.0  # seconds for an orderly end
_PERIOD = 0.1  # seconds between two checks for an interruption


class Cluster:
    """Workers that compute for this process, the owner of the run.

    Results are summed in the order of the blocks: sums are bit-identical to those of one device.
    """

    _sum: GradientSum  # set by ``take``

    def __init__(
        self,
        settings: ClusterConfig,
        worker_class: WorkerClass,
        specify: Callable[[str], WorkerSpec],
        check: Callable[[WorkerInfo], str | None],
        warn: Callable[[str], None],
        *,
        processes: int,
    ) -> None:
        """Connects, and has workers open the model.

        ``specify`` returns what the named worker opens, ``check`` why a worker is refused, or None.
        ``warn`` is called in the caller's thread. With ``local``, ``processes`` are started.
        """
        self._warn = warn
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._devices: set[tuple[str, str]] = set()

        def checked(identity: WorkerInfo) -> str | None:
            problem = check(identity)
            if problem is None:
                self._devices.add((identity.device, identity.kernels))
            return problem

        self._thread = LoopThread()
        try:
            self._connection = self._thread.run(
                connect(settings, processes, self._messages.put), self._show_messages
            )
        except BaseException:
            self._end()
            raise
        self._engine = Engine(
            self._connection, worker_class, specify, checked, self._messages.put,
            fixed=settings.division == "fixed", patience=settings.patience,
        )  # fmt: skip

    def close(self) -> None:
        """Disconnects; workers that were started here end."""
        work: Future[None] = self._thread.submit(_ended(self._engine, self._connection))
        try:
            work.result(_END)
        except Exception:  # the run is over; there is nothing to report
            work.cancel()
        self._end()

    def _end(self) -> None:
        self._show_messages()
        self._thread.stop(_END)

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, if there is one."""
        return self._connection.dashboard

    def wait_for(self, count: int) -> dict[str, WorkerInfo]:
        """Waits until ``count`` workers have opened the model; returns all by name."""
        self._run(self._engine.begin(count))
        return self._engine.identities

    def neutral(self) -> FloatArray:
        """A worker's flat adapter whose output is zero."""
        length = self._sum.model.adapter.length
        return self._ask("neutral", check=lambda values: check_parameters(values, length))

    def take(self, model: AdapterModel) -> None:
        """Sets the adapter that is trained; gradients are summed on its device."""
        self._sum = GradientSum(model)

    # -- the interface of training --------------------------------------------------------

    def prepare(self, batch: int, seq: int, kind: StepKind = "train") -> None:
        """Does nothing: workers prepare the longest shape when they open the model."""

    def devices(self) -> list[tuple[str, str]]:
        """GPUs and tilings of all workers so far."""
        return sorted(self._devices.copy())

    def accumulate(self, batches: Iterable[MicroBatch], is_stopped: Callable[[], bool]) -> bool:
        """Computes a step's summed gradient and loss; False if it was stopped."""
        blocks = list(batches)
        if is_stopped() or not blocks:
            return not is_stopped()
        total = self._sum
        total.begin()
        self._publish()
        compute = partial(self._compute, is_stopped=is_stopped)
        if measured := [block for block in blocks if block.is_measured]:
            given = [(*_tokens(b), _samples(b)) for b in measured]
            if not compute("divergence", given, total.sums.add):
                return False
        arguments = [
            _training_arguments(b, total.sums.divergence) for b in blocks if not b.is_measured
        ]
        done = compute("gradient", arguments, total.add)
        if done:
            total.end()
        return done

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all labels, their number, and how many are correct."""
        arguments = [tuple(np.asarray(array) for array in batch) for batch in batches]
        self._publish()
        total = RunningSums()
        self._compute("loss", arguments, total.add)
        loss, tokens, correct = (total.stats[i] for i in (STATS_LOSS, STATS_TOKENS, STATS_CORRECT))
        return LossSums(float(loss), int(tokens), int(correct))

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
        """Yields the summed log probabilities of each micro-batch's answers."""
        self._publish()
        count, given = 0, ((*_tokens(b), len(_samples(b).references)) for b in batches)

        def add(sums: BlockResult) -> None:
            assert sums.answers is not None
            done(count + len(logps))
            logps.append(sums.answers)

        while some := list(islice(given, _AT_ONCE)):
            logps: list[FloatArray] = []
            self._compute("answer_logps", some, add)
            count += len(some)
            yield from logps

    def answer_sums(self, batches: Iterable[MicroBatch], done: Done) -> FloatArray:
        """Loss and metrics summed over micro-batches of answers, as ``RunningSums.stats``.

        Micro-batches that KTO's divergence is measured on must come first.
        """
        self._publish()
        total, numbers = RunningSums(), itertools.count()

        def add(sums: BlockResult) -> None:
            done(next(numbers))
            total.add(sums)

        for is_measured, group in itertools.groupby(batches, lambda batch: batch.is_measured):
            while some := list(islice(group, _AT_ONCE)):
                given = [(*_tokens(b), _samples(b)) for b in some]
                if is_measured:
                    self._compute("divergence", given, add)
                else:
                    of_all = total.divergence
                    self._compute("answer_loss", [(*each, of_all) for each in given], add)
        return total.stats

    def text(
        self, ids: list[int], max_new_tokens: int, stop_ids: list[int], longest: int
    ) -> list[int]:
        """A greedy completion by the current adapter."""
        self._publish()
        vocab_size = self._sum.model.architecture.vocab_size

        def check(written: Any) -> list[int]:
            return check_text(written, max_new_tokens, vocab_size)

        return self._ask("text", ids, max_new_tokens, stop_ids, longest, check=check)

    def figures(self) -> tuple[WorkerFigures, ...]:
        """Each worker's numbers since the last call."""
        return self._run(self._engine.figures())

    # -- internals -------------------------------------------------------------------------

    def _expected(self, method: str, given: Arguments) -> Expected:
        model = self._sum.model
        return expected(method, given, model.adapter.length, model.options.objective.preference)

    def _ask(self, method: str, *given: Any, check: Callable[[Any], _T]) -> _T:
        answer: _T = self._run(self._engine.ask(method, *given, check=check))
        return answer

    def _publish(self) -> None:
        """Makes workers compute with the current adapter."""
        self._engine.publish(self._sum.parameters())

    def _compute(
        self, method: str, arguments: list[Arguments], add: Callable[[BlockResult], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Computes blocks and adds their results in order; False if it was stopped."""
        results: queue.SimpleQueue[tuple[int, BlockResult]] = queue.SimpleQueue()
        early: dict[int, BlockResult] = {}
        sizes = [given[0].size for given in arguments]  # a block's token ids come first
        blocks = [Block(given, self._expected(method, given).check) for given in arguments]
        work = self._engine.compute(
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
                    self._show_messages()
                add(early.pop(turn))
            return True
        finally:
            future.cancel()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return self._thread.run(work, self._show_messages)
        finally:
            self._show_messages()

    def _show_messages(self) -> None:
        """Shows messages of the engine, in the caller's thread."""
        while not self._messages.empty():
            self._warn(self._messages.get())


async def _ended(engine: Engine, connection: Connection) -> None:
    """Ends both; the engine first, which would report that workers leave."""
    await engine.stop()
    await connection.close()
