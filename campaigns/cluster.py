"""A run on several machines whose workers are killed, stopped, cut off and starved: the same bits.

usage: python -m campaigns.cluster [--count FAULTS] [--seed S] [--seconds T]

Each machine is a network namespace, so this takes root; all speak TLS. First come the machines that
must not be let in, then a run that nobody disturbs, though its owner cannot connect to one worker,
then one with faults at random moments, then one whose owner is killed and which goes on with fewer
workers, of whom one joins late. All must leave the adapter and the losses of a run without a
cluster. OBJECTIVE=kto (or dpo, orpo) learns from answers that are better and worse.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from campaigns.cluster_machines import (
    ROOT,
    WORKERS,
    Machines,
    can_be_made,
    child_of,
    ended,
    machines,
)
from campaigns.support import Tally, campaign

RECOVERED = 10.0  # seconds without a step, beyond the time that a fault was set to last
_STEPS_PER_FAULT = 30  # on a quiet machine; on a busy one more time is left over
# Those that a late worker finds are as many less 24, and it takes some ten of them to get ready.
_LEAST_STEPS = 120
_STRANGER = """
import sys, types
module = types.ModuleType("qlora_wgpu.version")
module.__version__ = "0.0.1"
sys.modules["qlora_wgpu.version"] = module
"""


@dataclass
class Fault:
    """What was done to whom, and how long the run stood still around it."""

    kind: str
    worker: str
    lasted: float
    begun: float
    standstill: float = 0.0


def cluster(count: int, seed: int, tally: Tally) -> None:
    """The campaign."""
    if not can_be_made():
        sys.exit("this campaign makes network namespaces: run it as root, with iproute2")
    with machines(os.environ.get("OBJECTIVE", "sft")) as all_machines:
        strangers(all_machines, tally)
        steps = max(_LEAST_STEPS, _STEPS_PER_FAULT * count)
        alone = all_machines.qlora(
            "owner", "alone", "train", *all_machines.settings("alone", f"train.max_steps={steps}")
        )
        if ended(alone, 1800.0) != 0:
            tally.fail("the run without a cluster failed", all_machines.log("alone"))
            return
        for name in WORKERS:
            all_machines.start_worker(name)
        undisturbed(all_machines, tally, steps)
        disturbed(all_machines, tally, steps, count, seed)
        owner_killed(all_machines, tally, steps)


def strangers(machines: Machines, tally: Tally) -> None:
    """Who must not be let in, and is told so in one sentence."""
    foreign = str(machines.folder / "foreign")
    plain = machines.address.replace("tls", "tcp")
    for what, options, sentence in (
        ("foreign certificate", ["--certificates", foreign], "certificate of another cluster"),
        ("no certificate", [], "requires certificates"),
        ("plain tcp", [], "anyone on the network could run code"),
        ("plain tcp, allowed", ["--allow-plain-tcp"], "requires TLS"),
    ):
        address = plain if "tcp" in what else machines.address
        log = what.replace(" ", "-")
        machines.wait_for("scheduler", "Scheduler at", 30.0)
        process = machines.qlora("one", log, "worker", address, "--patience", "5", *options)
        judge_refusal(what, ended(process, 60.0), machines.log(log), sentence, tally)
    (machines.folder / "stranger").mkdir()
    (machines.folder / "stranger" / "sitecustomize.py").write_text(_STRANGER)
    other = f"{machines.folder / 'stranger'}{os.pathsep}{ROOT}"
    base = other_base(machines.folder / "other-base")
    for what, options, environ, sentence in (
        ("another version", [], {"PYTHONPATH": other}, "0.0.1"),
        ("another model", ["--model", str(base)], {}, "base weights differ"),
        ("no model", ["--model", "/nowhere"], {}, "/nowhere"),
    ):
        log = what.replace(" ", "-")
        machines.start_worker("one", *options, **environ)
        process = machines.train(log, "train.max_steps=5", "cluster.patience=40")
        judge_refusal(what, ended(process, 120.0), machines.log(log), sentence, tally)
        machines.end("one")
        if not re.search(f"error: .*{sentence}", machines.log("one")):
            tally.fail(f"{what}: the worker's own user is not told", machines.log("one"))


def judge_refusal(what: str, code: int, text: str, sentence: str, tally: Tally) -> None:
    if "Traceback" in text:
        tally.fail(f"{what}: traceback", text[-2000:])
    elif code != 2 or sentence not in text:
        tally.fail(f"{what}: exit code {code}", text[-1000:])
    else:
        tally.add(f"refused with a sentence: {what}")
    line = next((line for line in text.splitlines() if sentence in line), "")
    print(f"{what}: {line}", flush=True)


def other_base(folder: Path) -> Path:
    """The demo's base with one weight changed."""
    folder.mkdir()
    for file in (ROOT / "demo" / "base").iterdir():
        content = bytearray(file.read_bytes())
        if file.name.endswith(".safetensors"):
            content[-1] ^= 1
        (folder / file.name).write_bytes(content)
    return folder


