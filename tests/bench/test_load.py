"""What is timed is timed at a GPU's full clock, which only rises under load; time is made up."""

from types import SimpleNamespace

import numpy as np
import pytest
from bench.fakes import CONFIG, fake_device
from support.clocked_gpu import REST, ClockedGpu, kernel

from qlora_wgpu.bench import measure, roofline, timing
from qlora_wgpu.bench.roofline import measure_gaps
from qlora_wgpu.bench.timing import DispatchTimer, Load, best_of, clock_of, time_steps, total_steps
from qlora_wgpu.gpu.device import Device


@pytest.fixture
def gpu(monkeypatch):
    made = ClockedGpu()
    in_its_time(monkeypatch, made)
    return made


def in_its_time(monkeypatch, gpu):
    for module in (timing, timing, roofline, timing, measure):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: gpu.now))


def test_a_gpu_at_rest_is_slow_and_pieces_that_are_waited_for_leave_it_so(gpu):
    timer = DispatchTimer(gpu)
    for _ in range(1000):
        seconds = timer.rough_seconds(kernel(4e-5))
    assert seconds == pytest.approx(4e-5 / REST, rel=1e-3)


def test_the_clock_is_raised_in_bounded_time_by_bounded_submits(gpu):
    Load(gpu).raise_clock()
    assert gpu.clock == 1.0
    assert 0.5 < gpu.now < 1.5 and max(gpu.submits) < 0.03


@pytest.mark.parametrize("limit", [0.02, 1.0])
def test_busy_work_is_as_short_as_the_driver_wants_it(gpu, limit):
    """A tenth of what a submit may take, and 5 ms at most."""
    gpu.pace.limit = limit
    load = Load(gpu)
    for _ in range(200):
        load.run()
    assert max(gpu.submits[-4:]) == pytest.approx(min(limit / 10, 0.005), rel=0.2)


def test_a_clock_that_is_up_is_known_at_once(gpu):
    Load(gpu).raise_clock()
    before = gpu.now
    Load(gpu).raise_clock()
    assert gpu.now - before < 0.1
    gpu.wait(5.0)
    Load(gpu).raise_clock()
    assert gpu.clock > 0.97


def test_a_hot_gpu_is_waited_for_no_longer_than_it_takes(monkeypatch):
    """It does not reach the clock that it once had."""
    gpu = ClockedGpu(lambda now: 1.0 if now < 2.0 else 0.7)
    in_its_time(monkeypatch, gpu)
    Load(gpu).raise_clock()
    gpu.wait(5.0)
    before = gpu.now
    Load(gpu).raise_clock()
    assert gpu.clock == 0.7 and gpu.now - before < 1.5
    warm = Load(gpu)
    warm.raise_clock()
    assert warm.clock() == pytest.approx(0.7, rel=0.02)


def test_a_clock_that_never_settles_is_not_waited_for(monkeypatch):
    gpu = ClockedGpu(lambda now: 1.0 + now)
    in_its_time(monkeypatch, gpu)
    Load(gpu).raise_clock()
    assert 1.9 < gpu.now < 2.1


def test_the_work_is_done_on_a_device(device, monkeypatch):
    monkeypatch.setattr(Device, "is_cpu", False)
    monkeypatch.setattr(device.pace, "busy_rate", 0.0)
    before = device.memory.total
    own = Load(device)
    assert own.run() == device.pace.busy_rate > 0.0
    nbytes = 4 * timing._GROUPS * timing._GROUP
    # Each of 24 numbers became x / 2 + 1 so often that it is 2.
    assert set(np.frombuffer(device.read(own._sums, nbytes), np.float32)) == {48.0}
    assert device.memory.total == before


def test_a_software_gpu_gets_no_busy_work(monkeypatch):
    monkeypatch.setattr(timing, "time", None)
    own = Load(fake_device())  # which has nothing that work could be submitted to
    own.raise_clock()
    assert (own.run(), own.clock()) == (0.0, 1.0)


@pytest.mark.parametrize("count", [1, 30, 3000])
def test_launches_are_timed_at_the_full_clock(gpu, count):
    gpu.wait(10.0)
    seconds = [1e-5 * (1 + index % 7) for index in range(count)]
    found = best_of([[kernel(each)] for each in seconds], DispatchTimer(gpu), 3)
    assert found == pytest.approx(seconds, rel=0.02, abs=2e-9)


def test_passes_that_overlap_count_no_moment_twice(gpu):
    gpu.early = 1e-3
    seconds = [4e-3, 2e-3, 3e-3]
    found = best_of([[kernel(each)] for each in seconds], DispatchTimer(gpu), 2)
    assert found == pytest.approx(seconds, rel=0.01)


def test_long_launches_share_no_submit_beyond_the_driver_s_time(gpu):
    best_of([[kernel(0.04)] for _ in range(6)], DispatchTimer(gpu), 4)
    own = [seconds for seconds in gpu.submits if seconds > 0.03]
    # One by one at first, where a launch takes longer by itself while the GPU is at rest.
    assert own[0] > 0.1 > 1.01 * max(own[1:])
    assert own[-3:] == pytest.approx([0.08] * 3, rel=0.02)


def test_the_same_by_the_host_s_clock(monkeypatch):
    gpu = ClockedGpu(features=frozenset())
    in_its_time(monkeypatch, gpu)
    gpu.wait(10.0)
    clock = clock_of(gpu, gpu.buffer(16, "timing"))
    assert clock(kernel(0.02)) == pytest.approx(0.02, rel=0.03)


def test_gaps_are_those_of_a_gpu_at_work(gpu, monkeypatch):
    monkeypatch.setattr(roofline, "_writes_one_word", lambda *given: kernel(2e-6))
    gpu.wait(10.0)
    found = measure_gaps(gpu)
    assert found.dispatch == pytest.approx(2e-6, rel=0.02)
    assert found.timed == pytest.approx(2e-6, rel=0.02)


STEP = 0.02


class Model:
    """Its steps take as long as they take."""

    def __init__(self, gpu):
        self.device = gpu
        self.architecture = SimpleNamespace(text_vocab_size=83)
        self.zero_gradient = self.zero_stats = lambda: None

    def checked(self, ids, targets):
        return ids, targets

    def accumulate(self, ids, targets):
        self.device.dispatch(*kernel(STEP))

    def read_stats(self):
        self.device.read(self.device.buffer(16, "stats"), 4)
        return np.ones(16)


def test_steps_that_count_run_at_the_full_clock(gpu):
    gpu.wait(10.0)
    numbers, done = [], []
    optimizer = SimpleNamespace(step=numbers.append)
    times = time_steps(Model(gpu), optimizer, 1, 8, 5, progress=lambda: done.append(1))
    assert numbers == list(range(1, total_steps(5) + 1)) and len(done) == len(numbers)
    assert times.first_step_seconds > 3 * STEP  # as a user sees it
    assert times.loss == 1.0 / 7  # of each of the 7 tokens that have a next one
    seconds = times.step_seconds
    assert (seconds.least, seconds.most) == pytest.approx((STEP, STEP), rel=0.05)


def test_a_machine_s_speed_is_that_of_the_full_clock(gpu, monkeypatch):
    model = Model(gpu)
    monkeypatch.setattr(measure.QLoRAModel, "from_folder", lambda *given, **named: model)
    monkeypatch.setattr(
        measure, "Optimizer", lambda *given: SimpleNamespace(step=lambda number: gpu.wait(0.01))
    )
    gpu.wait(10.0)
    assert measure._step_seconds(CONFIG, gpu) == pytest.approx(STEP, rel=0.05)
