"""All that a GPU machine can tell, unattended, within ten minutes; results are kept as they come.

usage: python benchmarks/gpu.py FOLDER [--peft PYTHON] [--minutes N] [--shapes NAME ...]
           [--seq N ...] [--no-tests]

FOLDER gets doctor.txt (GPUs, limits, features), gemm-*.json (each variant's GFLOP/s beside the
card's float32 ceiling), bench-*.json (tokens a second, memory, every kernel), tests.txt (each
kernel and gradient against its reference on this card), and summary.json, written anew after every
part. PYTHON is an interpreter with torch and PEFT, for the same steps on CUDA: NF4 where it has
bitsandbytes, plain bfloat16 in any case. A part that does not fit into the time left is left out
and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shapes import config_of

HERE = Path(__file__).parent
WARM_UP = 2
SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b")
TORCH_CEILING = """
import json, time, torch
def rate(dtype, n=8192, rounds=10):
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in "ab")
    for _ in range(3): a @ b
    torch.cuda.synchronize(); begin = time.perf_counter()
    for _ in range(rounds): a @ b
    torch.cuda.synchronize()
    return round(2 * n**3 * rounds / (time.perf_counter() - begin) / 1e9)
torch.backends.cuda.matmul.allow_tf32 = False
print(json.dumps({"float32_gflops": rate(torch.float32), "float16_gflops": rate(torch.float16)}))
"""


class Session:
    """Runs parts as processes until the time is up, and keeps what they give."""

    def __init__(self, folder: Path, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.summary: dict[str, Any] = {}
        self._ends = time.monotonic() + 60 * minutes

    def run(self, name: str, command: list[str], least: float, **environment: str) -> str | None:
        """Runs one part; returns what it printed, or None where it failed or was left out."""
        left = self._ends - time.monotonic()
        if left < least:
            self.note(name, f"left out: {left:.0f} s left")
            return None
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=HERE.parent, env={**os.environ, **environment}, text=True,
                capture_output=True, timeout=left,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.note(name, f"stopped after {left:.0f} s")
            return None
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        if done.returncode:
            self.note(name, "failed: " + (done.stderr or done.stdout)[-600:])
            return None if name != "tests" else done.stdout
        return done.stdout

    def note(self, name: str, value: Any) -> None:
        """Keeps a result."""
        self.summary[name] = value
        print(f"{name}: {value}"[:300], flush=True)
        text = json.dumps(self.summary, indent=1) + "\n"
        (self.folder / "summary.json").write_text(text)


def bench(session: Session, shape: str, seq: int, backend: str) -> None:
    name = f"bench-{shape}-{seq}-{backend}"
    file = session.folder / f"{name}.json"
    command = [sys.executable, "-m", "qlora_wgpu", "bench", shape, "--seq", str(seq)]
    command += ["--backend", backend, "--tune", "--json", str(file)]
    if session.run(name, command, 45) is None or not file.exists():
        return
    measurement = json.loads(file.read_text())
    session.note(
        name,
        {
            "tokens_per_second": measurement["tokens_per_second"],
            "gflops": round(measurement["flops_per_second"] / 1e9),
            "memory_mib": round(measurement["memory"]["peak"] / 2**20),
            "host_share": measurement["host_share"],
            "device": measurement["device"],
        },
    )


def peft(session: Session, python: str, shape: str, seq: int, quant: str) -> None:
    name = f"peft-{quant}-{shape}-{seq}"
    config = session.folder / f"{shape}.config.json"
    config.write_text(json.dumps(config_of(shape)))
    command = [python, str(HERE / "peers" / "peft_step.py"), str(config.resolve())]
    command += ["--seq", str(seq), "--compute", "bfloat16", "--quant", quant, "--steps", "8"]
    printed = session.run(name, command, 30)
    if printed is None:
        return
    result = json.loads(printed.splitlines()[-1])
    session.note(
        name,
        {
            "tokens_per_second": round(seq / statistics.median(result["seconds"][WARM_UP:]), 1),
            "memory_mib": round(result.get("device_mib", 0)),
            "device": result.get("device"),
            "versions": result["versions"],
        },
    )


def ratios(session: Session) -> dict[str, float]:
    """Ours to PEFT's tokens per second, wherever both ran."""
    quotients = {}
    for ours, value in list(session.summary.items()):
        if not ours.startswith("bench-") or not isinstance(value, dict):
            continue
        shape_seq, backend = ours.removeprefix("bench-").rsplit("-", 1)
        for quant in ("nf4", "none"):
            theirs = session.summary.get(f"peft-{quant}-{shape_seq}")
            if isinstance(theirs, dict):
                rate = value["tokens_per_second"]["median"] / theirs["tokens_per_second"]
                quotients[f"{shape_seq} {backend} / peft-{quant}"] = round(rate, 3)
    return quotients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peft", help="Python with torch and PEFT")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--seq", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--no-tests", action="store_true")
    args = parser.parse_args()
    session = Session(args.folder, args.minutes)
    backends = ["wgpu"] + (["dawn"] if find_spec("wgpudawn") else [])
    doctor = session.run("doctor", [sys.executable, "-m", "qlora_wgpu", "doctor"], 5)
    (args.folder / "doctor.txt").write_text(doctor or "")
    quants = []
    if args.peft:
        printed = session.run("torch", [args.peft, "-c", TORCH_CEILING], 20)
        if printed:
            session.note("torch ceilings", json.loads(printed))
        check = [args.peft, "-c", "import bitsandbytes"]
        nf4 = session.run("bitsandbytes", check, 10) is not None
        quants = ["nf4", "none"] if nf4 else ["none"]
    for backend in backends:
        file = args.folder / f"gemm-{backend}.json"
        command = [sys.executable, str(HERE / "gemm.py"), "--backend", backend, "--json", str(file)]
        if session.run(f"gemm-{backend}", command, 20) is not None:
            timings = json.loads(file.read_text())
            best = {}
            for kind in ("nt", "nn"):
                rows = [r for r in timings["products"] if f"{kind}_gflops" in r]
                best[kind] = max(rows, key=lambda r: r[f"{kind}_gflops"], default=None)
            ceiling = timings["float32_ceiling_gflops"]
            session.note(f"gemm-{backend}", {"float32_ceiling_gflops": ceiling, "best": best})
    for seq in args.seq:
        for shape in args.shapes:
            for quant in quants:
                peft(session, args.peft, shape, seq, quant)
            for backend in reversed(backends):
                bench(session, shape, seq, backend)
            session.note("ours / peft", ratios(session))
    if not args.no_tests:
        for backend in backends:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += [
                "tests/ops",
                "tests/gpu",
                "tests/selfcheck",
                "tests/e2e/test_recorded_references.py",
            ]
            printed = session.run("tests", command, 20, QLORA_WGPU_BACKEND=backend)
            if printed is not None:
                (args.folder / f"tests-{backend}.txt").write_text(printed)
                session.note(f"tests-{backend}", printed.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
