"""What torch is, on the same card: its versions, whether bitsandbytes works there, its ceilings.

usage: PYTHON benchmarks/gpu_torch.py OUT [--software]

OUT.json gets all of it. Without a card in torch's reach it fails, unless ``--software`` is given:
steps of PEFT on a processor would take the whole call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "numpy")
_ROUNDS, _WARM_UP = 10, 3
_WARM_UP_SECONDS = 1.0  # of a card, which raises its clock only under load
_MOST_ERROR = 0.2  # half of the widest gap between NF4's values is 0.15


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def seconds_of(work: Callable[[], Any], wait: Callable[[], Any], busy: float) -> float:
    begin = time.perf_counter()
    while True:
        for _ in range(_WARM_UP):
            work()
        wait()
        if time.perf_counter() - begin >= busy:
            break
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        work()
    wait()
    return (time.perf_counter() - begin) / _ROUNDS


def quantizes(torch: Any, device: str) -> float:
    """The error of weights that bitsandbytes made NF4 and back, relative to the largest."""
    from bitsandbytes import functional

    weight = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4")
    error = (functional.dequantize_4bit(codes, state) - weight).abs().max() / weight.abs().max()
    return float(error)


def ceilings(torch: Any, device: str) -> dict[str, float]:
    n = 8192 if device == "cuda" else 512
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    busy = _WARM_UP_SECONDS if device == "cuda" else 0.0
    torch.backends.cuda.matmul.allow_tf32 = False

    def rate(dtype: Any) -> float:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in "ab")
        return 2 * n**3 / seconds_of(lambda: a @ b, wait, busy)

    big = torch.zeros(n * n, device=device)
    return {
        "float32_flops": rate(torch.float32),
        "bfloat16_flops": rate(torch.bfloat16),
        "copy_bytes": 8 * big.numel() / seconds_of(big.clone, wait, busy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--software", action="store_true")
    args = parser.parse_args()
    print(versions(), flush=True)
    import peft
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.version.cuda, device, peft.__file__, flush=True)
    if device == "cpu" and not args.software:
        sys.exit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) reaches no card")
    error = quantizes(torch, device)
    if not error < _MOST_ERROR:
        sys.exit(f"bitsandbytes' NF4 is {error:.2f} away from the weights: it does not work here")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "versions": versions(),
        "nf4_error": error,
        **ceilings(torch, device),
    }
    print(json.dumps(found))
    Path(f"{args.out}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
