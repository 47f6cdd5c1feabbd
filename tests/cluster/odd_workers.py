"""Workers that compute next to nothing, and go wrong when they are told to.

One that is to ``open`` has done so once there is a file ``opened``.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from qlora_wgpu.cluster.blocks import BlockResult, WorkerInfo
from qlora_wgpu.errors import ClusterError, OutOfMemoryError


class Unreadable:
    """What cannot be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


class UnreadableError(Exception):
    """One as many libraries have: it takes another number of arguments than it keeps."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


def fail(error):
    raise error


def replayed(worker, sums):
    """Each time what came first."""
    worker.first = getattr(worker, "first", sums)
    return worker.first


ANSWERS = {
    "short": lambda worker, sums: replace(sums, gradient=sums.gradient[:-1]),
    "square": lambda worker, sums: replace(sums, gradient=sums.gradient.reshape(8, 8)),
    "float64": lambda worker, sums: replace(sums, gradient=sums.gradient.astype(np.float64)),
    "list": lambda worker, sums: replace(sums, gradient=sums.gradient.tolist()),
    "without": lambda worker, sums: replace(sums, gradient=None),
    "tokens": lambda worker, sums: replace(sums, tokens=-5.0),
    "tokens as text": lambda worker, sums: replace(sums, tokens="1"),
    "nan tokens": lambda worker, sums: replace(sums, tokens=float("nan")),
    "seconds": lambda worker, sums: replace(sums, seconds=-1.0),
    "nothing": lambda worker, sums: None,
    "a dict": lambda worker, sums: vars(sums),
    "replayed": replayed,
    "unreadable": lambda worker, sums: Unreadable(),
    "unreadable error": lambda worker, sums: fail(UnreadableError("a", "b")),
}
WRITTEN = {"unreadable text": Unreadable(), "other tokens": [1, 2, 99999], "long text": [1] * 50}


class OddWorker:
    """``settings`` have, by the worker's name, what it does in its second block."""

    def __init__(self, specification):
        self.name = specification.gpu
        self.settings = specification.settings
        self.does = self.settings.get(self.name, "")
        self.count, self.version = 0, -1
        if self.does == "open":
            while not (Path(self.settings["folder"]) / "opened").exists():
                time.sleep(0.05)
        if self.does == "refuse":
            raise ClusterError("it does not want to")

    def identity(self):
        kind = "another" if self.does == "other" else "the same"
        return WorkerInfo("odd", "driver", "kernels", 0, "1", {"weights": kind}, {})

    def refused(self, sentence):
        print(f"refused: {sentence}", flush=True)

    def write(self, version, parameters):
        self.version, self.parameters = version, parameters

    def gradient(self, asked, ids):
        if asked.version != self.version:
            raise ClusterError("it has other parameters")
        time.sleep(self.settings.get("seconds", 0.02))
        self.count += 1
        gradient = self.parameters * np.float32(ids.sum())
        if self.does in ("nan", "all nan"):
            gradient[1] = np.nan
        if self.does == "memory" and self.count == 2:
            raise OutOfMemoryError("the device has no room")
        if self.does in ("kill", "stop") and self.count == 2:
            once = Path(self.settings["folder"]) / self.does
            if not once.exists():
                once.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL if self.does == "kill" else signal.SIGSTOP)
        sums = BlockResult(float(ids.sum()), 1.0, 0, 0.02, gradient, nonce=asked.nonce)
        return ANSWERS[self.does](self, sums) if self.does in ANSWERS else sums

    def text(self, asked, ids, more):
        if self.does in WRITTEN:
            return WRITTEN[self.does]
        if self.does == "no text":
            raise OutOfMemoryError(f"no room for a text on {self.name}")
        return [*ids, more]
