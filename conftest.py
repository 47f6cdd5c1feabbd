"""One device for the whole session; no GPU is a failure, never a skip.

The process that hands tests to workers needs nothing of the product: fixtures import what they use.
"""

import faulthandler
import gc
import math
import os
import sys
import time

import pytest

# Kernels are held to their references by tests of their own, not by every run that a test begins.
os.environ.setdefault("QLORA_WGPU_VERIFY_DRIVER", "0")
# References are small: a second thread, of each of pytest's processes, only waits for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from support.processes import heed_signals
from support.shaders import FEW_ROWS, keep_compiled_shaders

pytest_plugins = ["support.tiers", "support.processor_time"]

heed_signals()
keep_compiled_shaders()
# Modules are compiled once for all processes of the tests, which takes each of them seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Commands write as they do for users: what is lost in a buffer is a fault.
os.environ.pop("PYTHONUNBUFFERED", None)
# What whoever starts the tests wants of a terminal (CI sets FORCE_COLOR) is no wish of a test.
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
# Nor are an account of the hub and ways to it, which tests of the hub set themselves.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"):
    os.environ.pop(name, None)
# Servers of tests are on this machine: no proxy that its user has is asked for them.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))


_HUNG = 900  # seconds; a driver that hangs does not hear of pytest-timeout, which comes before


def pytest_configure(config):
    config.own_stderr = os.dup(2)  # before tests' output is captured
    config.guarded = -math.inf
    gc.disable()  # until all tests are collected, which frees nothing
    config.addinivalue_line("markers", "own_device: what the test opens is not shared with others")


def pytest_collection_finish():
    """Python's collector does not visit modules and tests again each time: a tenth of quick."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    """Ends this process with all its stacks if a test hangs in the driver; xdist starts another."""
    config, now = item.config, time.monotonic()
    if now > config.guarded + _HUNG / 10:  # not for each test, as it starts a thread
        faulthandler.dump_traceback_later(_HUNG, exit=True, file=config.own_stderr)
        config.guarded = now


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """What a process holds goes with it: freeing it piece by piece takes a second or two."""
    faulthandler.cancel_dump_traceback_later()
    if gc.isenabled():  # not in the process that hands tests to others
        gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def small_tiles():
    """Products of a software GPU have tiles of few rows, which change no bit and compile soon.

    Tiles of as many rows as processors have are those of ``tests/ops/test_narrow_tiles.py``.
    """
    from qlora_wgpu.gpu import device as gpu_device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_device, "rows_of_products", lambda lanes: FEW_ROWS)
        yield


@pytest.fixture(scope="session")
def device(small_tiles):
    from qlora_wgpu.gpu.device import Device

    return Device()


@pytest.fixture(autouse=True)
def shared_device(request, monkeypatch):
    """What a test marked ``own_device`` opens is its own: the driver's memory is counted there."""
    if request.node.get_closest_marker("own_device") is None:
        from support.shared_device import share_devices

        share_devices(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def light_runs():
    """Runs draw no picture, write short samples, all of them, and do not wait for the disk."""
    from qlora_wgpu.runs import prompts, reporting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "write_png", lambda path, rows: bool(path.write_bytes(b"-")))
        patch.setattr(prompts, "_MAX_TOKENS", 3)
        patch.setattr(prompts, "_MAX_SECONDS", math.inf)  # compiling kernels takes some
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def bounded_pipelines():
    yield
    from support.shared_device import bound_pipelines

    bound_pipelines()


@pytest.fixture
def settled_device(device):
    """The same, without what earlier tests left to Python's collector, which would go any time."""
    gc.collect()
    return device