def undisturbed(machines: Machines, tally: Tally, steps: int) -> None:
    """A run without faults, in which one worker's traffic passes through the scheduler."""
    for name in ("owner", WORKERS[0]):
        machines.net.isolate(name, isolated=True)
    process = machines.train("calm", f"train.max_steps={steps}")
    if ended(process, 900.0) != 0:
        tally.fail("a calm run failed", machines.log("calm")[-2000:])
    else:
        judge(machines, "calm", tally)
        judge_shares(machines, tally)
    for name in ("owner", WORKERS[0]):
        machines.net.isolate(name, isolated=False)


def judge_shares(machines: Machines, tally: Tally) -> None:
    """Whether all have worked, the one that the owner cannot reach, too."""
    rows = (machines.folder / "calm" / "metrics.jsonl").read_text().splitlines()
    workers = [row.get("workers", {}) for row in map(json.loads, rows)]
    shares = {name: sum(w.get(name, {}).get("share", 0.0) for w in workers) for name in WORKERS}
    print("calm:", {name: round(share / len(workers), 2) for name, share in shares.items()})
    if "passes through the scheduler" not in machines.log("calm"):
        tally.fail("a worker behind a wall is not told of", machines.log("calm")[-2000:])
    elif min(shares.values()) <= 0:
        tally.fail("a worker behind a wall does nothing", str(shares))
    else:
        tally.add("worked through the scheduler")


def disturbed(machines: Machines, tally: Tally, steps: int, count: int, seed: int) -> None:
    """Faults at random moments of one run, at one worker at a time."""
    rng = random.Random(seed)
    process = machines.train("disturbed", f"train.max_steps={steps}")
    progress = Progress(machines.folder / "disturbed" / "metrics.jsonl")
    kinds = [("killed", "stopped", "cut off", "starved", "killed for good")[n % 5]
             for n in range(count)]  # fmt: skip
    rng.shuffle(kinds)
    faults: list[Fault] = []
    progress.watch(process, until=lambda: len(progress.times) >= 3)
    for kind in kinds:
        progress.watch(process, seconds=rng.uniform(0.2, 3.0))
        if process.poll() is not None:
            break
        fault = Fault(kind, rng.choice(WORKERS), rng.uniform(1.0, 6.0), time.monotonic())
        faults.append(fault)
        _commit(machines, fault, progress, process)
        fault.standstill = progress.longest_gap(fault.begun)
        print(
            f"step {len(progress.times)}: {fault.kind} {fault.worker}, for {fault.lasted:.1f} s; "
            f"no step for {fault.standstill:.1f} s (load {os.getloadavg()[0]:.0f})",
            flush=True,
        )
    progress.watch(process, seconds=900.0)
    code = ended(process, 1.0)
    if code != 0:
        tally.fail(f"the disturbed run ended with {code}", machines.log("disturbed")[-2000:])
    else:
        judge(machines, "disturbed", tally)
    _tell(faults, count, progress, tally)


