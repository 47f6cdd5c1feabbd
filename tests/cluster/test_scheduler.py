"""Which worker gets which block, with a clock that is turned by hand."""

from random import Random

import pytest

from qlora_wgpu.cluster.scheduler import Scheduler

COST = {"gradient": 1.0, "loss": 0.2}


class Simulation:
    """Workers that take so many seconds a token, and are late, gone or stopped as told."""

    def __init__(self, paces, **how):
        self.scheduler, self.paces, self.now = Scheduler(**how), dict(paces), 0.0
        self.free = dict.fromkeys(paces, 0.0)
        self.coming = []  # (when, order, seconds)
        self.given = []
        self.stopped = set()
        for name in paces:
            self.scheduler.add(name)

    def step(self, sizes, limit=10_000.0, kind="gradient"):
        """Does a step; the time that it took."""
        self.scheduler.begin(sizes, kind)
        self.given.clear()
        began = self.now
        while not self.scheduler.is_complete:
            for order in self.scheduler.next(self.now):
                self.send(order, sizes[order.block] * COST[kind])
            self.coming.sort(key=lambda item: item[0])
            at = self.coming[0][0] if self.coming else float("inf")
            if at <= self.now + 0.2:
                self.now = max(self.now, at)
                _, order, seconds = self.coming.pop(0)
                self.scheduler.done(order, self.now, seconds)
            else:
                self.now += 0.2
            assert self.now - began < limit, "it hangs"
        return self.now - began

    def send(self, order, size):
        self.given.append(order)
        if order.worker in self.stopped:
            return
        seconds = size * self.paces[order.worker]
        end = max(self.now, self.free[order.worker]) + seconds
        self.free[order.worker] = end
        self.coming.append((end, order, seconds))

    def blocks_of(self, name):
        return [order.block for order in self.given if order.worker == name]


def after(*steps, names="ab", **how):
    """A scheduler whose workers have each computed blocks of such sizes, a second for each."""
    scheduler = Scheduler(**how)
    for name in names:
        scheduler.add(name)
    for now, size in enumerate(steps):
        scheduler.begin([size] * len(names))
        for order in scheduler.next(float(now)):
            scheduler.done(order, now + 1.0, 1.0)
    return scheduler


