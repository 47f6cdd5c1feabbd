"""What a step costs that is shared among machines, and how many of them pay.

usage: python benchmarks/cluster.py measure FILE [--repeats N]   over loopback and slower cables
       python benchmarks/cluster.py tables FILE                  tables from what was measured

`measure` takes root: owner and worker are in network namespaces, tc (tbf) limits the speed of the
cable between them, and delay_line.py its length. `tables` needs neither.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from campaigns.cluster_machines import Network, network  # noqa: E402
from qlora_wgpu.cluster.security import make_certificates  # noqa: E402

SIZES = (10, 50, 168)
# Gbit/s (None: loopback), milliseconds there and back, whether with TLS
CABLES = [(None, 0, False), (None, 0, True)]
CABLES += [(gigabits, 0, tls) for gigabits in (10, 1) for tls in (False, True)]
CABLES += [(gigabits, ms, True) for gigabits in (10, 1) for ms in (1, 20)]

# A cable of 10 Gbit/s is faster than two processors with TLS, as loopback shows.
_RECKONED = {(1, 1, True): "1 Gbit/s", (None, 0, True): "10 Gbit/s, at what TLS reached"}


def _dask(program: str, *options: str) -> list[str]:
    return [sys.executable, "-c", f"from distributed.cli.{program} import main; main()", *options]


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each cable and size."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        certificates = make_certificates(Path(folder) / "c", 2).folder
        for gigabits, milliseconds, tls in CABLES:
            with network(("owner", "worker")) as net:
                found = _exchange(net, gigabits, milliseconds, certificates if tls else None,
                                  repeats)  # fmt: skip
            for row in found:
                own = {"gigabits": gigabits, "milliseconds": milliseconds, "tls": tls, **row}
                print(json.dumps(own), flush=True)
                rows.append(own)
    return rows


def _exchange(
    net: Network, gigabits: float | None, milliseconds: float, folder: Path | None, repeats: int
) -> list[dict[str, Any]]:
    address, worker = net.addresses["owner"], "owner" if gigabits is None else "worker"
    protocol = "tcp" if folder is None else "tls"
    with ExitStack() as stack:
        if milliseconds and gigabits:
            stack.enter_context(_line(net, gigabits, milliseconds))
            address = "10.98.0.1"
        elif gigabits:
            net.shape("worker", gigabits)
        scheduler = f"{protocol}://{'127.0.0.1' if gigabits is None else address}:8786"
        tls: list[str] = []
        if folder is not None:
            for option, name in (("ca-file", "ca"), ("cert", "cert"), ("key", "key")):
                tls += [f"--tls-{option}", str(folder / f"{name}.pem")]
        quiet = ["--no-dashboard", "--protocol", protocol, *tls]
        _start(stack, net, "owner", _dask("dask_scheduler", "--host", scheduler, *quiet))
        _start(stack, net, worker, _dask(
            "dask_worker", scheduler, "--nthreads", "1", "--memory-limit", "0", "--no-nanny", *quiet
        ))  # fmt: skip
        peer = [str(ROOT / "benchmarks" / "cluster_peer.py"), scheduler, str(folder or "-")]
        command = [sys.executable, *peer, str(repeats), *map(str, SIZES)]
        owner = net.start("owner", command, stdout=subprocess.PIPE, env=_environ())
        out, _ = owner.communicate(timeout=400)
        return [json.loads(line) for line in out.splitlines()]


def _environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}


def _start(stack: ExitStack, net: Network, machine: str, command: list[str]) -> None:
    silence = subprocess.DEVNULL
    process = net.start(machine, command, stdout=silence, stderr=silence, env=_environ())
    stack.callback(process.wait)
    stack.callback(process.kill)


@contextmanager
def _line(net: Network, gigabits: float, milliseconds: float) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "delay_line.py"), net.namespace("owner"),
         net.namespace("worker"), str(gigabits), str(milliseconds)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Shape:
    """A model, and what a micro-batch of 1,024 tokens takes.

    Attributes:
        name: As people call it.
        megabytes: Of its adapter's float32 parameters, r 16 on all linear layers.
        seconds: Of a micro-batch on a worker.
    """

    name: str
    megabytes: float
    seconds: float


# 1B: measured on an H200 (1,313 tokens/s); the others by their parameters' number.
SHAPES = (Shape("1B", 45, 0.78), Shape("8B", 168, 5.1), Shape("70B", 828, 45.0))
WORKERS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Way:
    """How a step's sums travel.

    Attributes:
        name: For the table.
        blocks: Micro-batches that each worker computes in a step.
        tokens: Thousands of tokens of a micro-batch.
        share: Of float32's bytes that a gradient takes.
        tree: Whether workers pass parameters on and add gradients up among themselves.
    """

    name: str
    blocks: int = 1
    tokens: int = 1
    share: float = 1.0
    tree: bool = False


WAYS = (
    Way("1 micro-batch each"),
    Way("4 micro-batches each", blocks=4),
    Way("1 micro-batch of 4 × the tokens", tokens=4),
    Way("bf16 gradients", share=0.5),
    Way("a tree", tree=True),
)


def efficiency(shape: Shape, way: Way, workers: int, gigabytes: float, latency: float) -> float:
    """Share of its time that a worker computes.

    The owner's cable carries the parameters to each worker, one after the other, and a gradient for
    each micro-batch back. Those of early micro-batches come back while later ones are computed.

    Args:
        shape: The model.
        way: How sums travel.
        workers: Their number, each as fast as the other.
        gigabytes: Per second, each way, of the owner's cable, and in a tree of everybody's.
        latency: Seconds there and back.
    """
    compute = shape.seconds * way.tokens * way.blocks
    one = shape.megabytes / 1000 / gigabytes
    if way.tree:
        depth = math.ceil(math.log2(workers))
        return compute / (compute + depth * (2 * one + 2 * latency))
    down, up = workers * one, workers * way.share * one
    hidden = min(up * (way.blocks - 1), compute * (way.blocks - 1) / way.blocks)
    return compute / (compute + down + up * way.blocks - hidden + 2 * latency)


def show_tables(rows: list[dict[str, Any]]) -> None:
    """Prints Markdown: what was measured, and efficiencies by it."""
    print("| cable | TLS | " + " | ".join(f"{size} MB" for size in SIZES) + " | MB/s |")
    print("|---|---|" + "---|" * (len(SIZES) + 1))
    speeds: dict[str, float] = {}
    for gigabits, milliseconds, tls in CABLES:
        own = [r for r in rows if (r["gigabits"], r["milliseconds"], r["tls"])
               == (gigabits, milliseconds, tls)]  # fmt: skip
        if not own:
            continue
        halves = {r["megabytes"]: [min(r[way]) for way in ("down", "up")]
                  for r in own}  # fmt: skip
        speed = 2 * SIZES[-1] / sum(halves[SIZES[-1]])
        if (gigabits, milliseconds, tls) in _RECKONED:
            speeds[_RECKONED[gigabits, milliseconds, tls]] = speed
        name = "loopback" if gigabits is None else f"{gigabits} Gbit/s"
        cable = f"{name}, {milliseconds} ms" if milliseconds else name
        cells = " | ".join(f"{a:.2f} + {b:.2f}" for a, b in halves.values())
        print(f"| {cable} | {'yes' if tls else 'no'} | {cells} | {speed:,.0f} |")
    for name, speed in speeds.items():
        at = partial(efficiency, gigabytes=speed / 1000, latency=0.001)
        print(f"\n{name}: {speed:,.0f} MB/s\n")
        print("| | | " + " | ".join(map(str, WORKERS)) + " | half at |")
        print("|---|---|" + "---|" * (len(WORKERS) + 1))
        for shape in SHAPES:
            for way in WAYS:
                parts = [at(shape, way, n) for n in WORKERS]
                cells = " | ".join(f"{part:.0%}".replace("%", " %") for part in parts)
                half = next((n for n in range(1, 4097) if at(shape, way, n) < 0.5), "over 4,096")
                print(f"| {shape.name} | {way.name} | {cells} | {half} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "tables"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.what == "measure":
        options.file.write_text(
            json.dumps(measure(options.repeats), indent=1) + "\n", encoding="utf-8"
        )
    show_tables(json.loads(options.file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
