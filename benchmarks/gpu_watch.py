"""What the driver says of a card while something runs: clocks, power, memory; and of a process."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "memory.used")
_PATIENCE = 5.0  # seconds
_PAUSE = 0.02  # between two looks at a process's memory


class Watch:
    """Asks nvidia-smi once a second, where there is one, and keeps all answers in a file."""

    def __init__(self, path: Path) -> None:
        self._samples: list[tuple[float, list[float | None]]] = []
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi") is None:
            return
        query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen(
            [*query, "-l", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._path.open("a", encoding="utf-8") as file:
            for line in self._process.stdout:
                file.write(f"{time.time():.1f}, {line}")
                file.flush()
                values = [_number(text) for text in line.split(",")]
                if len(values) == len(FIELDS):
                    self._samples.append((time.monotonic(), values))

    def during(self, begin: float, end: float) -> dict[str, Any]:
        """Least, median and most of each field between two readings of the monotonic clock."""
        samples = [values for at, values in list(self._samples) if begin <= at <= end]
        summary = {}
        for name, column in zip(FIELDS, zip(*samples, strict=True), strict=False):
            if present := [value for value in column if value is not None]:
                summary[name] = [min(present), statistics.median(present), max(present)]
        return summary

    def close(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:  # it hangs with its driver
                self._process.kill()
            self._reader.join(_PATIENCE)
            if not self._reader.is_alive():
                self._process.stdout.close()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return None


@contextmanager
def watch_process(pid: int) -> Iterator[dict[str, Any]]:
    """Yields what gets the most memory that the driver gave a process, and all together.

    It stays empty without NVML (the package nvidia-ml-py), and without the process's part where
    the driver does not know processes by this system's ids.
    """
    found: dict[str, Any] = {}
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        yield found
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(_PAUSE):
            try:
                own = [
                    p.usedGpuMemory or 0
                    for each in (pynvml.nvmlDeviceGetComputeRunningProcesses,
                                 pynvml.nvmlDeviceGetGraphicsRunningProcesses)
                    for p in each(card) if p.pid == pid
                ]  # fmt: skip
                used = {"card_mib": pynvml.nvmlDeviceGetMemoryInfo(card).used}
            except pynvml.NVMLError:
                return
            if own:
                used["driver_mib"] = max(own)
            for name, value in used.items():
                found[name] = max(found.get(name, 0.0), value / 2**20)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(_PATIENCE)