def _commit(
    machines: Machines, fault: Fault, progress: Progress, process: subprocess.Popen[Any]
) -> None:
    """A fault, what mends it, and the wait until its worker is connected again."""
    name, pid = fault.worker, machines.computing(fault.worker)
    connected = machines.log(name).count("is connected")
    if pid is None:
        return
    if fault.kind == "stopped":
        os.kill(pid, signal.SIGSTOP)
        progress.watch(process, seconds=fault.lasted)
        os.kill(pid, signal.SIGCONT)
    elif fault.kind == "cut off":
        machines.net.cable(name, plugged=False)
        progress.watch(process, seconds=fault.lasted)
        machines.net.cable(name, plugged=True)
    elif fault.kind == "starved":
        mapped = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
        resource.prlimit(pid, resource.RLIMIT_AS, (mapped, resource.RLIM_INFINITY))
        progress.watch(process, seconds=fault.lasted)
        with suppress(ProcessLookupError):  # as a system does that runs out of memory
            os.kill(pid, signal.SIGKILL)
    elif fault.kind == "killed":
        os.kill(pid, signal.SIGKILL)
    else:  # another joins in its place
        machines.running[name].kill()
        ended(machines.running[name], 5.0)
        machines.start_worker(name)
    if fault.kind in ("killed", "killed for good", "starved"):
        progress.watch(
            process,
            seconds=40.0,
            until=lambda: machines.log(name).count("is connected") > connected,
        )
    progress.watch(process, seconds=1.0)


def _tell(faults: list[Fault], count: int, progress: Progress, tally: Tally) -> None:
    steps = [b - a for a, b in pairwise(progress.times)]
    usual = statistics.median(steps) if steps else 0.0
    for kind in sorted({fault.kind for fault in faults}):
        standing = sorted(f.standstill for f in faults if f.kind == kind)
        print(
            f"{kind}: {len(standing)} times, no step for {statistics.median(standing):.1f} s in "
            f"the median and {standing[-1]:.1f} s at most (a step takes {usual:.2f} s)"
        )
    for fault in faults:
        waits = fault.lasted if fault.kind in ("stopped", "cut off") else 0.0
        tally.add(f"survived: {fault.kind}")
        if fault.standstill > RECOVERED + waits:
            tally.fail(
                f"{fault.kind}: not recovered in time",
                f"{fault.standstill:.1f} s, of which it was set to last {fault.lasted:.1f}",
            )
    if len(faults) < count:
        tally.fail("the run ended before all faults", f"{len(faults)} of {count}")


_TIMES = re.compile("second|workers|time")


def judge(machines: Machines, out: str, tally: Tally) -> None:
    """Compares a run's adapter and losses with those of the run without a cluster."""
    wrong = [what for what in (adapter_of, rows_of) if what(machines.folder / out)
             != what(machines.folder / "alone")]  # fmt: skip
    for what in wrong:
        tally.fail(f"{out}: another {what.__name__.removesuffix('_of')}", out)
    if not wrong:
        tally.add(f"the same adapter and losses: {out}")


def adapter_of(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not _TIMES.search(k)} for row in rows]


class Progress:
    """When a run's steps were done, as its rows say.

    Attributes:
        times: By the clock of this process.
    """

    def __init__(self, rows: Path) -> None:
        self._rows = rows
        self.times: list[float] = []

    def watch(
        self, process: subprocess.Popen[Any], *, seconds: float = 120.0, until: Any = None
    ) -> None:
        """Looks until a time has passed, the process has ended or something is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None and not (until and until()):
            self._look()
            time.sleep(0.02)
        self._look()

    def longest_gap(self, since: float) -> float:
        """Seconds between two steps, the longest since a moment, the present included."""
        times = [t for t in self.times if t < since][-1:] + [t for t in self.times if t >= since]
        times.append(time.monotonic())
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def _look(self) -> None:
        with suppress(OSError):
            done = self._rows.read_bytes().count(b'"loss"')
            self.times += [time.monotonic()] * (done - len(self.times))


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


if __name__ == "__main__":
    campaign("cluster", cluster, 30)
