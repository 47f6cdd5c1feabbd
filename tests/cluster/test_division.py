"""Which worker gets which block, with a clock that is turned by hand."""

import itertools

import pytest

from qlora_wgpu.cluster.scheduler import Division

COST = {"gradient": 1.0, "loss": 0.2}


class Simulation:
    """Workers that take so many seconds a token, and are late, gone or stopped as told."""

    def __init__(self, division, paces):
        self.division, self.paces, self.now = division, dict(paces), 0.0
        self.free = dict.fromkeys(paces, 0.0)
        self.coming = []  # (when, order, seconds)
        self.given = []
        self.stopped = set()
        for name in paces:
            division.add(name)

    def step(self, sizes, limit=10_000.0, kind="gradient"):
        """Does a step; the time that it took."""
        self.division.begin(sizes, kind)
        began = self.now
        while not self.division.is_complete:
            for order in self.division.next(self.now):
                self.send(order, sizes[order.block] * COST[kind])
            self.coming.sort(key=lambda item: item[0])
            at = self.coming[0][0] if self.coming else float("inf")
            if at <= self.now + 0.2:
                self.now = max(self.now, at)
                _, order, seconds = self.coming.pop(0)
                self.division.done(order, self.now, seconds)
            else:
                self.now += 0.2
            assert self.now - began < limit, "it hangs"
        return self.now - began

    def send(self, order, size):
        self.given.append(order)
        self.division.begun(order, self.now)
        if order.worker in self.stopped:
            return
        seconds = size * self.paces[order.worker]
        end = max(self.now, self.free[order.worker]) + seconds
        self.free[order.worker] = end
        self.coming.append((end, order, seconds))

    def blocks_of(self, name):
        return [order.block for order in self.given if order.worker == name]


def test_a_worker_gets_blocks_by_its_speed():
    sim = Simulation(Division(), {"fast": 0.001, "slow": 0.004})
    for _ in range(4):
        sim.step([1000] * 20)
    sim.given.clear()
    seconds = sim.step([1000] * 20)
    assert len(sim.blocks_of("fast")) == 16 and len(sim.blocks_of("slow")) == 4
    assert seconds == pytest.approx(16.0, abs=0.5)


def test_no_slow_worker_is_waited_for_at_the_end_of_a_step():
    sim = Simulation(Division(), {"fast": 0.001, "slow": 0.1})
    for _ in range(3):
        sim.step([1000] * 4)
    sim.given.clear()
    assert sim.step([1000] * 4) == pytest.approx(4.0, abs=0.5)
    assert sim.blocks_of("slow") == []


def test_one_that_was_slow_is_tried_again():
    sim = Simulation(Division(), {"a": 0.001, "b": 0.1})
    for _ in range(3):
        sim.step([1000] * 4)
    sim.paces["b"] = 0.001
    for _ in range(120):
        sim.step([1000] * 4)
    sim.given.clear()
    sim.step([1000] * 4)
    assert len(sim.blocks_of("b")) == 2


@pytest.mark.parametrize("names", [["a", "b", "c"], ["2", "10", "1"]])
def test_fixed_takes_turns_by_name(names):
    sim = Simulation(Division(fixed=True), dict(zip(names, (0.001, 0.002, 0.004), strict=True)))
    for _ in range(3):
        sim.given.clear()
        sim.step([1000] * 7)
    first, second, third = sorted(names, key=lambda n: int(n) if n.isdigit() else n)
    assert sim.blocks_of(first) == [0, 3, 6]
    assert sim.blocks_of(second) == [1, 4]
    assert sim.blocks_of(third) == [2, 5]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_stopped_worker_is_not_waited_for(fixed):
    sim = Simulation(Division(fixed=fixed), {"a": 0.001, "b": 0.001})
    for _ in range(3):
        sim.step([1000] * 6)
    sim.stopped.add("b")
    assert sim.step([1000] * 6) < 2 * 6 + 2  # twice a block's second, and then the other's time
    assert sim.division.suspects == ["b"]
    sim.given.clear()
    sim.step([1000] * 6)
    assert sim.blocks_of("b") == []
    sim.stopped.clear()
    sim.division.answered("b")
    sim.given.clear()
    sim.step([1000] * 6)
    assert sim.blocks_of("b")


