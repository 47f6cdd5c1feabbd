"""Processes that a test has begun, and whether they still run."""

import os
import signal
import time
from pathlib import Path

import psutil

PATIENCE = 300.0
"""Seconds that bound a hang alone: what is waited for comes as fast as the machine lets it."""


def heed_signals():
    """Undoes what a shell lets jobs in the background ignore (nohup): commands under test would."""
    for name in ("SIGINT", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is signal.SIG_IGN:
            heeded = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
            signal.signal(number, heeded)


def is_running(number):
    """Whether a process runs; one that has ended, and that nobody has collected, does not."""
    if os.name == "nt":  # where the signal 0 is Ctrl-C
        return psutil.pid_exists(number)
    try:
        os.kill(number, 0)
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, or no longer
        return not Path("/proc/self").exists()
    return state not in "ZX"


def until(condition, seconds=PATIENCE):
    """Waits for something that happens by itself."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
