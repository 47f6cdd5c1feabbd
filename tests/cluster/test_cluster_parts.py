"""Parts of a cluster, each by itself: refusals, groups of micro-batches, sums, answers."""

import asyncio
import math
import pickle
import queue
import ssl
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.cluster import connection, owner, serving
from qlora_wgpu.cluster.blocks import (
    BlockRequest,
    BlockResult,
    RunningSums,
    SampledTokens,
    Samples,
    WrongAnswerError,
    _Failed,
    _packed,
    check_completions,
    check_text,
    pickled_actor,
    unpacked,
)
from qlora_wgpu.cluster.owner import Cluster, Engine
from qlora_wgpu.cluster.scheduler import Scheduler
from qlora_wgpu.cluster.security import Address
from qlora_wgpu.errors import ClusterError, ConfigError
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.ops.optimizers import STATS_METRICS
from qlora_wgpu.ops.preference import METRICS

PLACE = Address("tls", "gpu1", 8786)


def tls_error(kind, reason):
    error = kind(1, "words")
    error.reason = reason
    return error


@pytest.mark.parametrize(("error", "says"), [
    (tls_error(ssl.SSLError, "SSLV3_ALERT_CERTIFICATE_EXPIRED"), "which has expired by"),
    (tls_error(ssl.SSLError, "TLSV1_ALERT_BAD_CERTIFICATE"), "use the certificate folder"),
    (tls_error(ssl.SSLError, "TLSV1_ALERT_UNKNOWN_CA"), "use the certificate folder"),
    (tls_error(ssl.SSLError, "DECRYPT_ERROR"), "use the certificate folder"),
    (tls_error(ssl.SSLError, "WRONG_VERSION_NUMBER"), r"not use TLS \(WRONG_VERSION_NUMBER\)"),
    (tls_error(ssl.SSLError, None), r"not use TLS \(.*words.*\)"),
    (tls_error(ssl.SSLEOFError, None), "it closed the connection"),
    (tls_error(ssl.SSLZeroReturnError, None), "it closed the connection"),
])  # fmt: skip
def test_why_a_scheduler_refuses(error, says):
    made = connection._refusal(PLACE, error)
    assert isinstance(made, connection._NotYet) == ("closed" in says)
    assert isinstance(made, ClusterError) != ("closed" in says)
    with pytest.raises(type(made), match=says):
        raise made


@pytest.mark.parametrize(("error", "reason"), [
    (OSError("a\n b"), "a b"), (OSError(), "OSError"),
])  # fmt: skip
def test_the_system_s_error_is_told_without_what_wraps_it(error, reason):
    assert connection._reason(error) == reason
    for name in ("__cause__", "__context__"):
        outer = OSError("wrapped")
        setattr(outer, name, error)
        assert connection._reason(outer) == reason


