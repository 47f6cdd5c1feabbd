"""Reward functions in the user's own files, each in a process with a time limit.

A file runs with the user's rights, if the command line or the caller allows it. A process of its
own keeps what it prints out of a run's output, and a batch that takes too long can be ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.errors import ConfigError, RewardError
from qlora_wgpu.files import is_file

_START = 60.0  # seconds for a file to be imported


class RewardProcess:
    """A function of a file, called in a process of its own: ``process(**batch)``."""

    def __init__(self, path: str, function: str, timeout: float = 60.0) -> None:
        """Starts the process and imports the file.

        Args:
            path: The Python file.
            function: The function's name in it.
            timeout: Seconds that a batch may take.

        Raises:
            ConfigError: If the file cannot be imported, or has no such function.
        """
        self.name, self._timeout = function, timeout
        self._where = f"{path}:{function}"
        if not is_file(Path(path)):
            raise ConfigError(f"grpo.reward_funcs: {path} does not exist")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, path, function],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        started = self._answer(_START)
        if "error" in started:
            self.close()
            raise ConfigError(f"grpo.reward_funcs: {self._where}: {started['error']}")

    def __call__(self, **batch: Any) -> Sequence[float | None]:
        """The rewards of a batch.

        Raises:
            RewardError: If the function raises, or takes too long.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # of a process that has ended, which is reported below
            self._process.stdin.write(json.dumps(batch, default=str) + "\n")
            self._process.stdin.flush()
        answer = self._answer(self._timeout)
        if "error" in answer:
            raise RewardError(f"reward function {self._where}: {answer['error']}")
        rewards: Sequence[float | None] = answer["rewards"]
        return rewards

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return {"error": f"no reward within {seconds:g} s"}
        if not line:
            return {"error": f"its process ended with exit code {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


# ---- in the process ------------------------------------------------------------------------------


def _main(path: str, name: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints goes to stderr

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        spec = importlib.util.spec_from_file_location("reward_file", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            answer(error=f"it has no function {name}")
            return
    except BaseException as err:
        answer(error=f"{type(err).__name__}: {str(err)[:300]}")
        return
    answer(ready=True)
    for line in sys.stdin:
        try:
            rewards = [None if r is None else float(r) for r in function(**json.loads(line))]
        except Exception as err:
            answer(error=f"{type(err).__name__}: {str(err)[:300]}")
        else:
            answer(rewards=rewards)


if __name__ == "__main__":
    _main(*sys.argv[1:])
