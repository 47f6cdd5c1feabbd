"""Folders with pipes, devices, sockets, loops, links and files that are far too large.

Each is opened in a process of its own with little memory, as ``train`` opens it: a model or one
short sentence, soon.

``python -m campaigns.folders --count N --seed S``
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.tiny import CONFIG, write_chats, write_model
from support.gguf_models import adapter_of

from campaigns.support import Tally, campaign

SECONDS, MEMORY = 10.0, 1 << 30
BIG = 200 << 20

# Opens everything that a run reads before its device, and says how it went.
CHILD = """
import resource, sys, time
from pathlib import Path
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.config import load_config
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.runs.data import read_run_data
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.training import Observer
root = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # so that a failure spares the machine
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.process_time()
try:
    settings = load_config(root / "run.yaml")
    source = OpenedModel.open(settings.model.path)
    source.tokenizer
    read_run_data(settings, source, Observer())
    load_adapter(root / "adapter")
    print("read")
except QLoRAError as err:
    print("refused" if str(err).count("\\n") == 0 and len(str(err)) < 2000 else "LONG", err)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"{time.process_time() - begin:.2f} s {(after - before) // 1024} MB")
"""

PLACES = [
    "model/config.json", "model/model.safetensors", "model/model.safetensors.index.json",
    "model/tokenizer.json", "model/tokenizer_config.json", "model/special_tokens_map.json",
    "model/generation_config.json", "model/chat_template.jinja", "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors", "run.yaml", "data.jsonl",
]  # fmt: skip


def pipe(path: Path, spare: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, spare: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is a short one
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


def zero(path: Path, spare: Path) -> None:
    path.symlink_to("/dev/zero")


def terminal(path: Path, spare: Path) -> None:
    path.symlink_to("/dev/tty")


def folder(path: Path, spare: Path) -> None:
    path.mkdir()


def loop(path: Path, spare: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path, spare: Path) -> None:
    path.symlink_to(spare / "gone")


def elsewhere(path: Path, spare: Path) -> None:
    """A link to a sound file outside, as in the hub's cache."""
    spare.mkdir(exist_ok=True)
    kept = spare / path.name
    shutil.copy(path.with_name(path.name + ".kept"), kept)
    path.symlink_to(kept)


def huge(path: Path, spare: Path) -> None:
    path.write_bytes(b" " * BIG)


def sparse(path: Path, spare: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def empty(path: Path, spare: Path) -> None:
    path.touch()


def locked(path: Path, spare: Path) -> None:
    path.touch(mode=0)


def pipe_behind_links(path: Path, spare: Path) -> None:
    spare.mkdir(exist_ok=True)
    os.mkfifo(spare / "pipe")
    (spare / "link").symlink_to("pipe")
    path.symlink_to(spare / "link")


KINDS: list[Callable[[Path, Path], None]] = [
    pipe, unix_socket, zero, terminal, folder, loop, dangling, elsewhere, huge, sparse, empty,
    locked,
    pipe_behind_links,
]  # fmt: skip


def sound(root: Path) -> Path:
    """A run's files, all as they should be; every optional one is there."""
    model = write_model(root / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name in ("generation_config", "tokenizer_config", "special_tokens_map"):
        (model / f"{name}.json").write_text("{}")
    write_chats(root / "data.jsonl")
    adapter_of(root, CONFIG, ("q_proj",))
    text = f"model: {{path: {model}}}\ndata: {{train: {root}/data.jsonl, cache: false}}\n"
    (root / "run.yaml").write_text(text)
    return root


@contextmanager
def replaced(path: Path, kind: Callable[[Path, Path], None], spare: Path) -> Iterator[None]:
    """One file is something else for a while."""
    kept = path.with_name(path.name + ".kept")
    had = path.exists()
    if had:
        path.rename(kept)
    try:
        kind(path, spare)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        shutil.rmtree(spare, ignore_errors=True)
        if had:
            kept.rename(path)


def opened(root: Path) -> tuple[str, str]:
    """What became of a run, and what was said."""
    begin = time.monotonic()
    try:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(root)],
            capture_output=True,
            text=True,
            timeout=6 * SECONDS,  # by the clock; what counts is told by the child
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"WRONG: over {time.monotonic() - begin:.0f} s", ""
    lines = child.stdout.splitlines()
    if child.returncode or len(lines) != 2:
        return f"WRONG: {(child.stderr.splitlines() or ['killed'])[-1][:150]}", ""
    seconds, _, megabytes, _ = lines[1].split()
    if float(seconds) > SECONDS or int(megabytes) << 20 > MEMORY:
        return f"WRONG: {lines[1]}", lines[0]
    return lines[0].split()[0], lines[0]


def run(count: int, seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    every = [(place, kind) for place in PLACES for kind in KINDS]
    rng.shuffle(every)
    with tempfile.TemporaryDirectory() as name:
        root = sound(Path(name))
        for place, kind in every[:count]:
            if tally.over:
                break
            if kind is elsewhere and not (root / place).exists():
                continue
            with replaced(root / place, kind, root / "spare"):
                outcome, said = opened(root)
            how = f"{place} as {kind.__name__}: {said}"
            if outcome == "read" and kind not in (elsewhere, empty, locked):
                if place.endswith("index.json"):  # a single file goes before an index
                    outcome = "read, without it"
                else:
                    outcome = "WRONG: skipped in silence"
            if outcome.startswith(("WRONG", "LONG")):
                tally.fail(outcome.removeprefix("WRONG: "), how)
            else:
                tally.add(outcome)


if __name__ == "__main__":
    campaign("folders with things that are no files", run, len(PLACES) * len(KINDS))
