"""How peak rates are measured, on a device that only notes what it is asked for."""

import math
import zlib
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench.fakes import fake_device

from qlora_wgpu.bench import report, roofline, timing
from qlora_wgpu.bench.workload import RandomFolder, RandomWeight
from qlora_wgpu.errors import DeviceError, OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.wgsl import load_shader
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.quant.nf4 import nf4_format

MIB = 1 << 20


class Noting:
    """A device whose clock says how long so many turns, or bytes, take."""

    def __init__(self, monkeypatch, seconds, **changes):
        self.made, self.gone, self.params, self.windows = [], [], [], []
        self.groups, self.shaders, self.timed = [], [], 0
        for name, value in vars(fake_device(**changes)).items():
            setattr(self, name, value)

        def clock(dispatch):
            self.groups.append(dispatch[2])
            self.timed += 1
            return seconds(self)

        monkeypatch.setattr(roofline, "clock_of", lambda device, waits_for: clock)

    @contextmanager
    def _uncounted(self):
        yield

    @property
    def memory(self):
        return SimpleNamespace(uncounted=self._uncounted)

    def buffer(self, nbytes, kind, label=""):
        self.made.append(nbytes)
        return SimpleNamespace(destroy=lambda: self.gone.append(nbytes))

    texture = buffer

    def pipeline(self, shader):
        self.shaders.append(shader)

    def bind_group(self, shader, windows):
        self.windows.append({name: window[1:] for name, window in windows.items()})

    def write(self, params, data):
        self.params.append(np.frombuffer(data, np.uint32).tolist())


def turns_of(device):
    return device.params[-1][0]


@pytest.mark.parametrize(("seconds", "tried", "best"), [
    (lambda turns: 0.02, [4], 0.02),
    (lambda turns: 0.0199 if turns < 5 else 1.0, [4, 16], 1.0),
    (lambda turns: turns * 1e-3, [4, 16, 64], 0.064),
    (lambda turns: 0.0, [4, 16, 64, 256, 1024, 4096, 16384, 32768], 1e-9),
])  # fmt: skip
def test_turns_grow_until_they_take_long_enough(monkeypatch, seconds, tried, best):
    device = Noting(monkeypatch, lambda own: seconds(turns_of(own)))
    shader = load_shader("bench/fma.wgsl")
    rate = roofline._turns_per_second(device, shader, 7, factor=0.5, summand=1.0)
    assert [each[0] for each in device.params] == tried
    assert rate == pytest.approx(tried[-1] / best)
    nbytes = 4 * 7 * math.prod(shader.workgroup_size)
    assert device.made == device.gone == [nbytes, 16] and set(device.groups) == {(7, 1, 1)}
    assert device.windows == [{"params": (0, 16), "sums": (0, nbytes)}]
    assert device.timed == len(tried) + roofline._ROUNDS
    numbers = np.array(device.params[-1], np.uint32).view(np.float32)
    assert {0.5, 1.0} <= set(numbers.tolist())


def test_the_best_of_all_timings_counts(monkeypatch):
    shader, more = load_shader("bench/fma.wgsl"), {"factor": 0.5, "summand": 1.0}
    times = iter([0.05, 0.04, 0.03, 0.06, 0.07, 0.08])
    device = Noting(monkeypatch, lambda own: next(times))
    assert roofline._turns_per_second(device, shader, 1, **more) == 4 / 0.03
    times = iter([0.02, 0.04, 0.03, 0.06, 0.07, 0.08])
    assert roofline._turns_per_second(device, shader, 1, **more) == 4 / 0.02


def test_rates_of_multiply_adds_and_matrix_units(monkeypatch):
    monkeypatch.setattr(roofline, "_turns_per_second", lambda device, shader, groups, **more: 3.0)
    device = fake_device(profile=GPU_PROFILE)
    # 8,192 workgroups of 32 invocations, with 192 multiply-adds in a turn
    assert roofline._fma_rate(device) == 2 * 8192 * 32 * 192 * 3.0
    assert roofline._matrix_rate(device) == 0.0
    units = replace(GPU_PROFILE, gemm_kind="matrix", matrix=(8, 16, 4, 32))
    for is_cpu, groups in ((True, 64), (False, 4096)):
        device = fake_device(profile=units, is_cpu=is_cpu)
        # 4 subgroups with 8 products in a turn
        assert roofline._matrix_rate(device) == 2 * (8 * 16 * 4) * 8 * 4 * groups * 3.0


@pytest.mark.parametrize("error", [DeviceError, OutOfMemoryError])
def test_matrix_units_that_fail_have_no_rate(monkeypatch, error):
    def fails(*given, **more):
        raise error("no")

    monkeypatch.setattr(roofline, "_turns_per_second", fails)
    device = fake_device(profile=gpu_profile(MatrixShape(8, 8, 8, 32)))
    if error is DeviceError:
        assert roofline._matrix_rate(device) == 0.0
        return
    with pytest.raises(OutOfMemoryError):
        roofline._matrix_rate(device)


