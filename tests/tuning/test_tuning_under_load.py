"""The tuner on a GPU whose clock rises with the load and falls at rest or in the heat."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.clocked_gpu import ClockedGpu, kernel

from qlora_wgpu.bench import timing
from qlora_wgpu.bench.workload import config_of
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.tuning import tuner
from qlora_wgpu.tuning.tuner import Task

TASK = Task(config_of("S"), LoraConfig(), QuantConfig(), "bfloat16", 1, 256)
LARGER = replace(GPU_PROFILE, gemm_tile=16)
OTHERS = [
    replace(GPU_PROFILE, gemm_tile=2),
    LARGER,
    replace(GPU_PROFILE, gemm_tile=4, threads_per_row=64),
]
_COMPILING, _LOADING = 4.0, 0.5  # seconds in which the GPU has little to do


class Model:
    """Takes a profile's time for its products, as long as ever for rows, and computes rightly."""

    def __init__(self, gpu, products):
        self.architecture = SimpleNamespace(text_vocab_size=83)
        self.adapter = SimpleNamespace(parameters=0, gradient=0, split=lambda flat: {"a": flat})
        gpu.wait(_LOADING if gpu.profile in gpu.compiled else _COMPILING)
        gpu.compiled.add(gpu.profile)
        seconds = products(gpu.profile)
        self.pieces = [[kernel(1e-3, memory=True)], *([kernel(each)] for each in seconds)]
        values = {"rows": 1, "columns": 1, "k": 1}
        launch = SimpleNamespace(kernel="gemm", path="gemm/nt.wgsl", values=values, constants={})
        rows = SimpleNamespace(kernel="rms_norm", constants={"ROWS": 1})
        self.plan = SimpleNamespace(launches=[rows] + [launch] * len(seconds))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def read_flat(self, vector):
        return np.arange(8, dtype=np.float32)

    def checked(self, ids, targets):
        return ids, targets

    def program(self, kind, batch, seq):
        return self

    def write_parameters(self, flat):
        pass

    def zero_gradient(self):
        pass

    def accumulate(self, ids, targets):
        pass


@pytest.fixture
def tuned(monkeypatch):
    """Tunes on a GPU where the launches of a layer take what a function of a profile says."""

    def tune(gpu, products):
        gpu.compiled = set()
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
        monkeypatch.setattr(tuner, "candidates", lambda profile: OTHERS)
        monkeypatch.setattr(tuner, "_Folder", lambda *given: None)
        monkeypatch.setattr(tuner, "device_layout", lambda *given: None)
        monkeypatch.setattr(tuner, "QLoRAModel", lambda layout, device: Model(gpu, products))
        return tuner.tune(gpu, TASK).profile

    return tune


def test_many_short_launches_are_not_taken_for_slow(tuned):
    """They leave a GPU at rest, if each is waited for, and long ones do not."""

    def products(profile):
        return [4e-5] * 100 if profile == LARGER else [1e-2]

    assert tuned(ClockedGpu(), products) == LARGER


def test_the_default_is_kept_where_it_is_the_fastest(tuned):
    def products(profile):
        return [4e-5] * 100 if profile == GPU_PROFILE else [1e-2]

    assert tuned(ClockedGpu(), products) == GPU_PROFILE


@pytest.mark.slow
@pytest.mark.parametrize("by", [-0.02, 0.04])
def test_kernels_are_compared_at_one_pace(tuned, by):
    """The clock falls or rises by some per cent a second, and one of them is a tenth faster.

    Memory's clock stays: what takes as long as ever seems no faster for that.
    """

    def products(profile):
        return [4e-3 if profile == LARGER else 4.4e-3]

    gpu = ClockedGpu(lambda now: 1.0 + by * min(now, 40.0))
    assert tuned(gpu, products) == LARGER
