"""A worker whose process is killed in the middle of whatever it computes, each time once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from qlora_wgpu.runs.cluster import Worker

METHODS = ("answer_logps", "complete", "divergence", "gradient", "scores", "token_logps")
FOLDER = "TEST_DYING_WORKER"  # the environment's name of the folder that knows who has died


class DyingWorker(Worker):
    """The first worker of all that gets to the second call of a method is killed in it."""

    def __init__(self, specification):
        super().__init__(specification)
        self._counts = dict.fromkeys(METHODS, 0)

    def _live(self, method):
        self._counts[method] += 1
        if self._counts[method] != 2:
            return
        try:
            (Path(os.environ[FOLDER]) / method).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def answer_logps(self, *given):
        self._live("answer_logps")
        return super().answer_logps(*given)

    def complete(self, *given):
        self._live("complete")
        return super().complete(*given)

    def scores(self, *given):
        self._live("scores")
        return super().scores(*given)

    def token_logps(self, *given):
        self._live("token_logps")
        return super().token_logps(*given)

    def divergence(self, *given):
        self._live("divergence")
        return super().divergence(*given)

    def gradient(self, *given):
        self._live("gradient")
        return super().gradient(*given)