def test_the_first_result_counts_and_a_late_one_clears_its_worker():
    division = Division()
    division.add("a")
    division.begin([10])
    (first,) = division.next(0.0)
    division.add("b")
    division.suspect("a")
    (second,) = division.next(0.0)
    assert (first.worker, second.worker, second.block) == ("a", "b", 0)
    assert division.done(second, 1.0, 1.0) and division.is_complete
    assert not division.done(first, 2.0, 2.0)
    assert division.suspects == []


def test_a_result_of_a_step_that_is_over_does_not_count():
    division = Division()
    division.add("a")
    division.begin([10])
    (late,) = division.next(0.0)
    division.begin([10])
    assert not division.done(late, 1.0, 1.0)
    assert not division.is_complete


def test_blocks_of_a_worker_that_is_gone_go_to_others_in_order():
    division = Division(queued=1)
    for name in ("a", "b"):
        division.add(name)
    division.begin([10] * 4)
    given = division.next(0.0)
    assert len(given) == 4
    lost = sorted(order.block for order in given if order.worker == "a")
    division.remove("a")
    for order in given:
        if order.worker == "b":
            division.done(order, 1.0, 1.0)
    assert [order.block for order in division.next(1.0)] == lost


def test_a_result_that_is_not_believed_is_computed_by_another_worker():
    division = Division()
    for name in ("a", "b"):
        division.add(name)
    division.begin([10])
    (first,) = division.next(0.0)
    assert division.done(first, 1.0, 1.0)
    assert division.doubt(first)
    (second,) = division.next(1.0)
    assert second.worker != first.worker and second.block == first.block
    division.done(second, 2.0, 1.0)
    assert not division.doubt(second)  # nobody is left to tell


def test_results_that_wait_for_their_turn_are_bounded():
    division = Division(window=2)
    for name in ("a", "b"):
        division.add(name)
    division.begin([10] * 100)
    held = None
    for turn in itertools.count():
        orders = division.next(float(turn) / 100)
        for order in orders:
            if order.block == 0:
                held = order
            else:
                division.done(order, turn / 100, 0.01)
        if not orders:
            break
    assert held is not None
    assert max(division._step.finished) < 2 * 2


def test_an_idle_worker_computes_what_another_may_be_stuck_with():
    division = Division()
    for name in ("a", "b"):
        division.add(name)
    division.begin([10, 10])
    first, second = division.next(0.0)
    for order in (first, second):
        division.begun(order, 0.0)
        division.done(order, 1.0, 1.0)
    division.begin([99, 99])  # a size that is new to both
    first, second = division.next(1.0)
    for order in (first, second):
        division.begun(order, 1.0)
    assert division.done(first, 2.0, 9.9)
    assert division.next(15.0) == []
    (copy,) = division.next(21.0)
    assert (copy.worker, copy.block) == (first.worker, second.block)
    assert division.suspects == []  # it may be compiling
    assert division.next(22.0) == []
    assert division.done(copy, 23.0, 2.0) and division.is_complete


def compiling(*names):
    """Workers that have done blocks, to whom the next one seems new: it may take them long."""
    sim = Simulation(Division(), dict.fromkeys(names, 0.001))
    sim.step([1000] * 2 * len(names))
    for record in sim.division._crew.records.values():
        record.speeds["gradient"].known.clear()
    sim.division.begin([1000])
    return sim