@pytest.mark.slow
def test_a_worker_gets_blocks_by_its_speed():
    sim = Simulation({"fast": 0.001, "slow": 0.004})
    for _ in range(5):
        seconds = sim.step([1000] * 20)
    assert seconds == pytest.approx(16.0, abs=0.5)
    assert len(sim.blocks_of("fast")) == 16 and len(sim.blocks_of("slow")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("uptime", [0.0, 7e4, 3e7])
def test_no_block_is_left_when_all_workers_are_free(count, uptime):
    """The clock's seconds are many, and a block takes few of them."""
    random = Random(count)
    for _ in range(60):
        scheduler, now = Scheduler(), uptime + random.random()
        for name in range(count):
            scheduler.add(str(name))
        for _ in range(2):  # the first compiles
            seconds = 10 ** random.uniform(-4, 2)
            scheduler.begin([10] * count)
            for order in scheduler.next(now):
                scheduler.done(order, now + seconds, seconds)
            now += 2 * seconds
        scheduler.begin([10] * 9)
        while not scheduler.is_complete:
            orders = scheduler.next(now)
            assert orders
            for order in orders:
                scheduler.done(order, now + seconds, seconds)
            now += seconds


def test_no_slow_worker_is_waited_for_at_the_end_of_a_step():
    sim = Simulation({"fast": 0.001, "slow": 0.1})
    for _ in range(4):
        seconds = sim.step([1000] * 4)
    assert seconds == pytest.approx(4.0, abs=0.5)
    assert sim.blocks_of("slow") == []  # it computes what is an older step's by now


@pytest.mark.slow
def test_one_that_was_slow_has_its_share_once_it_is_not():
    sim = Simulation({"a": 0.001, "b": 0.1})
    for _ in range(3):
        sim.step([1000] * 4)
    sim.paces["b"] = 0.001
    for _ in range(120):
        sim.step([1000] * 4)
    assert len(sim.blocks_of("b")) == 2


def test_the_last_blocks_wait_nowhere():
    scheduler = after(10, 10)
    scheduler.begin([10] * 5)
    assert [(o.worker, o.block) for o in scheduler.next(2.0)] == [("a", 0), ("b", 1)]
    assert scheduler.next(2.4) == []  # the next one is sent when half of the first remains
    assert [(o.worker, o.block) for o in scheduler.next(2.5)] == [("a", 2)]
    assert scheduler.next(2.6) == []


@pytest.mark.parametrize("names", [["a", "b", "c"], ["2", "10", "1"]])
def test_fixed_takes_turns_by_name(names):
    sim = Simulation(dict(zip(names, (0.001, 0.002, 0.004), strict=True)), fixed=True)
    for _ in range(3):
        sim.step([1000] * 7)
    first, second, third = sorted(names, key=lambda n: int(n) if n.isdigit() else n)
    assert sim.blocks_of(first) == [0, 3, 6]
    assert sim.blocks_of(second) == [1, 4]
    assert sim.blocks_of(third) == [2, 5]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_stopped_worker_is_not_waited_for(fixed):
    sim = Simulation({"a": 0.001, "b": 0.001}, fixed=fixed)
    for _ in range(3):
        sim.step([1000] * 6)
    sim.stopped.add("b")
    assert sim.step([1000] * 6) < 2 * 6 + 2  # twice a block's second, and then the other's time
    assert sim.scheduler.silent(sim.now) == ["b"]
    sim.step([1000] * 6)
    assert sim.blocks_of("b") == []
    sim.stopped.clear()
    sim.scheduler.resume("b")
    sim.step([1000] * 6)
    assert sim.blocks_of("b")


def test_the_first_result_counts_and_a_late_one_clears_its_worker():
    scheduler = after(names="a")
    scheduler.begin([10])
    (first,) = scheduler.next(0.0)
    scheduler.add("b")
    scheduler.pause("a")
    (second,) = scheduler.next(0.0)
    assert (first.worker, second.worker, second.block) == ("a", "b", 0)
    assert scheduler.done(second, 1.0, 1.0) and scheduler.is_complete
    assert scheduler.silent(1.0) == ["a"]
    assert not scheduler.done(first, 2.0, 2.0)
    assert scheduler.silent(2.0) == []


def test_a_result_of_a_step_that_is_over_does_not_count():
    scheduler = after(names="a")
    scheduler.begin([10])
    (late,) = scheduler.next(0.0)
    scheduler.begin([10])
    assert not scheduler.done(late, 1.0, 1.0)
    assert not scheduler.is_complete


def test_blocks_of_a_worker_that_is_gone_go_to_others_in_order():
    scheduler = after(fixed=True)
    scheduler.begin([10] * 4)
    given = scheduler.next(0.0)
    assert len(given) == 4
    lost = sorted(order.block for order in given if order.worker == "a")
    scheduler.remove("a")
    for order in given:
        if order.worker == "b":
            scheduler.done(order, 1.0, 1.0)
    assert [order.block for order in scheduler.next(1.0)] == lost


def test_a_block_that_has_failed_is_given_again():
    scheduler = after(names="a")
    scheduler.begin([10])
    (order,) = scheduler.next(0.0)
    scheduler.failed(order)
    (again,) = scheduler.next(0.5)
    assert again.block == order.block and again != order


def test_a_result_that_is_not_believed_is_computed_by_another_worker_if_there_is_one():
    scheduler = after(10)
    scheduler.begin([10])
    (first,) = scheduler.next(1.0)
    scheduler.add("c")
    assert scheduler.done(first, 2.0, 1.0)
    scheduler.reject(first)
    scheduler.remove("c")
    assert not scheduler.is_complete
    (second,) = scheduler.next(2.0)
    assert second.worker != first.worker and second.block == first.block
    scheduler.failed(second)
    scheduler.remove(second.worker)
    (third,) = scheduler.next(2.0)
    assert (third.worker, third.block) == (first.worker, first.block)


def test_results_that_wait_for_their_turn_are_bounded():
    scheduler = after(window=2)
    scheduler.begin([10] * 100)
    done = []
    for turn in range(100):
        for order in scheduler.next(turn / 100):
            if order.block != 0:
                scheduler.done(order, turn / 100, 0.01)
                done.append(order.block)
    assert done == [1, 2, 3]


def test_an_idle_worker_computes_what_another_may_be_stuck_with():
    scheduler = after(10, 10)
    scheduler.begin([99, 99])  # a size that is new to both
    first, second = scheduler.next(2.0)
    assert scheduler.done(first, 3.0, 0.5)
    assert scheduler.next(21.0) == []
    (copy,) = scheduler.next(22.0)
    assert (copy.worker, copy.block) == (first.worker, second.block)
    assert scheduler.silent(23.0) == []  # it may be compiling
    assert scheduler.next(23.0) == []
    assert scheduler.done(copy, 24.0, 2.0) and scheduler.is_complete


def test_a_block_is_computed_anew_only_where_that_is_sooner():
    sim = Simulation({"fast": 0.001, "slow": 0.002})
    for _ in range(3):
        sim.step([1000] * 3)
    assert len(sim.given) == 3
    sim.paces["slow"] = 0.01
    for _ in range(4):
        seconds = sim.step([1000] * 3)
    assert seconds == pytest.approx(3.0, abs=0.5)


def test_a_copy_that_is_stuck_is_copied_once_more():
    scheduler = after(10, 10, names="abc")
    scheduler.begin([99])
    workers = []
    for seconds in (0.0, 20.0, 40.0):  # a block is late after twice 9.9 s
        (order,) = scheduler.next(2.0 + seconds)
        workers.append(order.worker)
        assert scheduler.next(2.5 + seconds) == []
    assert sorted(workers) == ["a", "b", "c"]


@pytest.mark.parametrize("able", ["b", "c"])
def test_a_copy_goes_to_one_that_need_not_compile(able):
    scheduler = after(10, 10, names="abc")
    (other,) = {"b", "c"} - {able}
    scheduler.remove(other)
    scheduler.begin([20, 20])
    for order in scheduler.next(2.0):
        scheduler.done(order, 4.0, 2.0)
    scheduler.add(other)
    scheduler.begin([20])
    (order,) = scheduler.next(4.0)
    assert order.worker == "a"
    (copy,) = scheduler.next(8.0)
    assert copy.worker == able


def test_a_first_block_may_take_long_and_a_later_one_may_not():
    scheduler = after(names="a")
    scheduler.begin([1000])
    (order,) = scheduler.next(0.0)
    assert not scheduler.silent(50.0)  # nothing is known of anybody
    scheduler.done(order, 50.0, 1.0)
    for begun, done in ((50.0, 51.0), (51.0, None)):
        scheduler.begin([1000])
        (order,) = scheduler.next(begun)
        if done is not None:
            scheduler.done(order, done, 1.0)
    assert not scheduler.silent(52.9)
    assert scheduler.silent(53.1) == ["a"]


def test_what_a_worker_compiled_for_says_nothing_of_its_speed():
    scheduler, now = after(), 0.0
    for seconds in ({"a": 30.0, "b": 3.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}):
        scheduler.begin([10, 10])
        orders = scheduler.next(now)
        assert sorted(order.worker for order in orders) == ["a", "b"]  # it gets its part
        for order in sorted(orders, key=lambda order: seconds[order.worker]):
            scheduler.done(order, now + seconds[order.worker], seconds[order.worker])
        now += max(seconds.values())
    for each in scheduler.worker_metrics(now):
        assert (each.tokens, each.timed_tokens, each.seconds) == (30, 20, pytest.approx(2.0))
    assert [each.tokens for each in scheduler.worker_metrics(now)] == [0, 0]


def test_an_evaluation_says_nothing_of_a_step():
    sim = Simulation({"a": 0.01, "b": 0.01})
    for _ in range(3):
        sim.step([1000] * 4)
    tokens = [each.tokens for each in sim.scheduler.worker_metrics(sim.now)]
    for _ in range(3):
        assert sim.step([1000] * 8, kind="loss") < 20
    assert tokens == [6000, 6000]
    assert [each.tokens for each in sim.scheduler.worker_metrics(sim.now)] == [0, 0]
    assert sim.step([1000] * 4) == pytest.approx(20.0, abs=0.5)
    assert sim.scheduler.silent(sim.now) == []
    assert len(sim.given) == 4  # nothing was computed twice


def test_a_worker_whose_results_come_too_late_has_a_speed_and_no_share():
    sim = Simulation({"a": 0.001, "b": 0.001})
    for _ in range(3):
        sim.step([1000] * 4)
    sim.scheduler.worker_metrics(sim.now)
    sim.paces["b"] = 0.009
    sim.step([1000] * 4)
    while sim.coming:
        sim.step([1000] * 4)
    _, late = sim.scheduler.worker_metrics(sim.now)
    assert late.tokens < late.timed_tokens and late.seconds > 0


def test_a_rejected_block_is_left_to_a_slower_worker():
    sim = Simulation({"fast": 0.001, "slow": 0.1})
    for _ in range(5):
        sim.step([1000])
    sim.scheduler.begin([1000])
    (first,) = sim.scheduler.next(sim.now + 1000.0)
    assert first.worker == "fast"
    assert sim.scheduler.done(first, sim.now + 1001.0, 1.0)
    sim.scheduler.resume("slow")
    sim.scheduler.reject(first)
    assert [order.worker for order in sim.scheduler.next(sim.now + 1001.0)] == ["slow"]


@pytest.mark.slow
def test_a_fast_worker_is_not_stalled_by_a_slow_ones_second_block():
    sim = Simulation({"fast": 0.001, "slow": 0.006}, window=2)
    for _ in range(5):
        seconds = sim.step([1000] * 50)
    assert seconds < 50.5 and len(sim.given) == 50
