"""What becomes of a worker's answers and failures in a step, without a worker."""

import asyncio

import pytest

from qlora_wgpu.cluster.blocks import BlockResult, WrongAnswerError
from qlora_wgpu.cluster.owner import Block, Engine
from qlora_wgpu.cluster.workers import Gone, WorkerHandle
from qlora_wgpu.errors import ClusterError, DeviceError, OutOfMemoryError

GOOD = BlockResult(1.0, 4.0, 0, 0.5, nonce=7)
NAN = BlockResult(float("nan"), 4.0, 0, 0.5, nonce=7)


class Noted(Engine):
    """An engine of two workers, which keeps what it is told."""

    def __init__(self, answers, names="ab"):
        super().__init__(None, None, None, None, lambda text: None, fixed=False, patience=60.0)
        self.told, self.asked, self.delivered, self._answers = [], [], [], list(answers)
        self._members = self
        self.ready = [WorkerHandle(name, "", "", is_probed=True) for name in names]
        self.written = []
        for member in self.ready:
            self._scheduler.add(member.name)

    is_empty, opening, last_reason = False, (), ""

    async def call(self, member, method, asked, *given):
        if method == "write":
            self.written.append(member.name)
            return None
        self.asked.append(member.name)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def exclude(self, member, why):
        self.told.append((member.name, why))
        self._scheduler.remove(member.name)
        self.ready = [each for each in self.ready if each is not member]

    async def one(self, *, is_query=False):
        block = Block((), lambda asked, answer: answer)
        deliver = lambda block, answer: self.delivered.append(answer)  # noqa: E731
        async with asyncio.timeout(20):
            await self.compute("gradient", [block], [10], deliver, is_query=is_query)


def computed(*answers, names="ab", **how):
    """An engine that has computed one block, of which workers said these in turn."""

    async def done():
        engine = Noted(answers, names)
        await engine.one(**how)
        return engine

    return asyncio.run(done())


def test_a_finite_result_is_taken_at_once():
    engine = computed(GOOD)
    assert engine.delivered == [GOOD] and engine.asked == ["a"] and not engine.told


def test_a_result_that_is_not_finite_is_computed_by_another_worker():
    engine = computed(NAN, GOOD)
    assert engine.delivered == [GOOD] and engine.asked == ["a", "b"]
    ((name, why),) = engine.told
    assert name == "a" and "worker b a finite one" in why


def test_what_two_workers_agree_on_is_the_models():
    engine = computed(NAN, NAN)
    assert engine.delivered == [NAN] and engine.asked == ["a", "b"] and not engine.told


def test_where_nobody_could_know_better_it_is_taken():
    engine = computed(NAN, NAN, names="a")
    assert engine.delivered == [NAN] and not engine.told


@pytest.mark.parametrize(("failure", "asked", "is_excluded", "written"), [
    (Gone(), "aa", False, ""), (OSError("x"), "ab", False, ""),
    (ClusterError("x"), "aa", False, "a"),
    (DeviceError("x"), "ab", True, ""), (WrongAnswerError("x"), "ab", True, ""),
    (ValueError("x"), "ab", True, ""),
])  # fmt: skip
def test_what_goes_wrong_is_the_workers_end_or_none(failure, asked, is_excluded, written):
    """What a cluster's own errors say of is no fault of the worker that hears of it."""

    async def done():
        engine = Noted([failure, GOOD])
        engine._version = 3
        for member in engine.ready:
            member.version = 3
        await engine.one()
        return engine

    engine = asyncio.run(done())
    assert "".join(engine.asked) == asked and engine.delivered == [GOOD]
    assert bool(engine.told) == is_excluded and "".join(engine.written) == written
    assert (engine._scheduler.silent(0.0) == ["a"]) == isinstance(failure, OSError)


def test_a_question_goes_to_another_where_one_has_no_room():
    engine = computed(OutOfMemoryError("no room"), GOOD, is_query=True)
    assert engine.delivered == [GOOD] and engine.asked == ["a", "b"] and not engine.told
    with pytest.raises(OutOfMemoryError, match="none"):
        computed(*[OutOfMemoryError("none")] * 3, is_query=True)


def test_a_worker_without_room_leaves_all_of_them_to_another():
    class Full(Noted):
        async def call(self, member, method, asked, *given):
            self.asked.append(member.name)
            if member.name == "a":
                raise OutOfMemoryError("no room")
            await asyncio.sleep(0.01)
            return GOOD

    async def done():
        engine, block = Full([]), Block((), lambda asked, answer: answer)
        deliver = lambda block, answer: engine.delivered.append(block)  # noqa: E731
        async with asyncio.timeout(20):
            await engine.compute("complete", [block] * 3, [10] * 3, deliver, is_query=True)
        return engine

    engine = asyncio.run(done())
    assert sorted(engine.delivered) == [0, 1, 2] and not engine.told
    assert engine.asked.count("a") > 1  # with other prompts there could be room
