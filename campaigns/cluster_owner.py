"""The owner of a run on a cluster is killed; the run goes on, and a worker joins it late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from campaigns.cluster_judging import Progress, judge
from campaigns.cluster_machines import WORKERS, Machines, child_of, ended
from campaigns.support import Tally

_OUT = "owner-killed"


def owner_killed(machines: Machines, tally: Tally, steps: int) -> None:
    """Kills the owner after its first checkpoint, and lets the run go on without a worker."""
    out = machines.folder / _OUT
    process = machines.train(_OUT, f"train.max_steps={steps}")
    progress = Progress(out / "metrics.jsonl")
    progress.watch(process, seconds=300.0, until=lambda: _has_checkpoint(out))
    progress.watch(process, seconds=1.0)
    _kill(process)
    done = len(progress.times)
    if not 0 < done < steps:
        tally.fail("the owner was not killed in the middle", machines.log(_OUT)[-2000:])
        return
    machines.end(WORKERS[2])
    process = machines.train(_OUT, f"train.max_steps={steps}", "--resume")
    progress.watch(process, seconds=300.0, until=lambda: len(progress.times) > done + 2)
    machines.start_worker(WORKERS[2])
    progress.watch(process, seconds=900.0)
    if ended(process, 1.0) != 0:
        tally.fail("a run whose owner was killed does not go on", machines.log(_OUT)[-2000:])
        return
    judge(machines, _OUT, tally)
    share = _share(out, WORKERS[2])
    print(f"{_OUT}: killed after step {done} of {steps}; who joined late had {share:.2f} at last")
    if share <= 0:
        tally.fail("who joins late does nothing", machines.log(WORKERS[2])[-2000:])
    else:
        tally.add("the owner was killed, and a worker joined late")


def _kill(process: subprocess.Popen[Any]) -> None:
    """As a power cut does: the supervising process and the one that computes."""
    child = child_of(process.pid)
    process.kill()
    ended(process, 5.0)
    if child is not None:
        end = time.monotonic() + 10.0
        with suppress(OSError):  # which is gone
            os.kill(child, signal.SIGKILL)
            while time.monotonic() < end and Path(f"/proc/{child}/cmdline").read_bytes():
                time.sleep(0.05)


def _has_checkpoint(out: Path) -> bool:
    folder = out / "checkpoints"
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def _share(out: Path, name: str) -> float:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    shares = [row["workers"].get(name, {}).get("share", 0.0) for row in rows if "workers" in row]
    return float(shares[-1])
