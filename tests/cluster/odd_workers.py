"""Workers that compute next to nothing, and go wrong when they are told to.

One that is to ``open`` has done so once there is a file ``opened``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from qlora_wgpu.cluster.blocks import Identity, Sums
from qlora_wgpu.errors import ClusterError, OutOfMemoryError


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
        return Identity("odd", "driver", "kernels", 0, "1", {"weights": kind}, {})

    def refused(self, sentence):
        print(f"refused: {sentence}", flush=True)

    def write(self, version, parameters):
        self.version, self.parameters = version, parameters

    def gradient(self, version, ids):
        if version != self.version:
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
        return Sums(float(ids.sum()), 1.0, 0, 0.02, gradient)

    def text(self, version, ids, more):
        if self.does == "no text":
            raise OutOfMemoryError(f"no room for a text on {self.name}")
        return [*ids, more]
