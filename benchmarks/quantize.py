"""How fast NF4 quantization and dequantization run on one core.

Usage: python benchmarks/quantize.py [--rows 4096] [--columns 4096]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np

from qlora_wgpu.quant import quantize_nf4


def best_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    shape = parser.parse_args()
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((shape.rows, shape.columns), dtype=np.float32)
    megabytes = 2 * weight.size / 1e6  # as bfloat16, the type most checkpoints have
    result: dict[str, object] = {"machine": platform.machine(), "shape": list(weight.shape)}
    for double_quant in (False, True):
        tensor = quantize_nf4(weight, 64, double_quant)
        kind = "double" if double_quant else "single"
        quantize = best_seconds(lambda d=double_quant: quantize_nf4(weight, 64, d))
        dequantize = best_seconds(tensor.dequantize)
        result[f"quantize_{kind}_bf16_MB_per_s"] = round(megabytes / quantize)
        result[f"dequantize_{kind}_bf16_MB_per_s"] = round(megabytes / dequantize)
        result[f"bits_per_weight_{kind}"] = round(8 * tensor.nbytes / weight.size, 3)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
