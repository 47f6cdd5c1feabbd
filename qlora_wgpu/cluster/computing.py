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

    def add(self, sums: BlockResult) -> None:
        """Adds a block's sums."""
        assert sums.gradient is not None
        self.model.write_flat(self._received, sums.gradient)
        self._program.run()
        self.sums.add(sums)

    def end(self) -> None:
        """Puts the step's loss, label tokens and the rest where update and log read them."""
        self.model.write_stats(self.sums.stats, self.sums.saturated)


# ---- what goes to a worker -----------------------------------------------------------------------

# A worker keeps nothing of objectives over answers: what the reference says of a micro-batch's
# answers, and KTO's divergence over all of a step's or an evaluation's rows, come with each call.
# So workers may come and go here as well.

_AT_ONCE = 256  # micro-batches, whose tokens are in memory until they are computed

Arguments = tuple[Any, ...]


def _tokens(batch: MicroBatch) -> Arguments:
    return batch.ids, batch.targets, batch.mask


def _samples(batch: MicroBatch) -> PreferenceInputs:
    assert batch.samples is not None
    return batch.samples


def _learnt(batch: MicroBatch, divergence: tuple[float, float]) -> Arguments:
    of_answers = () if batch.samples is None else (batch.samples, divergence)
    return (*_tokens(batch), batch.dropout_key, batch.weights, *of_answers)


# ---- the workers ---------------------------------------------------------------------------------

_T = TypeVar("_T")
_END = 20.0  # seconds for an orderly end of everything
_PERIOD = 0.1  # seconds between two looks at whether the user wants to stop


class Cluster:
    """Workers that compute for this process, the owner of the run.

    What they compute is summed in the order of the blocks, so that it has the bits that one
    device would give it.
    """

    _sum: GradientSum  # once the adapter is there

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
        """Connects, and begins to have workers open the model.

        ``specify`` says what a worker of a name opens, ``check`` what is wrong with one, or None;
        ``warn`` is told in the caller's thread. ``processes`` are started with ``local``.
        """
        self._warn = warn
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._devices: set[tuple[str, str]] = set()

        def checked(identity: WorkerInfo) -> str | None:
            problem = check(identity)
            if problem is None:
                self._devices.add((identity.device, identity.kernels))
            return problem

        self._thread = LoopThread()
        try:
            self._connection = self._thread.run(
                connect(settings, processes, self._told.put), self._tell
            )
        except BaseException:
            self._end()
            raise
        self._engine = Engine(
            self._connection, worker_class, specify, checked, self._told.put,
            fixed=settings.division == "fixed", patience=settings.patience,
        )  # fmt: skip

    def close(self) -> None:
        """Lets go of the workers; those that were started here end."""
        work: Future[None] = self._thread.submit(_ended(self._engine, self._connection))
        try:
            work.result(_END)
        except Exception:  # the run is over; nothing is left to be told
            work.cancel()
        self._end()

    def _end(self) -> None:
        self._tell()
        self._thread.stop(_END)

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, where there is one."""
        return self._connection.dashboard

    def wait_for(self, count: int) -> dict[str, WorkerInfo]:
        """Waits until so many workers have opened the model; what they are, by name."""
        self._run(self._engine.begin(count))
        return self._engine.identities

    def neutral(self) -> FloatArray:
        """A flat adapter that does nothing, as a worker has it."""
        length = self._sum.model.adapter.length
        return self._ask("neutral", check=lambda values: check_parameters(values, length))

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
        total = self._sum
        total.begin()
        self._publish()
        compute = partial(self._compute, is_stopped=is_stopped)
        if measured := [block for block in blocks if block.is_measured]:
            given = [(*_tokens(b), _samples(b)) for b in measured]
            if not compute("divergence", given, total.sums.add):
                return False
        learnt = [_learnt(b, total.sums.divergence) for b in blocks if not b.is_measured]
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
        loss, tokens, correct = (total.stats[i] for i in (STATS_LOSS, STATS_TOKENS, STATS_CORRECT))
        return LossSums(float(loss), int(tokens), int(correct))

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
        """The summed log probability of each answer, a micro-batch at a time."""
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
        """Loss and metrics summed over some micro-batches of answers, as ``stats`` has them.

        What is measured beforehand comes first.
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

    def text(self, ids: list[int], more: int, stop_ids: list[int], longest: int) -> list[int]:
        """A text's continuation by the adapter as it is, greedily."""
        self._publish()
        vocab_size = self._sum.model.architecture.vocab_size

        def check(written: Any) -> list[int]:
            return check_text(written, more, vocab_size)

        return self._ask("text", ids, more, stop_ids, longest, check=check)

    def figures(self) -> tuple[WorkerFigures, ...]:
        """What each worker has done since the last call."""
        return self._run(self._engine.figures())

    # -- within ----------------------------------------------------------------------------

    def _expected(self, method: str, given: Arguments) -> Expected:
        model = self._sum.model
        return expected(method, given, model.adapter.length, model.options.objective.preference)

    def _ask(self, method: str, *given: Any, check: Callable[[Any], _T]) -> _T:
        answer: _T = self._run(self._engine.ask(method, *given, check=check))
        return answer

    def _publish(self) -> None:
        """Blocks are computed with the adapter as it is now."""
        self._engine.publish(self._sum.parameters())

    def _compute(
        self, method: str, arguments: list[Arguments], add: Callable[[BlockResult], None],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Computes blocks and adds what they give in their order; False where it was stopped."""
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


async def _ended(engine: Engine, connection: Connection) -> None:
    """Ends both, and the engine first: what the end does to workers is not told."""
    await engine.stop()
    await connection.close()
