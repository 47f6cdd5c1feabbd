"""The owner of a run: computes micro-batches on a cluster's workers, and sums their results.

``Cluster`` is the interface of training: it makes a block of each micro-batch, and sums the results
on the owner's own device. Its ``Engine`` runs on an asyncio loop: ``Scheduler`` (``scheduler.py``)
assigns blocks to the workers of ``WorkerRegistry`` (``workers.py``). A block is sent to a worker's
``Actor`` (``blocks.py``), directly and not through Dask's scheduler. That calls ``Worker``
(``runs/cluster.py``), which has the model.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from qlora_wgpu.cluster.blocks import (
    BlockRequest,
    BlockResult,
    FloatArray,
    RunningSums,
    Samples,
    WorkerClass,
    WorkerInfo,
    WorkerSpec,
    WrongAnswerError,
    check_completions,
    check_parameters,
    check_text,
    expected,
    expected_loss,
)
from qlora_wgpu.cluster.connection import Connection, LoopThread, connect
from qlora_wgpu.cluster.scheduler import Assignment, Scheduler
from qlora_wgpu.cluster.workers import (
    Check,
    Gone,
    Progress,
    Watchdog,
    WorkerHandle,
    WorkerRegistry,
    sentence,
)
from qlora_wgpu.config import ClusterConfig
from qlora_wgpu.errors import ClusterError, QLoRAError
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.grpo.completer import MOST_AT_ONCE
from qlora_wgpu.grpo.rollouts import Completion, Prompt
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.image_inputs import ImageFeatures, ImageInputs
from qlora_wgpu.model.steps import LossSums, StepKind
from qlora_wgpu.ops.optimizers import STATS_CORRECT, STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.tensor import add_to
from qlora_wgpu.training.executor import Arrays, Done, MicroBatch
from qlora_wgpu.training.observers import WorkerMetrics

# ---- the cluster ---------------------------------------------------------------------------------

_T = TypeVar("_T")
_END = 20.0  # seconds for an orderly end
_PERIOD = 0.1  # seconds between two checks for an interruption


class Cluster:
    """Workers of this run; sums are bit-identical to those of one device."""

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
        return self._query("neutral", check=lambda values: check_parameters(values, length))

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
        measured = [(block,) for block in blocks if block.is_measured]
        if measured and not compute("divergence", measured, total.sums.add):
            return False
        of_all = total.sums.divergence
        trained = [(block, of_all) for block in blocks if not block.is_measured]
        done = compute("gradient", trained, total.add)
        if done:
            total.end()
        return done

    def summed_loss(self, batches: Iterable[Arrays]) -> LossSums:
        """The loss summed over all labels, their number, and how many are correct."""
        self._publish()
        total = RunningSums()
        for some in _in_groups(batches, lambda given: _feature_bytes(given[3])):
            blocks = [Block(given, expected_loss(given[1], given[2]).check) for given in some]
            self._in_order("loss", blocks, [each[0].size for each in some], total.add)
        loss, tokens, correct = (total.stats[i] for i in (STATS_LOSS, STATS_TOKENS, STATS_CORRECT))
        return LossSums(float(loss), int(tokens), int(correct))

    def answer_logps(self, batches: Iterable[MicroBatch], done: Done) -> Iterator[FloatArray]:
        """Yields the summed log probabilities of each micro-batch's answers."""
        self._publish()
        count = 0

        def add(sums: BlockResult) -> None:
            assert sums.logps is not None
            done(count + len(logps))
            logps.append(sums.logps)

        for some in _in_groups(batches, lambda batch: _feature_bytes(batch.images)):
            logps: list[FloatArray] = []
            self._compute("answer_logps", [(each,) for each in some], add)
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
            for some in _in_groups(group, lambda batch: _feature_bytes(batch.images)):
                if is_measured:
                    self._compute("divergence", [(each,) for each in some], add)
                else:
                    of_all = total.divergence
                    self._compute("answer_loss", [(each, of_all) for each in some], add)
        return total.stats

    def scores(
        self, batches: Iterable[MicroBatch], done: Done
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Loss and metrics summed over micro-batches of sequences, and the scores of each."""
        self._publish()
        total, found = RunningSums(), list[FloatArray]()

        def add(sums: BlockResult) -> None:
            assert sums.scores is not None
            done(len(found))
            total.add(sums)
            found.append(sums.scores)

        for some in _in_groups(batches, lambda batch: 0):
            self._compute("scores", [(each,) for each in some], add)
        classes = self._sum.model.architecture.classes
        return total.stats, [each.reshape(-1, classes) for each in found]

    def token_logps(
        self, batches: Sequence[MicroBatch], parameters: FloatArray | None = None
    ) -> list[FloatArray]:
        """The log probability of each target of some micro-batches, by an adapter."""
        self._publish(parameters)
        found: list[FloatArray] = []

        def add(sums: BlockResult) -> None:
            assert sums.logps is not None
            found.append(sums.logps.reshape(batches[len(found)].ids.shape))

        self._compute("token_logps", [(batch,) for batch in batches], add)
        return found

    def complete(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        max_completion_length: int,
        stop_ids: Collection[int],
        is_stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[Completion] | None:
        """A completion of each prompt, as ``sample_completions``; None if stopped."""
        self._publish()
        ends = frozenset(map(int, stop_ids))
        ids = [list(map(int, prompt.ids)) for prompt in prompts]
        size = min(math.ceil(len(prompts) / max(self.num_workers, 1)), MOST_AT_ONCE)
        given = [
            Samples(
                ids[first : first + size], list(seeds[first : first + size]), sampling,
                max_completion_length, ends,
            )
            for first in range(0, len(prompts), size)
        ]  # fmt: skip
        vocab_size = self._sum.model.architecture.vocab_size
        blocks = [
            Block((each,), partial(check_completions, given=each, vocab_size=vocab_size))
            for each in given
        ]
        found: list[Completion] = []

        def add(sampled: list[list[int]]) -> None:
            found.extend(Completion(each, each[-1] not in ends) for each in sampled)
            progress(len(found))

        sizes = [len(each.seeds) * max_completion_length for each in given]
        done = self._in_order("complete", blocks, sizes, add, is_stopped, is_query=True)
        return found if done else None

    def text(
        self, ids: list[int], max_new_tokens: int, stop_ids: list[int], longest: int,
        *images: ImageFeatures,
    ) -> list[int]:  # fmt: skip
        """A greedy completion by the current adapter; ``images`` are the prompt's."""
        self._publish()
        vocab_size = self._sum.model.architecture.vocab_size

        def check(written: Any) -> list[int]:
            return check_text(written, max_new_tokens, vocab_size)

        return self._query("text", ids, max_new_tokens, stop_ids, longest, *images, check=check)

    @property
    def num_workers(self) -> int:
        """The number of workers that are ready."""
        return self._run(self._engine.num_workers())

    def worker_metrics(self) -> tuple[WorkerMetrics, ...]:
        """What each worker has done since the last call."""
        return self._run(self._engine.worker_metrics())

    # -- internals -------------------------------------------------------------------------

    def _query(self, method: str, *given: Any, check: Callable[[Any], _T]) -> _T:
        answer: _T = self._run(self._engine.query(method, *given, check=check))
        return answer

    def _publish(self, parameters: FloatArray | None = None) -> None:
        """Makes workers compute with the current adapter, or with another one."""
        self._engine.publish(self._sum.parameters() if parameters is None else parameters)

    def _compute(
        self, method: str, arguments: Sequence[tuple[MicroBatch, *tuple[Any, ...]]],
        add: Callable[[BlockResult], None], is_stopped: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """Computes micro-batches and adds their results in order; False if it was stopped."""
        model = self._sum.model
        of = model.adapter.length, model.options.objective
        blocks = [Block(given, expected(method, given[0], *of).check) for given in arguments]
        return self._in_order(
            method, blocks, [given[0].ids.size for given in arguments], add, is_stopped
        )

    def _in_order(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int],
        add: Callable[[Any], None], is_stopped: Callable[[], bool] = lambda: False, *,
        is_query: bool = False,
    ) -> bool:  # fmt: skip
        """Computes blocks as ``Engine.compute``, and adds their results in order."""
        results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        early: dict[int, Any] = {}
        work = self._engine.compute(
            method, blocks, sizes, lambda block, sums: results.put((block, sums)),
            is_query=is_query,
        )  # fmt: skip
        future = self._thread.submit(work)
        try:
            for turn in range(len(blocks)):
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


# ---- micro-batches in memory ---------------------------------------------------------------------

# Workers keep no state: the reference's log probabilities of a micro-batch, KTO's divergence over a
# step or an evaluation, and images' features are sent with each call. So workers may join and leave
# at any time.

_AT_ONCE = 256  # maximum number of an evaluation's micro-batches that are in memory
_BYTES = 512 * MIB  # maximum size of their images' features, unless one has more


def _in_groups(batches: Iterable[_T], nbytes: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Micro-batches in groups that are computed together."""
    some: list[_T] = []
    taken = 0
    for batch in batches:
        own = nbytes(batch)
        if len(some) == _AT_ONCE or (some and taken + own > _BYTES):
            yield some
            some, taken = [], 0
        some.append(batch)
        taken += own
    if some:
        yield some


def _feature_bytes(images: ImageInputs | None) -> int:
    return 0 if images is None else images.features.nbytes


# ---- the sum on the owner's device ---------------------------------------------------------------


def received_gradient(adapter: AdapterLayout) -> ShardedVector:
    """The vector that workers' gradients are uploaded to."""
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


# ---- the engine ----------------------------------------------------------------------------------

_PAUSE = 2.0  # seconds between probes of a worker that does not respond


@dataclass(frozen=True, eq=False)
class Block:
    """A call of a worker's method."""

    given: tuple[Any, ...]  # arguments of the method, after ``BlockRequest``
    # Returns a valid answer, else raises ``WrongAnswerError``
    check: Callable[[BlockRequest, Any], Any]


Deliver = Callable[[int, Any], None]


@dataclass(eq=False)
class _Step:
    method: str  # of the worker, such as ``"gradient"`` or ``"loss"``
    blocks: Sequence[Block]
    deliver: Deliver
    is_query: bool  # a worker that cannot answer may still compute blocks
    # By block, the worker whose result is not finite; another one computes the block as well
    doubted: dict[int, WorkerHandle] = field(default_factory=dict)
    # Blocks with workers that cannot answer them
    unable: set[tuple[int, WorkerHandle]] = field(default_factory=set)
    failure: Exception | None = None


class Engine:
    """Computes blocks on all available workers. Lives on one asyncio loop."""

    def __init__(
        self,
        connection: Connection,
        worker_class: WorkerClass,  # instantiated in each worker process
        specify: Callable[[str], WorkerSpec],  # what the named worker opens
        check: Check,
        report: Callable[[str], None],
        *,
        fixed: bool,
        patience: float,
    ) -> None:
        self._scheduler = Scheduler(fixed=fixed)
        self._progress = Progress()
        self._members = WorkerRegistry(
            connection, worker_class, specify, check, report, self._scheduler, self._progress
        )
        self._silence = patience
        self._patience = Watchdog(patience, self._progress, self._members, report)
        self._version, self._parameters = -1, np.zeros(0, np.float32)

    async def begin(self, count: int) -> None:
        """Waits until ``count`` workers have opened the model."""
        members = self._members
        self._progress.spawn(members.watch(self._silence))
        self._progress.advance()
        while len(members.ready) < count:
            if members.all_excluded:
                raise ClusterError(f"all workers are excluded: {members.last_reason}")
            await self._progress.change()
            what = f"{len(members.ready)} of {count} workers were ready"
            self._patience.check(what, count=count)

    async def stop(self) -> None:
        """Cancels background tasks; must be called before the connection is closed."""
        await self._progress.stop()

    @property
    def identities(self) -> dict[str, WorkerInfo]:
        """All workers that are ready, sorted by name."""
        return {m.name: m.identity for m in self._members.ready if m.identity is not None}

    async def num_workers(self) -> int:
        """The number of workers that are ready."""
        return len(self._members.ready)

    async def worker_metrics(self) -> tuple[WorkerMetrics, ...]:
        """What each worker has done since the last call."""
        return self._scheduler.worker_metrics(time.monotonic())

    def publish(self, parameters: FloatArray) -> None:
        """Sets the parameters that blocks are computed with."""
        if not np.array_equal(self._parameters.view(np.uint32), parameters.view(np.uint32)):
            self._version, self._parameters = self._version + 1, parameters

    async def compute(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int], deliver: Deliver,
        *, is_query: bool = False,
    ) -> None:  # fmt: skip
        """Computes all blocks of a step by a worker's method.

        ``sizes`` are each block's tokens, padding included. ``deliver`` is called once for each
        block, with its index and result, in any order.
        """
        step = _Step(method, blocks, deliver, is_query)
        scheduler = self._scheduler
        scheduler.begin(sizes, method)
        self._progress.advance()
        while not scheduler.is_complete:
            ready = {member.name: member for member in self._members.ready}
            for order in scheduler.next(time.monotonic()):
                self._progress.spawn(self._send(ready[order.worker], order, step))
            for name in scheduler.silent(time.monotonic()):
                if not ready[name].is_probed:
                    ready[name].is_probed = True
                    self._progress.spawn(self._probe(ready[name]))
            await self._progress.change()
            if step.failure is not None:
                raise step.failure
            if not scheduler.is_complete:
                what = "no worker has answered" if is_query else "no worker has returned a result"
                self._patience.check(what, is_slow=method == "complete")

    async def query(self, method: str, *given: Any, check: Callable[[Any], Any]) -> Any:
        """Calls a method on one worker, or on another one if that fails or takes too long."""
        answers: list[Any] = []
        query = Block(given, lambda request, answer: check(answer))

        def deliver(block: int, answer: Any) -> None:
            answers.append(answer)

        await self.compute(method, [query], [1], deliver, is_query=True)
        return answers[0]

    async def _send(self, member: WorkerHandle, order: Assignment, step: _Step) -> None:
        """Computes a block on a worker; an error ends this assignment, not the step."""
        scheduler, block = self._scheduler, step.blocks[order.block]
        try:
            request = BlockRequest(await self._update(member), secrets.randbits(62))
            answer = await self._members.call(member, step.method, request, *block.given)
            answer = block.check(request, answer)
        except Exception as err:  # a worker may raise anything
            scheduler.failed(order)
            self._fail(member, order, step, err)
        else:
            seconds = answer.seconds if isinstance(answer, BlockResult) else 0.0
            if scheduler.done(order, time.monotonic(), seconds):
                self._progress.advance()
                self._take(member, order, step, answer)
        finally:
            self._progress.notify()

    async def _update(self, member: WorkerHandle) -> int:
        """Sends a worker the current parameters unless it has them; returns their version."""
        async with member.writing:
            version, parameters = self._version, self._parameters
            if member.version != version:
                await self._members.call(member, "write", version, parameters)
                member.version = version
            return version

    def _take(self, member: WorkerHandle, order: Assignment, step: _Step, answer: Any) -> None:
        """Delivers a result; one that is not finite only if another worker's is not either."""
        is_finite = not isinstance(answer, BlockResult) or answer.is_finite
        first = step.doubted.pop(order.block, None)
        if first is None and not is_finite:
            step.doubted[order.block] = member
            self._scheduler.reject(order)
            return
        if is_finite and first not in (None, member):
            self._members.exclude(
                first,
                f"it returned a gradient or loss that is not finite, worker {member.name} a finite "
                "one for the same block",
            )
        step.deliver(order.block, answer)

    def _fail(self, member: WorkerHandle, order: Assignment, step: _Step, error: Exception) -> None:
        is_expected = isinstance(error, QLoRAError) and not isinstance(error, WrongAnswerError)
        if isinstance(error, Gone):
            return
        if isinstance(error, OSError):
            self._scheduler.pause(member.name)
        elif is_expected and isinstance(error, ClusterError):
            member.version = -1
        elif is_expected and step.is_query:
            if (order.block, member) in step.unable:  # no other worker is left
                step.failure = error
            step.unable.add((order.block, member))  # another worker may have more memory
            self._scheduler.reject(order)
        else:
            self._members.exclude(member, sentence(error))

    async def _probe(self, member: WorkerHandle) -> None:
        """Waits for a worker to respond, which it does after its current block."""
        try:
            await asyncio.sleep(_PAUSE)
            await self._members.call(member, "identity")
            self._scheduler.resume(member.name)
            self._progress.notify()
        except Exception:  # it is probed again
            pass
        finally:
            member.is_probed = False