def test_a_copy_that_is_stuck_is_copied_once_more():
    sim = compiling("a", "b", "c")
    workers = []
    for seconds in (0.0, 5.0, 10.0):
        (order,) = sim.division.next(sim.now + seconds)
        sim.division.begun(order, sim.now + seconds)
        workers.append(order.worker)
        assert sim.division.next(sim.now + seconds + 0.5) == []
    assert sorted(workers) == ["a", "b", "c"]


def test_a_copy_goes_to_one_that_need_not_compile():
    for able in ("a", "b", "c"):
        sim = compiling("a", "b", "c")
        (order,) = sim.division.next(sim.now)
        if order.worker == able:
            continue
        sim.division.begun(order, sim.now)
        sim.division._crew.records[able].speeds["gradient"].known.add(1000)
        (copy,) = sim.division.next(sim.now + 5.0)
        assert copy.worker == able


def test_another_copy_goes_to_one_that_need_not_compile_and_a_third_where_that_is_late():
    division = Division(queued=0)
    for name in ("a", "b", "c"):
        division.add(name)
    for sizes in ([10] * 3, [99] * 2):  # c alone never computes the second size
        division.begin(sizes)
        for order in division.next(0.0):
            division.begun(order, 0.0)
            division.done(order, 0.1, 0.1)
    division.remove("b")
    division.add("b")  # it has come anew, and knows nothing
    division.begin([99])
    (order,) = division.next(1.0)
    division.begun(order, 1.0)
    copies = []
    for tick in range(5, 15):
        for copy in division.next(float(tick)):
            division.begun(copy, float(tick))
            copies.append(copy.worker)
    assert sorted([order.worker, *copies]) == ["a", "b", "c"]


def test_a_first_block_may_take_long_and_a_later_one_may_not():
    division = Division()
    division.add("a")
    division.begin([1000])
    (order,) = division.next(0.0)
    division.begun(order, 0.0)
    division.next(50.0)
    assert not division.suspects  # nothing is known of anybody
    division.done(order, 50.0, 1.0)
    division.begin([1000])
    (order,) = division.next(50.0)
    division.begun(order, 50.0)
    division.next(51.9)
    assert not division.suspects
    division.next(52.1)
    assert division.suspects == ["a"]


def test_what_a_worker_compiled_for_says_nothing_of_its_speed():
    division = Division(queued=0)
    for name in ("a", "b"):
        division.add(name)
    now, given = 0.0, {}
    for seconds in ({"a": 30.0, "b": 3.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}):
        division.begin([10, 10])
        orders = division.next(now)
        given = {order.worker: order for order in orders}
        assert sorted(given) == ["a", "b"]  # one that compiled long gets its part
        for order in sorted(orders, key=lambda order: seconds[order.worker]):
            division.begun(order, now)
            division.done(order, now + seconds[order.worker], seconds[order.worker])
        now += max(seconds.values())
    for work in division.work().values():
        assert (work.tokens, work.timed_tokens, work.seconds) == (30, 20, pytest.approx(2.0))


def test_an_evaluation_says_nothing_of_a_step():
    sim = Simulation(Division(), {"a": 0.01, "b": 0.01})
    for _ in range(3):
        sim.step([1000] * 4)
    for _ in range(3):
        assert sim.step([1000] * 8, kind="loss") < 20
    sim.given.clear()
    assert sim.step([1000] * 4) == pytest.approx(20.0, abs=0.5)
    assert sim.division.suspects == []
    assert len(sim.given) == 4  # nothing was computed twice


def test_a_worker_whose_results_come_too_late_has_a_speed_and_no_share():
    sim = Simulation(Division(), {"a": 0.001, "b": 0.001})
    for _ in range(3):
        sim.step([1000] * 4)
    sim.division.work()
    sim.paces["b"] = 0.009
    sim.step([1000] * 4)
    while sim.coming:
        sim.step([1000] * 4)
    work = sim.division.work()["b"]
    assert work.tokens < work.timed_tokens and work.seconds > 0
