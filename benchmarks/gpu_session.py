"""Parts of a long measurement, each a process of its own, which may be cut off and gone on with.

A folder holds the state (``state.json``), each part's whole log and its results; an archive of it
is written anew after every part, so that whatever ends the session costs the part under way only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_watch import Watch

_ATTEMPTS = 3  # at a part that fails, or overruns its own time
_LOST = 2  # sessions that ended with a part under way, before it counts as their cause
_RESTARTS = 4  # of a part that ended by a crash and had got on before
_LONGER, _MOST_OF_A_CALL = 1.25, 0.9
_REMEMBERED = ("attempts", "cut_off", "lost")
_UNDER_WAY = "under way"
# Not archived: what parts write for themselves, but for what this package remembers of a GPU. What
# it remembers of processes that crashed is of one machine, and of those that a call ended, too.
_KEPT_OUT = ("models", "cache")
_CACHE, _OF_PROCESSES = "cache/qlora-wgpu", "attempts"
_C = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: Of its log, its results and its place in the state.
        command: With ``{out}`` for the path of its results, without an ending.
        seconds: It is ended after so many.
        least: It is not begun with less time left.
        environment: Beside this process's.
        together: Parts that follow each other and say the same run at the same time, since they
            time nothing.
        needs: A part without which it is not begun.
        rows: Whether it keeps rows (``gpu_rows``), so that it can be begun again where it ended.
    """

    name: str
    command: Sequence[str]
    seconds: float = 120.0
    least: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    together: str = ""
    needs: str = ""
    rows: bool = False


# Python before 3.11.4 cannot be asked for it.
_PLAIN_FILES: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