@pytest.mark.parametrize(("is_cpu", "max_binding", "nbytes"), [
    (True, 1 << 40, 64 * MIB), (False, 1 << 40, 256 * MIB), (True, MIB, MIB), (False, MIB, MIB),
])  # fmt: skip
@pytest.mark.parametrize("texture", [False, True])
def test_the_rate_of_a_copy(monkeypatch, is_cpu, max_binding, nbytes, texture):
    times = iter([9.0, 0.5, 0.25, 1.0, 2.0, 3.0])  # the first one touches the pages
    profile = cpu_profile(8) if texture else CPU_PROFILE
    device = Noting(
        monkeypatch, lambda own: next(times), is_cpu=is_cpu, max_binding=max_binding,
        profile=profile,
    )  # fmt: skip
    assert roofline._copy_rate(device, texture=texture) == 2 * nbytes / 0.25
    assert device.made == device.gone == [nbytes, nbytes, 16]
    whole = (0, nbytes)
    assert device.windows == [{"params": (0, 16), "x": whole, "y": whole}]
    assert nbytes // 16 in device.params[0]
    of_one = profile.flat_group * profile.elements_per_thread
    assert math.prod(device.groups[0]) >= nbytes // 16 / of_one
    assert math.prod(device.groups[0]) < 2 * nbytes // 16 / of_one + 1


@pytest.mark.parametrize(("profile", "best"), [(CPU_PROFILE, 5.0), (cpu_profile(8), 7.0)])
def test_all_ceilings(monkeypatch, profile, best):
    rates = {False: 5.0, True: 7.0}
    monkeypatch.setattr(roofline, "_copy_rate", lambda device, *, texture: rates[texture])
    monkeypatch.setattr(roofline, "_fma_rate", lambda device: 2.0)
    monkeypatch.setattr(roofline, "_matrix_rate", lambda device: 3.0)
    device = Noting(monkeypatch, None, profile=profile)
    assert roofline.measure_ceilings(device) == roofline.Ceilings(2.0, best, 3.0)


def test_no_time_is_shorter_than_can_be(monkeypatch):
    assert roofline._best(lambda dispatch: 0.0, None) == 1e-9
    times = iter([5.0, 4.0, 3.0, 2.0, 6.0])
    assert roofline._best(lambda dispatch: next(times), None) == 2.0


def test_a_fill_of_one_word(monkeypatch):
    device = Noting(monkeypatch, None)
    _, _, groups = roofline._writes_one_word(device, "target", "params")
    assert groups == (1, 1, 1) and device.params[0][0] == 1
    assert device.windows == [{"params": (0, 16), "y": (0, 16)}]


# ---- others --------------------------------------------------------------------------------------


def test_random_weights_have_no_file():
    weight = RandomWeight("a", (2, 3), is_norm=False)
    assert str(weight.path) == "random weights" and weight.shape == (2, 3)
    assert weight.dtype == weight.stored_dtype == "F32"
    assert (weight.raw() == weight.read()).all() and weight.read().shape == (2, 3)
    assert (RandomWeight("a", (4,), is_norm=True).read() == 1).all()


def test_versions_of_packages():
    assert report._version("numpy") == np.__version__ and report._version("no-such-thing") is None
    assert report._mib(3 << 19) == "1.5 MiB" and report._percent(1.0, 8.0) == "12.5%"
    assert report._spread(timing.Spread(2.0, 1.0, 3.0)) == {"median": 2.0, "min": 1.0, "max": 3.0}


@pytest.mark.parametrize("double", [False, True])
def test_blocks_of_random_weights_begin_where_the_name_says(double):
    form = nf4_format(64, double)
    own = SimpleNamespace(_shapes={"a": (4, 64), "b": (4, 64)})
    blocks = 31_249
    weights = np.random.default_rng(0).standard_normal((1, blocks * 64), dtype=np.float32)
    own._sample = quantize_nf4(weights, 64, double)
    made = {name: RandomFolder._blocks(own, name) for name in "ab"}
    for name, weight in made.items():
        first = zlib.crc32(name.encode()) % blocks
        assert weight.shape == (4, 64) and len(weight.codes) == form.code_bytes(4, 64)
        each = [(first + number) % blocks for number in range(4)]
        assert weight.absmax.ravel().tolist() == own._sample.absmax.ravel()[each].tolist()
        codes = own._sample.codes.reshape(blocks, 32)[each].ravel()
        assert (weight.codes.ravel() == codes).all()
    assert (made["a"].codes != made["b"].codes).any()
