"""Blocks on worker processes of a real scheduler, which are killed, stopped and go wrong."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from cluster.asked_engine import BLOCKS, PARAMETERS, an_engine
from support.processes import PATIENCE, until

from qlora_wgpu.cluster import owner, workers
from qlora_wgpu.cluster import scheduler as scheduling
from qlora_wgpu.cluster.connection import Connection
from qlora_wgpu.cluster.workers import WorkerRegistry
from qlora_wgpu.errors import ClusterError, OutOfMemoryError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scheduler():
    """A scheduler, and two processes that are begun again when they are killed."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0", memory_limit=0,
    ) as cluster:  # fmt: skip
        yield cluster.scheduler_address


@pytest.fixture(autouse=True)
def nobody_is_missed(monkeypatch):
    monkeypatch.setattr(workers, "_SOON", PATIENCE)  # however long a busy machine takes to begin


def right(got, blocks=BLOCKS):
    for i, (ids,) in enumerate(blocks):
        np.testing.assert_array_equal(got[i].gradient, PARAMETERS * np.float32(ids.sum()))
    return sorted(got) == list(range(len(blocks)))


def test_blocks_come_from_all_workers_and_new_parameters_reach_them(scheduler):
    with an_engine(scheduler) as asked:
        assert right(asked.step())
        tokens = asked.tokens()
        assert min(tokens.values()) > 0 and len(tokens) == 2
        asked.engine.publish(PARAMETERS + 1)
        got = asked.step()
        np.testing.assert_array_equal(got[1].gradient, (PARAMETERS + 1) * np.float32(10))
        assert asked.text([1, 2], 3) == [1, 2, 3]
        assert asked.told == []


def test_what_goes_to_a_worker_that_is_not_reached_is_passed_on(scheduler, monkeypatch):
    ours = []

    async def unreached(connection, worker):
        ours.append(worker)
        return "no route to host" if worker == ours[0] else None

    monkeypatch.setattr(Connection, "connection_error", unreached)
    with an_engine(scheduler) as asked:
        for _ in range(3):
            assert right(asked.step())
        tokens = asked.tokens()
        assert min(tokens.values()) > 0 and len(tokens) == 2
        (text,) = asked.told
        assert "directly (no route to host): its traffic passes through the scheduler" in text
        direct = [m.actor._client.direct_to_workers for m in asked.engine._members.ready]
        assert sorted(direct) == [False, True]


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_killed_worker_loses_nothing_and_comes_back(scheduler, name, tmp_path):
    with an_engine(scheduler, folder=str(tmp_path), **{name: "kill"}) as asked:
        assert right(asked.step())
        until(lambda: asked.told)
        (text,) = asked.told  # Dask, or a look at who is there, has noticed first
        whys = ("it has left", "its process has ended")
        assert text in [f"worker {name}: {why}; its blocks go to other workers" for why in whys]
        until(lambda: len(asked.engine.identities) == 2)
        assert right(asked.step())


def test_a_worker_that_is_gone_is_told_of_once(scheduler):
    with an_engine(scheduler) as asked:
        member, *_ = asked.engine._members.ready

        async def noticed():
            for why in ("its process has ended", "it has left"):
                asked.engine._members._remove(member, why)

        asked.thread.run(noticed())
        assert asked.told == [
            f"worker {member.name}: its process has ended; its blocks go to other workers"
        ]


def test_a_stopped_worker_is_not_waited_for_and_works_again(scheduler, tmp_path, monkeypatch):
    monkeypatch.setattr(scheduling, "_MIN_TIMEOUT", 0.5)
    monkeypatch.setattr(owner, "_PAUSE", 0.3)
    with an_engine(scheduler, folder=str(tmp_path), **{"0": "stop"}) as asked:
        try:
            assert right(asked.step())
            assert right(asked.step())
        finally:  # until here it is stopped
            os.kill(int((tmp_path / "stop").read_text()), signal.SIGCONT)

        def works():
            assert right(asked.step())
            return asked.tokens()["0"]

        asked.tokens()
        until(works)


def test_a_worker_without_memory_is_left_out_by_name(scheduler):
    with an_engine(scheduler, **{"1": "memory"}) as asked:
        assert right(asked.step())
        assert asked.told == ["worker 1 is excluded: the device has no room"]
        assert right(asked.step())


def test_a_text_is_written_by_a_worker_that_has_room_for_it(scheduler):
    with an_engine(scheduler, **{"0": "no text"}) as asked:
        assert asked.text([1], 2) == [1, 2]
        assert right(asked.step())
        assert asked.tokens()["0"] > 0  # it is not left out for that
    full = an_engine(scheduler, **{"0": "no text", "1": "no text"})
    with full as asked, pytest.raises(OutOfMemoryError, match="no room for a text on"):
        asked.text([1], 2)


def test_a_worker_that_returns_nan_is_told_by_name(scheduler):
    with an_engine(scheduler, **{"0": "nan"}) as asked:
        assert right(asked.step())
        (text,) = asked.told
        assert text.startswith("worker 0 is excluded: it returned a gradient") and "1" in text


