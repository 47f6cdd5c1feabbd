"""Cases run one after another in a process that is watched: its time, its memory, its end."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.support import Tally
from qlora_wgpu.errors import QLoRAError

SECONDS = 10.0  # of computing that a case may take, its children's included
_PATIENCE = 90.0  # seconds by the clock, on a machine that others use as well
MEMORY = 1000 * 2**20  # bytes that a case may take, its children's included
HARD = 4 * 2**30  # bytes at which the process gets no more, so that the machine lives on

Case = tuple[str, Any]
Try = Callable[[Any], str]


class Outcome(NamedTuple):
    name: str
    result: str  # what the case was found to be, "error: …", or how its process ended
    seconds: float
    memory: int


def watched(cases: Iterator[Case], attempt: Try, tally: Tally) -> None:
    """Tries each case; whatever it must not do is a failure.

    Args:
        cases: Names and arguments.
        attempt: Gives the outcome of an argument, "WRONG: …" where it is wrong; errors of the
            package's own are outcomes, too.
        tally: Where the outcomes go.
    """
    remaining = list(cases)
    while remaining and not tally.over:
        done = 0
        for outcome in _run(remaining, attempt):
            done += 1
            _judge(outcome, tally)
            if tally.over or outcome.memory > MEMORY:
                break
        remaining = remaining[done:]


def _judge(outcome: Outcome, tally: Tally) -> None:
    if outcome.result.startswith("WRONG: "):
        tally.fail(outcome.result.removeprefix("WRONG: "), outcome.name)
    elif outcome.seconds > SECONDS:
        tally.fail(f"over {SECONDS:.0f} s", f"{outcome.name}: {outcome.seconds:.1f} s")
    elif outcome.memory > MEMORY:
        tally.fail(f"over {MEMORY >> 20} MiB", f"{outcome.name}: {outcome.memory >> 20} MiB")
    else:
        tally.add(outcome.result)


def _run(cases: list[Case], attempt: Try) -> Iterator[Outcome]:
    here, there = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(cases, attempt, there))
    process.start()
    there.close()
    try:
        for name, _ in cases:
            if not here.poll(_PATIENCE):
                yield Outcome(name, "WRONG: no end", 0, 0)
                return
            try:
                yield Outcome(name, *here.recv())
            except EOFError:
                process.join()
                yield Outcome(name, f"WRONG: the process ended ({process.exitcode})", 0, 0)
                return
    finally:
        process.kill()
        process.join()


def _work(cases: list[Case], attempt: Try, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (HARD, HARD))
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)
    for _, argument in cases:
        begin = computed()
        answers.send((_tried(attempt, argument), computed() - begin, _peak()))


def computed() -> float:
    """Seconds that this process and the children that have ended computed."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _tried(attempt: Try, argument: Any) -> str:
    try:
        return attempt(argument)
    except QLoRAError as err:
        if len(str(err)) > 2000 or "\n" in str(err).strip():
            return f"WRONG: a message of {len(str(err))} characters"
        return f"refused: {type(err).__name__}"
    except BaseException as err:
        return f"WRONG: traceback, {type(err).__name__}"


def _peak() -> int:
    """Most memory that this process and one of its children had, at one time or another."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return memory_of("self", "VmHWM") + max(ended, peak_of_children())


def peak_of_children() -> int:
    """Most memory that one of the children that live had."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = [pid for children in tasks for pid in children.read_text().split()]
    return max((memory_of(pid, "VmHWM") for pid in pids), default=0)


def memory_of(pid: str, key: str) -> int:
    """What the system says of a process's memory, such as VmRSS; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
