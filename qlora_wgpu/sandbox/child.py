"""The other side of ``process.py``: a process that answers calls within its limits."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.limits import ANSWER_BYTES, CHILD_BYTES
from qlora_wgpu.sandbox.process import ANSWER, QUESTION

_MESSAGE = 1000  # characters of an error


def main(module: str) -> None:
    """Answers calls of a module's functions until the pipe ends."""
    questions, answers = _pipes()
    refusal = _import(module)
    _limit()
    begin = time.process_time()
    while len(head := questions.read(QUESTION.size)) == QUESTION.size:
        size, seconds, wait = QUESTION.unpack(head)
        question = questions.read(size)
        with _timer(seconds, wait):
            answer = refusal or _answer(question)
        # From answer to answer: Linux moves this clock in ticks while a timer runs, so that what a
        # short one took may show in the next one's time alone.
        end = time.process_time()
        answers.write(ANSWER.pack(len(answer), end - begin) + answer)
        answers.flush()
        begin = end


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, which libraries that print can no longer reach."""
    questions, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)
    return os.fdopen(questions, "rb"), os.fdopen(answers, "wb")


def _import(module: str) -> bytes:
    """Imports a module; gives what to answer where that fails, which nobody would see else."""
    try:
        importlib.import_module(f"qlora_wgpu.{module}")
    except Exception as err:
        name = module.rpartition(".")[2]
        told = f"the process for {name} cannot start: {type(err).__name__}: {err}"
        return json.dumps({"error": ["QLoRAError", told[:_MESSAGE]]}).encode()
    return b""


def _limit() -> None:
    """Holds this process to its memory, and keeps it from opening or starting anything.

    Windows has no such limits, and macOS does not enforce the one on memory: there, the process
    that has started this one watches it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource
    except ImportError:
        return
    most = {"DATA": CHILD_BYTES, "AS": 2 * CHILD_BYTES, "NOFILE": 0, "NPROC": 0, "FSIZE": 0}
    for name, value in {**most, "CORE": 0}.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        try:
            resource.setrlimit(kind, (value, value))
        except (OSError, ValueError):  # macOS, where the process already maps more
            continue


@contextmanager
def _timer(seconds: float, wait: float) -> Iterator[None]:
    """Ends this process if what is within takes longer; no code of Python's is needed for it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wait)  # should it wait without computing
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        import faulthandler

        faulthandler.dump_traceback_later(seconds, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()


def _answer(question: bytes) -> bytes:
    try:
        function, args = pickle.loads(question)
        answer: dict[str, Any] = {"value": function(*args)}
    except QLoRAError as err:
        answer = {"error": [type(err).__name__, str(err)[:_MESSAGE]]}
    except MemoryError:
        answer = {"stopped": f"needs more than {CHILD_BYTES // 2**20} MB of memory"}
    except Exception as err:
        answer = {"error": ["QLoRAError", f"{type(err).__name__}: {err}"[:_MESSAGE]]}
    try:
        encoded = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except MemoryError:
        encoded = b'{"stopped": "needs too much memory for its answer"}'
    if len(encoded) > ANSWER_BYTES:
        return json.dumps({"stopped": f"gives more than {ANSWER_BYTES // 2**20} MB"}).encode()
    return encoded
