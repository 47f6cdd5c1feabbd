"""Reward functions in the user's own files, each in a process with a time limit.

A file runs with the user's rights, if the command line or the caller allows it. In a process of its
own, whatever it does ends at most that process: it may crash, hang, fork or print, and the run ends
with a message.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from qlora_wgpu.errors import ConfigError, RewardError
from qlora_wgpu.files import is_file
from qlora_wgpu.grpo.reward_failures import RewardTimeoutError, described
from qlora_wgpu.supervision.processes import signal_name

_START = 60.0  # seconds for a file to be imported
_ENDS = 5.0  # seconds for a process to end that has closed its pipe
_POLL = 0.5  # seconds
_MOST_SHOWN = 1 << 20  # bytes that a function may print
_LAST_WORDS = 5.0  # seconds until what it has printed last is shown
_MOST_ANSWERED = 1 << 24  # bytes of the rewards of a batch


class RewardProcess:
    """A function of a file, called in a process of its own: ``process(**batch)``.

    A process that has ended is started again by the next call.
    """

    def __init__(self, path: str, function: str, timeout: float = 60.0) -> None:
        """Starts the process and imports the file.

        Args:
            path: The Python file.
            function: The function's name in it.
            timeout: Seconds that a batch may take.

        Raises:
            ConfigError: If the file cannot be imported, or has no such function.
        """
        self.where = f"{path}:{function}"
        # -u: what the function prints is shown at once, and not lost when the process is ended.
        self._command = [sys.executable, "-u", "-m", __name__, path, function]
        self._timeout, self._printed = timeout, 0
        if not is_file(Path(path)):
            raise ConfigError(f"grpo.reward_funcs: {path} does not exist")
        self._start()

    def __call__(self, **batch: Any) -> Sequence[Any]:
        """The rewards of a batch, as the function has returned them.

        Raises:
            RewardError: If the function raises, takes too long, or ends its process.
        """
        if not self.is_running:
            self.close()
            self._start()
        self._number += 1
        request = json.dumps({"number": self._number, "batch": batch}, default=str) + "\n"
        # Not in this thread, which would wait for a process that does not read
        threading.Thread(
            target=_write, args=(self._process.stdin, request.encode()), daemon=True
        ).start()
        answer = self._answer(self._timeout)
        if "error" in answer:
            raise RewardError(f"reward function {self.where}: {answer['error']}")
        rewards: Sequence[Any] = answer["rewards"]
        return rewards

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process, and those that it has started."""
        if os.name == "posix":
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._showing.join(_LAST_WORDS)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C stops the run, not the function
        )  # fmt: skip
        self._lines: queue.Queue[bytes] = queue.Queue(8)
        self._number = 0  # of the latest request
        threads = [
            threading.Thread(target=target, args=(self._process, self._lines), daemon=True)
            for target in (self._read, self._show)
        ]
        for thread in threads:
            thread.start()
        self._showing = threads[1]
        started = self._answer(_START)
        if "error" in started:
            self.close()
            raise ConfigError(f"grpo.reward_funcs: {self.where}: {started['error']}")

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream, contextlib.suppress(ValueError, OSError):
            while line := stream.readline(_MOST_ANSWERED):
                lines.put(line)
        lines.put(b"")

    def _show(self, process: subprocess.Popen[bytes], _: object) -> None:
        """Shows what the function prints, up to a limit."""
        assert process.stderr is not None
        with process.stderr as stream, contextlib.suppress(ValueError, OSError):
            while chunk := os.read(stream.fileno(), 1 << 16):
                left = _MOST_SHOWN - self._printed
                self._printed += len(chunk)
                if left > 0:
                    os.write(2, chunk[:left])
                if 0 < left <= len(chunk):
                    text = f"\n{self.where} has printed more than 1 MiB: the rest is not shown\n"
                    os.write(2, text.encode())

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The answer to the latest request, or with the key ``error`` why there is none."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                line = self._lines.get(timeout=min(max(left, 0.0), _POLL))
            except queue.Empty:
                if not self.is_running:  # but its pipe is open in a process that it has started
                    return {"error": self._ending()}
                if left > 0:
                    continue
                self.close()
                message = f"reward function {self.where}: no rewards within {seconds:g} s"
                raise RewardTimeoutError(message) from None
            if not line:
                return {"error": self._ending()}
            try:
                answer = json.loads(line)
                number = answer["number"]
                known = "error" in answer or isinstance(answer.get("rewards"), list)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                known, number = False, self._number
            if not known:
                self.close()
                return {"error": "it has written to the pipe that its rewards are read from"}
            if number == self._number:  # not of a process that it has forked before
                return dict(answer)

    def _ending(self) -> str:
        try:
            code = self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            self.close()
            return "it has closed the pipe that its rewards are read from"
        name = signal_name(code)
        ended = f"exit code {code}" if name is None else name
        return f"its process ended with {ended}"


def _write(stream: IO[bytes] | None, data: bytes) -> None:
    assert stream is not None
    with contextlib.suppress(OSError, ValueError):  # the process has ended
        while data:
            data = data[os.write(stream.fileno(), data) :]


# ---- in the process ------------------------------------------------------------------------------


def _main(path: str, name: str) -> None:
    requests, answers, owner = os.fdopen(os.dup(0), "rb"), os.dup(1), os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints goes to stderr
    _end_with_parent()

    def answer(number: int, **values: Any) -> None:
        if os.getpid() != owner:  # the function has forked
            os._exit(0)
        data = json.dumps({"number": number, **values}).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    try:
        function = getattr(_imported(path), name, None)
    except BaseException as err:
        answer(0, error=described(err))
        return
    if not callable(function):
        answer(0, error=f"it has no function {name}")
        return
    answer(0, rewards=[])
    for line in requests:
        request = json.loads(line)
        number, batch = request["number"], request["batch"]
        try:
            made = itertools.islice(function(**batch), len(batch["completions"]) + 1)
            rewards = [_as_json(reward) for reward in made]
        except BaseException as err:
            answer(number, error=described(err))
        else:
            answer(number, rewards=rewards)


def _imported(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("reward_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    return module


def _end_with_parent() -> None:
    """Ends this process when the run does, even in the middle of a batch."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.name == "posix":
        threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(OSError):  # if memory runs out, this process is ended first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _as_json(reward: Any) -> Any:
    """A reward for the run, which refuses what is not a number."""
    if reward is None or isinstance(reward, str | float):
        return reward[:100] if isinstance(reward, str) else reward
    try:
        return float(reward)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return repr(reward)[:100]


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    finally:
        os._exit(1)  # threads that the file has started do not keep it