@pytest.mark.parametrize(("answers_after", "patience", "slept"), [
    (0, 10.0, []), (1, 10.0, [2.0]), (3, 10.0, [2.0, 2.0, 2.0]), (9, 5.0, [2.0, 2.0, 1.0]),
    (9, 0.5, [0.5]), (9, 0.0, []),
])  # fmt: skip
def test_a_scheduler_is_waited_for(monkeypatch, answers_after, patience, slept):
    now, waits, told, tries = [100.0], [], [], []

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    def attempt(address, security):
        tries.append(address)
        if len(tries) <= answers_after:
            raise connection._NotYet("no answer")

    monkeypatch.setattr(connection, "_PAUSE", 2.0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(connection, "_try", attempt)

    def wait():
        connection.wait_for_scheduler(str(PLACE), None, patience=patience, report=told.append)

    if answers_after < 9:
        wait()
    else:
        with pytest.raises(ClusterError, match=rf"\(no answer\) within {patience:,.0f} seconds"):
            wait()
    assert waits == pytest.approx(slept) and set(tries) == {PLACE}
    assert told == [f"waiting for a scheduler at {PLACE} (no answer)"] * bool(slept)


@pytest.mark.parametrize(
    "error", [OSError("no file"), ValueError("no file"), ssl.SSLError("no file")]
)
def test_certificates_that_cannot_be_used(error):
    def fails(role):
        raise error

    with pytest.raises(ConfigError, match=r"cannot use the certificates .*no file"):
        connection._context(PLACE, SimpleNamespace(get_connection_args=fails))
    good = SimpleNamespace(get_connection_args=lambda role: {"ssl_context": role})
    assert connection._context(PLACE, good) == "worker"


@pytest.mark.parametrize(("has_bokeh", "link", "shown"), [
    (True, "http://a", "http://a"), (True, "", None), (True, None, None), (False, "http://a", None),
])  # fmt: skip
def test_the_dashboard_s_address(monkeypatch, has_bokeh, link, shown):
    monkeypatch.setattr(connection, "find_spec", lambda name: name if has_bokeh else None)
    client = SimpleNamespace(dashboard_link=link) if link is not None else SimpleNamespace()
    assert connection.Connection(client, "", None).dashboard == shown


# ---- the owner -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "groups"), [
    ([], []), ([0] * 3, [[0] * 3]), ([0] * 4, [[0] * 3, [0]]), ([6, 4, 1], [[6, 4], [1]]),
    ([6, 5, 4], [[6], [5, 4]]), ([99, 1, 99], [[99], [1], [99]]), ([9, 1, 1], [[9, 1], [1]]),
])  # fmt: skip
def test_micro_batches_in_groups(monkeypatch, sizes, groups):
    monkeypatch.setattr(owner, "_AT_ONCE", 3)
    monkeypatch.setattr(owner, "_BYTES", 10)
    assert list(owner._in_groups(sizes, lambda size: size)) == groups


def test_bytes_of_images_features():
    assert owner._feature_bytes(None) == 0
    images = SimpleNamespace(features=np.zeros((3, 4), np.float32))
    assert owner._feature_bytes(images) == 48


def test_sums_of_blocks():
    sums = RunningSums()
    metrics = np.arange(len(METRICS), dtype=np.float32)
    sums.add(BlockResult(2.0, 4.0, 2, 0.1, correct=3.0, balance=0.5))
    assert sums.divergence == (0.0, 0.0)
    sums.add(BlockResult(1.5, 5.0, 1, 0.1, correct=1.0, metrics=metrics))
    names = {"loss": owner.STATS_LOSS, "tokens": owner.STATS_TOKENS, "correct": owner.STATS_CORRECT}
    found = {name: float(sums.stats[place]) for name, place in names.items()}
    assert found == {"loss": 3.5, "tokens": 9.0, "correct": 4.0} and sums.saturated == 3
    assert sums.stats.dtype == np.float32 and 0.5 in sums.stats[:STATS_METRICS]
    assert (sums.stats[STATS_METRICS:] == metrics).all()
    place = METRICS.index("divergence")
    assert sums.divergence == (float(place), float(METRICS.index("divergent")))


class Turns(Cluster):
    """An owner whose engine has these results, in the order in which they come."""

    def __init__(self, coming):
        self.coming, self.shown, self.cancelled = coming, 0, 0
        self._engine = SimpleNamespace(compute=self._deliver)
        self._thread = SimpleNamespace(submit=lambda work: self)
        self._messages, self.failure = queue.SimpleQueue(), None

    def _deliver(self, method, blocks, sizes, deliver, *, is_query):
        for each in self.coming:
            deliver(*each)

    def done(self):
        return True

    def result(self):
        if self.failure is not None:
            raise self.failure

    def cancel(self):
        self.cancelled += 1


def test_results_are_added_in_the_order_of_the_blocks():
    cluster, added = Turns([(2, "c"), (0, "a"), (1, "b")]), []
    assert cluster._in_order("loss", [1, 2, 3], [1, 1, 1], added.append)
    assert added == ["a", "b", "c"] and cluster.cancelled == 1
    assert cluster._in_order("loss", [], [], added.append) and len(added) == 3


