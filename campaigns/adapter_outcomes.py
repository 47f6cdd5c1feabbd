"""What a verb ends with, and what a server says."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUESTION = "what is 3 and 4?"


class Refused(Exception):
    """The verb ended with exit code 2, or raised a QLoRAError: one sentence."""


class Wrong(Exception):
    """Something is not what it has to be."""


def require(condition: object, told: str) -> None:
    """Raises ``Wrong`` where it does not hold."""
    if not condition:
        raise Wrong(told)


def outcome_of(done: Any) -> str:
    """What a command wrote, if it ended well."""
    if done.returncode == 2:
        sentence = done.stderr.strip().splitlines()[-1]
        require("Traceback" not in done.stderr, done.stderr[-500:])
        raise Refused(sentence)
    require(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-800:]}")
    require("Traceback" not in done.stderr, done.stderr[-500:])
    return str(done.stdout)


@contextmanager
def as_refused() -> Iterator[None]:
    """Turns errors for users into ``Refused``."""
    from qlora_wgpu.errors import QLoRAError

    try:
        yield
    except QLoRAError as err:
        raise Refused(str(err)) from err


def has_checkpoint(out: Path) -> bool:
    """Whether a run has a whole checkpoint by now."""
    folder = out / "checkpoints"
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def await_server(process: Any, port: int) -> None:
    """Waits until a server answers."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if process.poll() is not None:
            _, told = process.communicate()
            if process.returncode == 2:
                raise Refused(told.strip().splitlines()[-1])
            raise Wrong(f"serve ended with {process.returncode}: {told[-500:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise Wrong("the server does not come")


def answer_of(port: int, name: str) -> str:
    """What an adapter answers, by its name."""
    body = {"model": name, "temperature": 0, "max_tokens": 8,
            "messages": [{"role": "user", "content": QUESTION}]}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])
