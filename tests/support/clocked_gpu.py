"""A GPU in made-up time, whose clock rises with the load and falls at rest; it computes nothing."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.device import MemoryCounter, Transfers
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE

REST = 0.175  # of the full clock: 345 of 1,980 MHz
_INERTIA = 0.15  # seconds after which the driver has noticed most of a change of the load
_RAISED = (0.6, 0.8)  # between these loads the clock rises from rest to full
_TICK = 1e-3
_SUBMIT, _PASS, _READ = 3e-5, 2e-5, 3e-4  # seconds of the host
_TURN = 1.5e-6  # a turn of bench/fma.wgsl at the full clock


def kernel(seconds, *, memory=False, name="kernel"):
    """A dispatch that takes so long at the full clock, or at any if it only moves memory."""
    return SimpleNamespace(seconds=seconds, memory=memory, name=name), None, (1, 1, 1)


class ClockedGpu(Transfers):
    """What ``Device`` offers to those who time dispatches.

    Attributes:
        now: The host's time, for ``time.perf_counter``.
        clock: Of the full clock, 1 at most.
        load: The share of the time that the GPU has worked lately.
        ran: What was submitted: the kernels, when each began, the clock then.
        submits: Seconds of each submit.
        early: Seconds that a pass seems to begin before the one ahead of it has ended.
    """

    def __init__(self, slowed=lambda now: 1.0, **changes):
        self.now = self.load = self.early = 0.0
        self.ran, self.submits = [], []
        self.profile, self.name, self.is_cpu = GPU_PROFILE, "card", False
        self.features = frozenset({"timestamp-query"})
        self.pace, self.memory = CostModel.of_kind("DiscreteGPU", 0.1), MemoryCounter()
        info = {"device": "card", "description": "driver 1", "backend_type": "Vulkan"}
        self.gpu = SimpleNamespace(info=info)
        usages = ["STORAGE", "COPY_DST", "COPY_SRC", "UNIFORM", "QUERY_RESOLVE"]
        self.backend = SimpleNamespace(
            name="wgpu",
            module=SimpleNamespace(BufferUsage=SimpleNamespace(**dict.fromkeys(usages, 0))),
            timestamp_period=lambda raw: 1.0,
            record=lambda commands, dispatches: commands.extend(dispatches),
        )
        self.raw = SimpleNamespace(
            create_query_set=lambda type, count: np.zeros(count, np.uint64),
            create_buffer=self._buffer,
            create_command_encoder=lambda: _Encoder(self),
            queue=SimpleNamespace(
                submit=self._submit, write_buffer=self._write, read_buffer=self._read
            ),
        )
        self._slowed, self._free_at = slowed, 0.0
        vars(self).update(changes)

    def wait(self, seconds):
        """The host does something else, such as compiling."""
        self.now += seconds

    @property
    def clock(self):
        low, high = _RAISED
        risen = min(max((self.load - low) / (high - low), 0.0), 1.0)
        return (REST + (1 - REST) * risen) * self._slowed(self._free_at)

    def driver_call(self, what):
        return nullcontext()

    def buffer(self, nbytes, kind, label=""):
        return self._buffer(nbytes, 0)

    def pipeline(self, shader):
        return SimpleNamespace(seconds=None, memory=False, name="busy work")

    def bind_group(self, shader, windows):
        return windows["params"][0]

    def dispatch(self, *dispatch):
        encoder = _Encoder(self)
        encoder.begin_compute_pass().extend([dispatch])
        self.submit(encoder.finish())

    def _buffer(self, size, usage):
        return SimpleNamespace(data=np.zeros(size, np.uint8), destroy=lambda: None)

    def _write(self, buffer, offset, data):
        buffer.data[offset : offset + data.size] = data

    def _read(self, buffer, offset, nbytes):
        self.now = max(self.now, self._free_at) + _READ
        return memoryview(buffer.data.tobytes())[offset : offset + nbytes]

    def _submit(self, commands):
        self.now += _SUBMIT
        begin = max(self.now, self._free_at)
        self.load *= math.exp((self._free_at - begin) / _INERTIA)
        self._free_at = begin
        for command in commands:
            command()
        self.submits.append(self._free_at - begin)

    def _run(self, pipeline, group, workgroups):
        self.ran.append((pipeline.name, self._free_at, self.clock))
        left = pipeline.seconds
        if left is None:
            left = _TURN * int(group.data[:4].view(np.uint32)[0])
        while left > 0.0:
            rate = 1.0 if pipeline.memory else self.clock
            spent = min(left / rate, _TICK)
            left -= spent * rate if spent == _TICK else left
            self._free_at += spent
            self.load = 1.0 - (1.0 - self.load) * math.exp(-spent / _INERTIA)


class _Pass(list):
    def end(self):
        pass


class _Encoder:
    """Passes, which are carried out when they are submitted."""

    def __init__(self, gpu):
        self._gpu, self._commands = gpu, []

    def begin_compute_pass(self, timestamp_writes=None):
        self._gpu.now += _PASS
        dispatches, gpu = _Pass(), self._gpu
        early = gpu.early if self._commands else 0.0

        def run():
            begin = gpu._free_at
            for dispatch in dispatches:
                gpu._run(*dispatch)
            if timestamp_writes:
                ticks = timestamp_writes["query_set"]
                first = timestamp_writes["beginning_of_pass_write_index"]
                ticks[first] = round(1e9 * (begin - early))
                ticks[timestamp_writes["end_of_pass_write_index"]] = round(1e9 * gpu._free_at)

        self._commands.append(run)
        return dispatches

    def resolve_query_set(self, queries, first, count, buffer, offset):
        def copy():
            buffer.data[: 8 * count] = queries[first : first + count].view(np.uint8)

        self._commands.append(copy)

    def finish(self):
        return lambda: [command() for command in self._commands]