def test_a_step_that_is_stopped_or_fails_adds_no_more(monkeypatch):
    monkeypatch.setattr(owner, "_PERIOD", 0.001)
    cluster, added = Turns([(0, "a"), (1, "b")]), []
    stopped = iter([False, True])
    assert not cluster._in_order("loss", [1, 2], [1, 1], added.append, lambda: next(stopped))
    assert added == ["a"] and cluster.cancelled == 1
    failing = Turns([(0, "a")])
    failing.failure = ClusterError("all have left")
    with pytest.raises(ClusterError, match="all have left"):
        failing._in_order("loss", [1, 2], [1, 1], added.append)
    assert added == ["a", "a"] and failing.cancelled == 1


def test_only_other_parameters_have_another_version():
    engine = SimpleNamespace(_version=-1, _parameters=np.zeros(0, np.float32))
    one = np.array([0.0, np.nan], np.float32)
    for given, version in ((one, 0), (one.copy(), 0), (-one, 1), (one, 2)):
        Engine.publish(engine, given)
        assert engine._version == version
    assert engine._parameters is one


@pytest.mark.parametrize(("workers", "prompts", "sizes"), [
    (2, 5, [3, 2]), (0, 3, [3]), (1, 9, [4, 4, 1]), (9, 3, [1, 1, 1]), (3, 6, [2, 2, 2]),
])  # fmt: skip
def test_prompts_are_divided_among_workers(monkeypatch, workers, prompts, sizes):
    monkeypatch.setattr(owner, "MOST_AT_ONCE", 4)
    asked, done = [], []

    class Sampling_(Cluster):
        num_workers = workers

        def __init__(self):
            self._sum = SimpleNamespace(
                model=SimpleNamespace(architecture=SimpleNamespace(vocab_size=9))
            )

        def _publish(self, parameters=None):
            pass

        def _in_order(self, method, blocks, sizes, add, is_stopped, *, is_query):
            assert method == "complete" and is_query
            asked.append(sizes)
            for block in blocks:
                (given,) = block.given
                add([[*ids, 7 if ids[0] % 2 else 8] for ids in given.prompts])
            return not is_stopped()

    given = [SimpleNamespace(ids=[number, 1]) for number in range(prompts)]
    how = {"max_completion_length": 10, "stop_ids": [7], "progress": done.append}
    made = Sampling_().complete(given, Sampling(), range(prompts), **how)
    assert asked == [[10 * size for size in sizes]] and done == np.cumsum(sizes).tolist()
    assert [each.ids[0] for each in made] == list(range(prompts))
    assert [each.is_truncated for each in made] == [number % 2 == 0 for number in range(prompts)]
    stopped = Sampling_().complete(
        given, Sampling(), range(prompts), is_stopped=lambda: True, **how
    )
    assert stopped is None


# ---- answers -------------------------------------------------------------------------------------


def test_answers_are_packed_with_their_arrays_apart():
    array = np.arange(1000, dtype=np.float32)
    head, buffers = _packed({"a": array})
    assert len(head) < 500 and sum(each.nbytes for each in buffers) == array.nbytes
    assert (unpacked((head, buffers))["a"] == array).all()
    for answer in (None, (b"no pickle", []), 7):
        with pytest.raises(WrongAnswerError, match="cannot read its answer: "):
            unpacked(answer)
    with pytest.raises(ClusterError, match="why"):
        unpacked(_packed(_Failed(ClusterError("why"))))
    with pytest.raises(WrongAnswerError, match="it failed without an error"):
        unpacked(_packed(_Failed(None)))


class Told:
    """A worker that answers with what it opened."""

    def __init__(self, specification):
        self.specification = specification

    def ask(self, number):
        return self.specification, 1 / number


def test_an_actor_is_made_of_bytes():
    actor = pickle.loads(pickled_actor(Told, "a model"))
    assert unpacked(actor.answer("ask", 2)) == ("a model", 0.5)
    with pytest.raises(ZeroDivisionError):
        unpacked(actor.answer("ask", 0))
    with pytest.raises(AttributeError):
        unpacked(actor.answer("other"))


def completions(ids, lengths, **changes):
    values = {"most": 3, "stop": {8}, "nonce": 5, **changes}
    given = Samples([[1]] * len(lengths), list(range(len(lengths))), Sampling(), values["most"],
                    frozenset(values["stop"]))  # fmt: skip
    sampled = SampledTokens(np.array(ids, np.int32), np.array(lengths, np.int32), values["nonce"])
    return check_completions(BlockRequest(0, 5), sampled, given, 9)


