"""The supervised side: it ends with its supervisor, and keeps native libraries' words apart."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from qlora_wgpu.supervision.journal import Journal
from qlora_wgpu.supervision.processes import HUNG

_SECONDS_BETWEEN_LOOKS = 0.5
_SYNCHRONIZE, _INFINITE = 0x0010_0000, 0xFFFF_FFFF  # of Windows' process handles


def begin(journal: Journal) -> None:
    """Makes this process a supervised one; called before anything native is loaded."""
    _keep_driver_words(journal)
    threading.Thread(target=_end_with, args=(journal.supervisor,), daemon=True).start()


def end_if_hung(overdue: Callable[[], str | None]) -> None:
    """Ends the process when a call into the driver takes too long.

    ``overdue`` says which, or None. Nothing else can be done: the call does not return, and no
    exception reaches it.
    """
    threading.Thread(target=_end_when, args=(overdue,), daemon=True).start()


def _keep_driver_words(journal: Journal) -> None:
    """Sends what native code writes to standard error to a file; Python's stays as it is."""
    sys.stderr.flush()
    own = os.dup(2)
    log = os.open(journal.driver_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 2)
    os.close(log)
    encoding, errors = sys.stderr.encoding, sys.stderr.errors
    sys.stderr = os.fdopen(own, "w", buffering=1, encoding=encoding, errors=errors)


def _end_with(supervisor: int) -> None:
    """Asks this process to stop once its supervisor is gone."""
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        kernel.WaitForSingleObject(kernel.OpenProcess(_SYNCHRONIZE, False, supervisor), _INFINITE)
        signal.raise_signal(signal.SIGTERM)
        return
    while os.getppid() == supervisor:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    # The main thread is the one that sleeps.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _end_when(overdue: Callable[[], str | None]) -> None:
    while (what := overdue()) is None:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.write(2, f"panicked at\n{what}\n".encode())
    os._exit(HUNG)
