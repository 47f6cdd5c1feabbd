"""A run tells once where its steps wait for the disk."""

import pytest

from qlora_wgpu.graph.host_callbacks import DiskReadStats
from qlora_wgpu.training.step_queue import IOStallMonitor


def told(share, steps=20, seconds=5.0, nbytes=2_000_000_000, first=100.0):
    """The warning after steps that waited a share of their time for a file."""
    reading, now, texts = DiskReadStats(), [0.0], []
    watch = IOStallMonitor(reading, lambda: now[0])
    for step in range(steps):
        took = seconds if step else first
        now[0] += took
        if nbytes:
            reading.add("/models/llama/model-00002.safetensors", nbytes, share * took)
        texts.append(watch.after_step())
    return texts


def test_it_is_told_once():
    texts = told(0.8)
    (text,) = filter(None, texts)
    assert texts.index(text) == 3  # behind the first step, which nobody counts
    assert text.startswith("steps wait for the disk 80% of the time: 2 GB of weights per step")
    assert "read from /models/llama at 500 MB/s; put them on a faster disk" in text


FAST = [
    {"share": 0.4}, {"share": 0.9, "nbytes": 0}, {"share": 0.9, "steps": 3},
    {"share": 0.9, "seconds": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("how", FAST)
def test_nothing_is_told_of_disks_that_are_fast_enough(how):
    assert not any(told(**how))
