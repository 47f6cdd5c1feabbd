"""Who joins, leaves and is excluded, as the scheduler lists workers; there is no process."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from qlora_wgpu.cluster import workers
from qlora_wgpu.cluster.blocks import WorkerInfo, _packed
from qlora_wgpu.cluster.workers import (
    Gone,
    ProcessLost,
    Progress,
    WorkerHandle,
    WorkerRegistry,
    sentence,
)
from qlora_wgpu.errors import ClusterError, ConfigError


def info(device="a card", driver="1", kernels="k", notes=()):
    return WorkerInfo(device, driver, kernels, 1, "1", {}, {}, notes)


class Registry(WorkerRegistry):
    """Workers of which each ``open`` answers what it is told to, and what is said of them."""

    def __init__(self, answers=None, *, problem=None, connection=None):
        self.told, self.added, self.removed, self.asked = [], [], [], []
        scheduler = SimpleNamespace(add=self.added.append, remove=self.removed.append)
        super().__init__(
            connection, None, None, lambda identity: problem, self.told.append, scheduler,
            Progress(),
        )  # fmt: skip
        self.answers = answers or {}

    async def open(self, member):
        answers = self.answers.get(member.name, info())
        answer = answers.pop(0) if isinstance(answers, list) else answers
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def call(self, member, method, *arguments):
        self.asked.append((member.name, method, *arguments))

    def list(self, **names):
        self._compare({f"tcp://{key}": {"name": name, "id": name} for key, name in names.items()})

    async def settled(self):
        for _ in range(20):
            await asyncio.sleep(0)
            if not self._progress._tasks:
                return
            await asyncio.sleep(0.001)


def listed(*lists, **how):
    """A registry that was given these lists in turn."""

    async def done():
        registry = Registry(**how)
        for each in lists:
            registry.list(**each)
            await registry.settled()
        return registry

    return asyncio.run(done())


def test_workers_join_by_name_and_leave():
    registry = listed({"x": "b", "y": "10", "z": "9"})
    assert [member.name for member in registry.ready] == ["9", "10", "b"]
    assert sorted(registry.added) == ["10", "9", "b"] and not registry.removed
    assert not registry.is_empty and not registry.opening and not registry.all_excluded
    left = listed({"x": "a", "y": "b"}, {"y": "b"})
    assert [member.name for member in left.ready] == ["b"] and left.removed == ["a"]
    assert left.told == ["worker a: it has left; its blocks go to other workers"]
    nobody = listed({"x": "a"}, {})
    assert nobody.is_empty and not nobody.ready and not nobody.all_excluded


def test_another_process_at_the_same_address_is_another_worker():
    registry = listed({"x": "a"}, {"x": "b"})
    assert [member.name for member in registry.ready] == ["b"]
    assert registry.added == ["a", "b"] and registry.removed == ["a"]


def test_of_two_workers_of_one_name_one_has_its_address():
    registry = listed({"x": "a", "y": "a"})
    assert sorted(registry.added) == ["a", "a (tcp://y)"]


def test_only_a_new_name_restarts_the_clock(monkeypatch):
    advanced = []
    monkeypatch.setattr(Progress, "advance", lambda self: advanced.append(1))
    registry = listed({"x": "a"})
    assert len(advanced) == 2  # joined, and opened
    registry = listed(
        {"x": "a"}, {}, {"x": "a"}, answers={"a": [ValueError("no"), ValueError("no")]}
    )
    assert len(advanced) == 3 and registry.all_excluded


@pytest.mark.parametrize(("error", "said"), [
    (ModuleNotFoundError("no", name="qlora_wgpu"),
     "the package qlora_wgpu is missing on it: install qlora-wgpu there"),
    (ValueError("a\n b"), "ValueError: a b"), (ConfigError("a\n b"), "a b"),
])  # fmt: skip
def test_who_cannot_open_the_model_is_excluded(error, said):
    registry = listed({"x": "a"}, answers={"a": error})
    assert registry.told == [f"worker a is excluded: {said}"]
    assert registry.last_reason == f"worker a: {said}" and registry.removed == ["a"]
    assert registry.all_excluded and registry.is_empty and not registry.added


def test_who_fails_the_check_is_told_and_excluded():
    registry = listed({"x": "a"}, problem="another model")
    assert registry.asked == [("a", "refused", "another model")]
    assert registry.told == ["worker a is excluded: another model"] and registry.all_excluded
    assert sentence(KeyError("k")) == "KeyError: 'k'"


def test_exclusion_is_said_once_and_of_one_worker():
    registry = listed({"x": "a", "y": "b"})
    member = registry.ready[0]
    member.actor = object()
    registry.exclude(member, "why")
    registry.exclude(member, "why not")
    assert registry.told == ["worker a is excluded: why"] and member.actor is None
    assert [each.name for each in registry.ready] == ["b"] and not registry.all_excluded
    registry._remove(member, "it has left")
    registry._remove(member, "it has left")
    assert len(registry.told) == 1  # it had no blocks


def test_who_waits_hears_of_one_that_leaves():
    registry, heard = listed({"x": "a"}), []
    registry._progress.notify = lambda: heard.append(True)
    (member,) = registry.ready
    for _ in range(2):
        registry._remove(member, "it has left")
    assert heard == [True] and registry.removed == ["a"] and registry.is_empty


@pytest.mark.parametrize("error", [Gone(), ProcessLost()])
def test_who_ends_while_it_opens_the_model_is_dropped_in_silence(error):
    registry = listed({"x": "a"}, answers={"a": error})
    assert not registry.told and not registry.added and not registry.ready
    assert len(registry._members) == (not isinstance(error, ProcessLost))


def test_who_cannot_be_reached_is_asked_again(monkeypatch):
    monkeypatch.setattr(workers, "_RETRY", 0.001)
    registry = listed({"x": "a"}, answers={"a": [OSError("no route"), OSError("no route"), info()]})
    assert registry.told == ["cannot reach worker a: no route; retrying"]
    assert [member.name for member in registry.ready] == ["a"] and registry.ready[0].is_reachable


def test_who_leaves_while_it_cannot_be_reached_is_not_asked_again():
    registry = listed({"x": "a"}, {}, answers={"a": [OSError("no route")]})
    assert not registry._members and registry.opening == []


def test_workers_that_open_the_model_are_no_others():
    registry = Registry()
    registry._members = {name: WorkerHandle(name, name, 0) for name in "abcd"}
    registry._members["a"].identity = info()
    registry._members["b"].is_reachable = False
    registry._members["c"].is_excluded = True
    assert [member.name for member in registry.opening] == ["d"]
    assert [member.name for member in registry.ready] == ["a"] and not registry.is_empty
    del registry._members["d"], registry._members["a"]
    assert registry.is_empty and not registry.all_excluded


@pytest.mark.parametrize(("other", "differ"), [
    (info(), False), (info(driver="2"), True), (info(kernels="n"), True),
    (info("another card", "2"), False),
])  # fmt: skip
def test_one_gpu_with_two_drivers_is_told(other, differ):
    registry = listed({"x": "a"}, {"x": "a", "y": "b"}, answers={"b": other})
    assert [text.startswith("workers a and b have the same GPU") for text in registry.told] == [
        True
    ] * differ


def test_notes_of_a_worker_are_told():
    assert listed({"x": "a"}, answers={"a": info(notes=("slow",))}).told == ["worker a: slow"]


@pytest.mark.parametrize(("identity", "reachable", "excluded", "ready", "opening"), [
    (None, True, False, False, True), (None, False, False, False, False),
    (None, True, True, False, False), (info(), True, False, True, False),
    (info(), False, False, True, False), (info(), True, True, False, False),
])  # fmt: skip
def test_who_is_ready_and_who_opens_the_model(identity, reachable, excluded, ready, opening):
    member = WorkerHandle("a", "", 0, identity=identity)
    member.is_reachable, member.is_excluded = reachable, excluded
    assert (member.is_ready, member.is_opening) == (ready, opening)


class Answering:
    """An actor whose answers come at once, or never."""

    def __init__(self, error=None, *, never=False):
        self.error, self.never = error, never

    async def answer(self, method, *arguments):
        if self.never:
            await asyncio.sleep(1000)
        if self.error is not None:
            raise self.error
        return _packed((method, *arguments))


@pytest.mark.parametrize(("actor", "is_gone", "raised"), [
    (Answering(), False, None), (Answering(), True, Gone), (None, False, Gone),
    (Answering(RuntimeError("Actor lost")), False, ProcessLost),
    (Answering(RuntimeError("another")), False, RuntimeError),
])  # fmt: skip
def test_a_worker_is_called(actor, is_gone, raised):
    async def called():
        member = WorkerHandle("a", "", 0, actor=actor)
        if is_gone:
            member.gone.set()
        return await member.call("identity", 7)

    if raised is None:
        assert asyncio.run(called()) == ("identity", 7)
        return
    with pytest.raises(raised) as told:
        asyncio.run(called())
    assert type(told.value) is raised


def test_a_call_ends_when_the_worker_leaves():
    async def called():
        member = WorkerHandle("a", "", 0, actor=Answering(never=True))
        asyncio.get_running_loop().call_later(0.001, member.gone.set)
        async with asyncio.timeout(20):
            await member.call("identity")

    with pytest.raises(Gone):
        asyncio.run(called())


def test_a_call_that_tells_of_a_lost_process_removes_the_worker():
    async def called():
        registry = Registry()
        registry.list(x="a")
        await registry.settled()
        (member,) = registry.ready
        member.actor = Answering(RuntimeError("Actor lost"))
        with pytest.raises(ProcessLost):
            await WorkerRegistry.call(registry, member, "identity")
        return registry

    registry = asyncio.run(called())
    assert registry.told == ["worker a: its process has ended; its blocks go to other workers"]
    assert registry.is_empty


@pytest.mark.parametrize(("silent", "status", "fails"), [
    (0.0, "running", False), (5.0, "running", False), (6.0, "running", True),
    (0.0, "closed", True),
])  # fmt: skip
def test_a_scheduler_that_is_lost_for_long_ends_the_run(silent, status, fails, monkeypatch):
    registry = Registry(connection=SimpleNamespace(client=SimpleNamespace(status=status)))
    heard = registry._heard
    monkeypatch.setattr(time, "monotonic", lambda: heard + silent)
    registry._look_for_scheduler(5.0)
    failure = registry._progress._failure
    assert (failure is not None) == fails
    if fails:
        assert isinstance(failure, ClusterError)
        assert f"has not answered for {silent:.0f} seconds" in str(failure)
