"""What becomes of a worker's answers and failures in a step, without a worker."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.cluster.blocks import Sums, WrongAnswerError
from qlora_wgpu.cluster.engine import Block, Steps
from qlora_wgpu.cluster.scheduler import Order
from qlora_wgpu.cluster.workers import Gone
from qlora_wgpu.errors import ClusterError, DeviceError

GOOD = Sums(1.0, 4.0, 0, 0.5, nonce=7)
NAN = Sums(float("nan"), 4.0, 0, 0.5, nonce=7)


class Noted:
    """Division, members and the like, which note what they are told."""

    def __init__(self, *, doubts=True, others=True, fails=None):
        self.told, self._doubts, self._others, self._fails = [], doubts, others, fails

    def __getattr__(self, name):
        def noted(*given):
            if name not in ("begun", "notify"):
                self.told.append((name, *(getattr(each, "name", each) for each in given)))

        return noted

    def doubt(self, order):
        return self._doubts

    def is_left_to_others(self, number):
        return self._others

    async def give(self, member):
        return 3

    async def call(self, member, method, asked, *given):
        if self._fails is not None:
            raise self._fails
        return GOOD


def steps_of(**how):
    noted = Noted(**how)
    return Steps(*[noted] * 6), noted


def member(name):
    return SimpleNamespace(name=name, version=3)


def taken(steps, *results):
    delivered = []
    for name, sums in results:
        order = Order(1, 1, name, 5)
        steps._take(order, member(name), sums, lambda number, sums: delivered.append(sums))
    return delivered


def test_a_finite_result_is_taken_at_once():
    steps, noted = steps_of()
    assert taken(steps, ("a", GOOD)) == [GOOD] and not noted.told


def test_a_result_that_is_not_finite_is_computed_by_another_worker():
    steps, noted = steps_of()
    assert taken(steps, ("a", NAN)) == [] and 5 in steps._doubtful
    assert taken(steps, ("b", GOOD)) == [GOOD] and not steps._doubtful
    ((name, worker, why),) = noted.told
    assert (name, worker) == ("leave_out", "a") and "where worker b did not" in why


def test_what_two_workers_agree_on_is_the_models():
    steps, noted = steps_of()
    assert taken(steps, ("a", NAN), ("b", NAN)) == [NAN] and not noted.told


def test_where_nobody_could_know_better_it_is_taken():
    steps, _ = steps_of(doubts=False)
    assert taken(steps, ("a", NAN)) == [NAN]
    steps, noted = steps_of(others=True)
    delivered = []
    taken(steps, ("a", NAN))
    steps._settle(lambda *given: delivered.append(given))
    assert not delivered and 5 in steps._doubtful
    noted._others = False
    steps._settle(lambda *given: delivered.append(given))
    assert delivered == [(5, NAN)] and noted.told == [("settle", 5)] and not steps._doubtful


@pytest.mark.parametrize(("failure", "told", "keeps"), [
    (Gone(), ["failed"], True), (OSError("x"), ["failed", "suspect"], True),
    (ClusterError("x"), ["failed"], False), (DeviceError("x"), ["failed", "leave_out"], False),
    (WrongAnswerError("x"), ["failed", "leave_out"], False),
    (ValueError("x"), ["failed", "leave_out"], True),
])  # fmt: skip
def test_what_goes_wrong_is_the_workers_end_or_none(failure, told, keeps):
    """What a cluster's own errors say of is no fault of the worker that hears of it."""
    steps, noted = steps_of(fails=failure)
    own, block = member("a"), Block((), SimpleNamespace(check=lambda asked, sums: sums))
    asyncio.run(steps._send(own, Order(1, 1, "a", 5), "gradient", block))
    assert [name for name, *_ in noted.told] == told and (own.version == 3) == keeps
    assert not steps._results


def test_an_answer_that_is_of_the_form_waits_for_the_step():
    steps, noted = steps_of()
    block = Block((np.zeros(1),), SimpleNamespace(check=lambda asked, sums: (asked.version, sums)))
    asyncio.run(steps._send(member("a"), Order(1, 1, "a", 5), "gradient", block))
    ((order, own, (version, sums)),) = steps._results
    assert (order.block, own.name, version, sums) == (5, "a", 3, GOOD) and not noted.told