class Session:
    """Runs parts until the time is up."""

    def __init__(
        self, folder: Path, archive: Path, minutes: float,
        farewell: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.folder, self._archive, self._farewell = folder, archive, farewell
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "state.json").exists() and archive.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(folder, **_PLAIN_FILES)
        self.state: dict[str, dict[str, Any]] = _read_json(folder / "state.json")
        self._take_up()
        self._whole = 60 * minutes
        self._ends = time.monotonic() + self._whole
        self._watch = Watch(folder / "nvidia-smi.csv")
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stopped)

    def forget(self, names: Sequence[str]) -> None:
        """Lets parts whose names begin so be measured anew."""
        for name in [n for n in self.state if n.startswith(tuple(names))]:
            del self.state[name]
            for path in self.folder.glob(f"{name}.json*"):
                path.unlink()
        self._keep()

    def _take_up(self) -> None:
        """What was under way when a session ended is begun again, but not for ever."""
        shutil.rmtree(self.folder / _CACHE / _OF_PROCESSES, ignore_errors=True)
        for name, part in self.state.items():
            if part.get("status") == _UNDER_WAY:
                lost = int(part.get("lost", 0)) + 1
                self.state[name] = {
                    **part, "status": "stopped", "lost": lost,
                    "attempts": self._attempts(name) + (lost >= _LOST),
                    "why": f"the call ended while it ran, {lost} times",
                }  # fmt: skip

    def run(self, parts: Sequence[Part], *, failed: bool = True) -> None:
        """Runs what is not done yet, in this order.

        Args:
            parts: All that may be left.
            failed: Whether what failed before, by its own fault, is tried again.
        """
        for all_parts in _grouped(parts):
            group = [p for p in all_parts if self._is_open(p.name, 1 if not failed else _ATTEMPTS)]
            if not group:
                continue
            threads = [threading.Thread(target=self._run, args=(part,)) for part in group[1:]]
            for thread in threads:
                thread.start()
            self._run(group[0])
            for thread in threads:
                thread.join()
            self.pack()

    def is_done(self, name: str) -> bool:
        return self.state.get(name, {}).get("status") == "done"

    def _is_open(self, name: str, most: int) -> bool:
        return not self.is_done(name) and self._attempts(name) < most

    def _attempts(self, name: str) -> int:
        return int(self.state.get(name, {}).get("attempts", 0))

    def file(self, name: str, ending: str) -> Path:
        """A part's file."""
        return self.folder / f"{name}.{ending}"

    def pack(self) -> None:
        """Writes the archive anew."""
        self._archive.parent.mkdir(parents=True, exist_ok=True)
        new = self._archive.with_name(self._archive.name + ".new")
        with tarfile.open(new, "w:gz") as packed:
            for path in sorted(self.folder.iterdir()):
                if path.name not in _KEPT_OUT and path not in (new, self._archive):
                    packed.add(path, arcname=path.name)
            if (self.folder / _CACHE).exists():
                packed.add(self.folder / _CACHE, arcname=_CACHE, filter=_lasting)
        new.replace(self._archive)

    def close(self) -> None:
        self._watch.close()
        self.pack()

    # -- one part ----------------------------------------------------------------------------

    def _run(self, part: Part) -> None:
        left, needed = self._ends - time.monotonic(), self._needed(part)
        why = f"{max(left, 0):.0f} s left of {needed:.0f}" if left < needed else ""
        if part.needs and not self.is_done(part.needs):
            why = f"needs {part.needs}"
        if why and self._attempts(part.name):
            return  # what it failed of tells more than that it was not tried again
        if why:
            known = {key: self.state.get(part.name, {}).get(key, 0) for key in _REMEMBERED}
            self._note(part.name, status="left out", why=why, **known)
            return
        begin = time.monotonic()
        ends = min(begin + part.seconds, self._ends)
        known = {key: self.state.get(part.name, {}).get(key, 0) for key in _REMEMBERED}
        self._note(part.name, status=_UNDER_WAY, **known)
        status, code = "failed", 0
        for _ in range(_RESTARTS):
            before = self._size(part)
            code = self._process(part, ends)
            status = "done" if code == 0 else "stopped" if time.monotonic() >= ends else "failed"
            if status != "failed" or not part.rows or self._size(part) == before:
                break
        end = time.monotonic()
        cut_off = status == "stopped" and ends >= self._ends
        values = {
            "seconds": round(end - begin, 1),
            "cut_off": round(end - begin, 1) if cut_off else 0,
            "attempts": self._attempts(part.name) + (not cut_off),
            "driver": self._watch.during(begin, end),
        }
        if cut_off:
            values["why"] = "the call's time was up"
        elif status == "stopped":
            values["why"] = (
                f"it took more than {part.seconds:.0f} s: {self._last_words(part, code)}"
            )
        elif status == "failed":
            values["why"] = self._last_words(part, code)
        self._note(part.name, status=status, **values)

    def _needed(self, part: Part) -> float:
        """Seconds without which a part is not begun: more than it was cut off after before."""
        if part.rows:  # it goes on where it ended
            return part.least
        longer = _LONGER * self.state.get(part.name, {}).get("cut_off", 0)
        return max(part.least, min(longer, part.seconds, _MOST_OF_A_CALL * self._whole))

    def _process(self, part: Part, ends: float) -> int:
        command = [text.replace("{out}", str(self.folder / part.name)) for text in part.command]
        with self.file(part.name, "log").open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, cwd=Path(__file__).parents[1], stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, env={**os.environ, **part.environment},
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
            self._running.append(process)
            try:
                return process.wait(max(ends - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                _end(process)
                log.write(b"\nstopped: its time was up\n")
                return process.returncode
            finally:
                self._running.remove(process)

    def _size(self, part: Part) -> int:
        """How far a part that keeps rows has got."""
        path = self.file(part.name, "jsonl")
        return path.stat().st_size if path.exists() else 0

    def _last_words(self, part: Part, code: int) -> str:
        text = self.file(part.name, "log").read_text(errors="replace", encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        words = " | ".join(line[:400] for line in reversed(lines[-3:]))  # what came last tells most
        return f"{_code(code)}: {words}"[:900]

    def _note(self, name: str, **values: Any) -> None:
        with self._lock:
            before = self.state.get(name, {}).get("status")
            self.state[name] = values
            self._keep()
        if values["status"] != _UNDER_WAY and values["status"] != before:
            print(f"{name}: {values['status']}, {values.get('seconds', 0)} s", flush=True)

    def _keep(self) -> None:
        new = self.folder / "state.json.new"
        new.write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        new.replace(self.folder / "state.json")

    def _stopped(self, number: int, frame: object) -> None:
        for process in list(self._running):
            _end(process)
        for part in self.state.values():
            if part["status"] == _UNDER_WAY:
                part |= {"status": "stopped", "why": "the call's time was up"}
        self._keep()
        self._farewell()
        self.pack()
        print("stopped: the same command goes on with what is left", flush=True)
        os._exit(128 + number)


def _grouped(parts: Sequence[Part]) -> list[list[Part]]:
    groups: list[list[Part]] = []
    for part in parts:
        if part.together and groups and groups[-1][0].together == part.together:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _code(code: int) -> str:
    """How a process ended, with a signal's name: a driver that crashes ends it by one."""
    try:
        return signal.Signals(-code).name if code < 0 else f"code {code}"
    except ValueError:
        return f"code {code}"


def _lasting(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(entry.name).name == _OF_PROCESSES else entry


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it has started."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.poll()


def end_with_parent() -> None:
    """Called in a new process, lets it end with what started it; what it starts has to as well."""
    if _C is not None:  # so that nothing runs on beside the next session
        _C.prctl(1, signal.SIGKILL)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