def test_completions_that_are_taken():
    assert completions([0, 8, 1, 2, 3, 8], [2, 3, 1]) == [[0, 8], [1, 2, 3], [8]]


@pytest.mark.parametrize(("ids", "lengths", "changes", "says"), [
    ([8], [1], {"nonce": 4}, "of another block"), ([], [0], {}, "do not have 1 to 3 tokens"),
    ([1, 2, 3, 8], [4], {}, "do not have 1 to 3 tokens"), ([8, 8], [1], {}, "has 2 values"),
    ([9, 8], [2], {}, "invalid token ids"), ([-1, 8], [2], {}, "invalid token ids"),
    ([8, 1, 2], [3], {}, "tokens after its end"), ([1, 2], [2], {}, "without an end"),
    ([8, 8], [2], {}, "tokens after its end"),
])  # fmt: skip
def test_completions_that_are_not_taken(ids, lengths, changes, says):
    with pytest.raises(WrongAnswerError, match=says):
        completions(ids, lengths, **changes)


@pytest.mark.parametrize(("ids", "good"), [
    ([], True), ([0, 8], True), ([1, 2, 3], True), ([1, 2, 3, 4], False), ([9], False),
    ([-1], False), ([1.0], False), ((1,), False), (None, False),
])  # fmt: skip
def test_a_text_of_a_worker(ids, good):
    if good:
        assert check_text(ids, 3, 9) == ids
        return
    with pytest.raises(WrongAnswerError, match="it generated "):
        check_text(ids, 3, 9)


def test_a_worker_that_was_too_slow_is_assumed_to_be_faster_by_now():
    """Workers that were too slow for a step's blocks are tried again as a part of the fastest."""
    scheduler = Scheduler()
    for name in "abc":
        scheduler.add(name)
    paces = {"a": 1.0, "b": 9.0, "c": 5.0}
    for name, pace in paces.items():
        scheduler._workers[name].paces["gradient"] = pace
    scheduler.begin([10], "gradient")
    scheduler._workers["c"].last_step = scheduler._step.number
    scheduler._recover()
    found = {name: worker.paces["gradient"] for name, worker in scheduler._workers.items()}
    assert found["a"] == 1.0 and found["c"] <= 5.0 and 1.0 < found["b"] < 9.0


@pytest.mark.parametrize("limit", [3 << 20, 4 << 20])
def test_a_worker_may_use_all_of_its_memory_and_no_more(monkeypatch, limit):
    used = iter([1 << 20, limit, limit + (1 << 20), 99 << 20])
    own = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(used)))
    monkeypatch.setattr(serving, "psutil", SimpleNamespace(Process=lambda: own))
    monkeypatch.setattr(serving, "_POLL", 0.0)
    most = limit >> 20
    said = f"it used {most + 1} MiB of memory, the limit is {most}"
    assert asyncio.run(serving.memory_exceeded(limit)) == said


# ---- the scheduler -------------------------------------------------------------------------------


@pytest.mark.parametrize(("delays", "takes", "count", "window", "seconds"), [
    ([0.0], [1.0], 3, 9, 3.0), ([0.0, 0.0], [1.0, 1.0], 4, 9, 2.0),
    ([0.0, 0.0], [1.0, 4.0], 5, 9, 4.0), ([0.0, 10.0], [1.0, 1.0], 5, 9, 5.0),
    ([2.0], [1.0], 1, 9, 3.0), ([0.0, math.inf], [1.0, 1.0], 2, 9, 2.0),
    ([0.0], [1.0], 100, 4, 4.0), ([0.0, 0.0], [1.0, 1.0], 100, 4, 4.0),
])  # fmt: skip
def test_the_fewest_seconds_for_some_blocks(delays, takes, count, window, seconds):
    scheduler = Scheduler(window=window)
    for number in range(len(delays)):
        scheduler.add(str(number))
    found = scheduler._makespan(delays, takes, count)
    assert seconds <= found == pytest.approx(seconds, rel=1e-5)
    assert scheduler._makespan([math.inf], [1.0], 1) == math.inf