@pytest.mark.cover(does=["short", "float64", "tokens as text", "replayed", "unreadable error"])
@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("short", "its gradient has 63 values, expected 64"),
        ("square", "its gradient has 8 × 8 values, expected 64"),
        ("float64", "its gradient is float64, expected float32"),
        ("list", "its gradient is a value of type list, expected an array"),
        ("without", "its gradient is nothing, expected an array"),
        ("tokens", "it counted -5 tokens, expected 1"),
        ("tokens as text", "its tokens is a value of type str, expected a number"),
        ("nan tokens", "it counted nan tokens, expected 1"),
        ("seconds", "it reported -1.0 seconds of computing"),
        ("nothing", "it returned nothing instead of a block's result"),
        ("a dict", "it returned a value of type dict instead of a block's result"),
        ("replayed", "it returned the result of another block"),
        ("unreadable", "cannot read its answer: ValueError"),
        ("unreadable error", "cannot read its answer: TypeError"),
    ],
)
def test_a_worker_whose_answer_is_none_to_its_block_is_left_out(scheduler, does, says):
    with an_engine(scheduler, **{"0": does}) as asked:
        assert right(asked.step())
        assert len(asked.told) == 1 and says in asked.told[0]
        assert asked.told[0].startswith("worker 0 is excluded: ")
        assert right(asked.step())


@pytest.mark.parametrize("does", ["unreadable text", "other tokens", "long text"])
def test_a_text_that_cannot_be_is_written_by_another_worker(scheduler, does):
    with an_engine(scheduler, **{"0": does}) as asked:
        assert asked.text([1, 2], 3) == [1, 2, 3]
        assert len(asked.told) == 1 and asked.told[0].startswith("worker 0 is excluded: ")


def test_a_nan_that_all_workers_return_is_the_models(scheduler):
    with an_engine(scheduler, **{"0": "all nan", "1": "all nan"}) as asked:
        got = asked.step()
        assert len(got) == len(BLOCKS) and np.isnan(got[0].gradient[1])
        assert asked.told == []


def test_a_refused_worker_is_named_and_the_others_go_on(scheduler):
    def check(identity):
        return "it has other weights" if identity.base["weights"] == "another" else None

    with an_engine(scheduler, count=1, check=check, **{"0": "other"}) as asked:
        assert right(asked.step())
        until(lambda: asked.told)
        assert asked.told == ["worker 0 is excluded: it has other weights"]


def test_where_all_workers_are_refused_nothing_begins(scheduler):
    with (
        pytest.raises(ClusterError, match=r"worker [01]: it does not want to"),
        an_engine(scheduler, **{"0": "refuse", "1": "refuse"}),
    ):
        pass


def test_who_opens_the_model_is_waited_for_longer_than_for_nobody(scheduler, tmp_path):
    with an_engine(scheduler, count=0, folder=str(tmp_path), **{"1": "open"}) as asked:
        begun = asked.thread.submit(asked.engine.begin(2))
        until(lambda: list(asked.engine.identities) == ["0"])
        looks = asked.lose_patience(times=2)
        until(lambda: len(looks) > 2)
        (tmp_path / "opened").touch()
        begun.result(PATIENCE)
        assert list(asked.engine.identities) == ["0", "1"]


def test_nothing_is_told_of_workers_that_the_end_interrupts(scheduler, tmp_path):
    try:
        with an_engine(scheduler, count=1, folder=str(tmp_path), **{"1": "open"}) as asked:
            assert list(asked.engine.identities) == ["0"]
        assert asked.told == []
    finally:
        (tmp_path / "opened").touch()


def test_workers_that_cannot_be_reached_are_told_once_and_end_it(scheduler, monkeypatch):
    tried = []

    async def unreached(members, member):
        tried.append(member)
        raise OSError("no route to host")

    monkeypatch.setattr(WorkerRegistry, "open", unreached)
    monkeypatch.setattr(workers, "_RETRY", 0.2)
    with an_engine(scheduler, count=0) as asked:
        begun = asked.thread.submit(asked.engine.begin(2))
        until(lambda: len(tried) > 5 and len(asked.told) == 2)
        asked.lose_patience()
        with pytest.raises(
            ClusterError, match=r"0 of 2 .* seconds .*cannot reach worker .: no route to host"
        ):
            begun.result(PATIENCE)
        assert sorted(asked.told.of("cannot reach")) == [
            f"cannot reach worker {name}: no route to host; retrying" for name in "01"
        ]


def test_too_few_workers_end_it_after_some_patience(scheduler):
    with an_engine(scheduler, count=0) as asked:
        begun = asked.thread.submit(asked.engine.begin(3))
        until(lambda: len(asked.engine.identities) == 2)
        asked.lose_patience()
        with pytest.raises(ClusterError, match=r"2 of 3 workers were ready for \d+ seconds"):
            begun.result(PATIENCE)


def test_workers_that_all_fail_end_it_after_some_patience(scheduler):
    with an_engine(scheduler, **{"0": "memory", "1": "memory"}) as asked:
        begun = asked.begin_step()
        until(lambda: len(asked.told.of("is excluded")) == 2)
        asked.lose_patience()
        with pytest.raises(ClusterError, match=r"\d+ seconds .*the device has no room"):
            begun.result(PATIENCE)


@pytest.mark.full
def test_a_lost_scheduler_ends_it_soon(tmp_path, monkeypatch):
    file = tmp_path / "scheduler"
    code = (
        "import sys, time\nfrom distributed import LocalCluster\n"
        "if __name__ == '__main__':\n"
        "    cluster = LocalCluster(n_workers=1, threads_per_worker=1, host='127.0.0.1',\n"
        "        protocol='tcp://', dashboard_address='127.0.0.1:0', processes=False)\n"
        "    open(sys.argv[1], 'w').write(cluster.scheduler_address)\n    time.sleep(1000)\n"
    )
    with closing_process([sys.executable, "-c", code, str(file)]) as process:
        until(lambda: file.exists() and file.read_text())
        with an_engine(file.read_text(), count=1) as asked:
            assert right(asked.step())
            monkeypatch.setattr(workers, "_SILENCE", 3.0)
            process.kill()
            with pytest.raises(ClusterError, match=r"the scheduler has not answered"):
                asked.step()


@contextmanager
def closing_process(command):
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=path)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
