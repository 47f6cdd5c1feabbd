"""Processes that have a model loaded and measure in turns; peers/turns.py is their other end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_session import end_with_parent

PEERS = Path(__file__).parent / "peers"
_FAREWELL = 20.0  # seconds in which one that is let go has to end
_CHUNK = 1 << 16
Answer = dict[str, Any]


class Participant:
    """One process; it loads at once, while others do, too."""

    def __init__(self, command: Sequence[str], asked: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        self.pid = self._process.pid
        self._read = b""
        self._write(asked)

    def ask(self, what: Mapping[str, Any], patience: float) -> Answer:
        """Its answer, or why there is none."""
        return self.answer(patience) if self._write(what) else self._ended()

    def answer(self, patience: float) -> Answer:
        """The next line that it writes."""
        assert self._process.stdout is not None
        ends = time.monotonic() + patience
        while b"\n" not in self._read:
            left = ends - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                return {"failed": f"no answer within {patience:.0f} s"}
            piece = os.read(self._process.stdout.fileno(), _CHUNK)
            if not piece:
                return self._ended()
            self._read += piece
        line, self._read = self._read.split(b"\n", 1)
        answer: Answer = json.loads(line)
        return answer

    def end(self) -> None:
        """Lets it go, and with it all its memory of the card."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, what: Mapping[str, Any]) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
        except BrokenPipeError:
            return False
        return True

    def _ended(self) -> Answer:
        return {"failed": f"its process ended with {self._process.wait()}: its part's log says why"}


@dataclass
class _Member:
    process: Participant
    about: Answer
    turns: int = 0


class Team:
    """Participants by name; one that failed is started anew for the next work, not before."""

    def __init__(
        self, commands: Mapping[str, Sequence[str]], asked: Mapping[str, Any], patience: float,
        watch: Callable[[int], AbstractContextManager[Answer]],
    ) -> None:  # fmt: skip
        """Takes commands; nothing is started yet.

        Args:
            commands: Of each participant.
            asked: What they load.
            patience: Seconds in which one answers, or is ended.
            watch: Looks at the card's memory while a process, by its id, has its turn.
        """
        self._commands, self._asked, self._patience = commands, asked, patience
        self._watch = watch
        self._members: dict[str, _Member] = {}
        self._failed: dict[str, str] = {}

    def load(self, names: Sequence[str]) -> dict[str, Answer]:
        """Starts those that are missing, all at once, and returns what they say of themselves."""
        self._failed = {}
        missing = [name for name in names if name not in self._members]
        started = {name: Participant(self._commands[name], self._asked) for name in missing}
        for name, process in started.items():
            self._members[name] = _Member(process, process.answer(self._patience))
        for name in missing:
            if why := self._members[name].about.get("failed"):
                self._leave(name, why)
        return {name: member.about for name, member in self._members.items()}

    def turn(self, name: str, work: Mapping[str, Any]) -> Answer:
        """What a participant measures, or why it does not."""
        if name in self._failed:
            return {"failed": self._failed[name]}
        member = self._members[name]
        with self._watch(member.process.pid) as seen:
            answer = member.process.ask(work, self._patience)
        if "failed" in answer:
            self._leave(name, answer["failed"])
            return answer
        member.turns += 1
        return {**answer, **seen, "fresh": member.turns == 1}

    def _leave(self, name: str, why: str) -> None:
        self._failed[name] = why
        self._members.pop(name).process.end()

    def end(self) -> None:
        """Lets all go."""
        for name in list(self._members):
            self._members.pop(name).process.end()
