"""Records steps of bitsandbytes' AdamW8bit on the CPU: ``tests/ops/adamw_8bit.npz``.

    python tests/references/record_adamw_8bit.py csrc/kernels.cu

With torch 2.13.0 and bitsandbytes 0.50.2. Parameters and gradients follow from a seed
(``eight_bit_case``); the file holds what each step made of them.

On a CPU bitsandbytes finds codes through a table of 65,536 points, on CUDA by a search. The file
also holds the codes that this search, ``quantize_2D`` in bitsandbytes' own source, compiled by c++,
finds for the numbers of ``searched``.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[1] / "ops" / "adamw_8bit.npz"
SHAPES = {"odd": (37, 131), "even": (16, 264), "small": (5, 83)}  # under 4,096 elements: float32
STEPS, LR, BETAS, EPS, DECAY = 3, 1e-2, (0.9, 0.999), 1e-8, 0.1


def eight_bit_case(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """A tensor's start and its gradients, float32: some zero, some huge and some tiny."""
    shape = SHAPES[name]
    rng = np.random.default_rng(list(SHAPES).index(name))
    start = rng.standard_normal(shape).astype(np.float32)
    gradients = []
    for step in range(STEPS):
        g = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 0, shape)).reshape(-1)
        g[rng.random(g.size) < 0.05] = 0
        g[256:512] *= 1e8
        g[512:768] *= 1e-8
        g[768:1400] = 0  # whole blocks among them
        g[1400:1536] *= step  # which begin at the second step
        gradients.append(g.reshape(shape).astype(np.float32))
    return start, gradients


def searched(signed: bool, values: np.ndarray) -> np.ndarray:
    """float32 numbers from -1 or 0 to 1, of all sizes, and the values of the codes themselves."""
    rng = np.random.default_rng(7)
    x = np.concatenate([10.0 ** rng.uniform(-8, 0, 2000), rng.random(2000), [0.0]])
    if signed:
        x = np.concatenate([x, -x])
    return np.concatenate([x.astype(np.float32), values])


def _cuda_codes(source: Path, signed: bool) -> np.ndarray:
    from bitsandbytes.functional import create_dynamic_map

    text = source.read_text(encoding="utf-8")
    found = re.search(r"template <int SIGNED>.*?quantize_2D\(.*?\n}\n", text, re.DOTALL)
    assert found
    code = f"""
#define __device__
#define __forceinline__
#define __restrict__
{found[0]}
extern "C" void codes(float* map, float* x, unsigned char* out, int n) {{
    float quadrants[] = {{map[63], map[127], map[191]}};
    for (int i = 0; i < n; i++) out[i] = quantize_2D<{int(signed)}>(quadrants, map, x[i]);
}}"""
    values = create_dynamic_map(signed=signed).numpy()
    x = searched(signed, values)
    out = np.zeros(x.size, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "codes.so"
        compiler = ["c++", "-x", "c++", "-", "-shared", "-fPIC", "-O1", "-o", str(library)]
        subprocess.run(compiler, input=code.encode(), check=True)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (values, x, out))
        ctypes.CDLL(str(library)).codes(*pointers, ctypes.c_int(x.size))
    return out


def _record(source: Path) -> None:
    import torch
    from bitsandbytes.optim import AdamW8bit

    arrays = {f"cuda.{int(signed)}": _cuda_codes(source, signed) for signed in (True, False)}
    for name in SHAPES:
        start, gradients = eight_bit_case(name)
        p = torch.nn.Parameter(torch.from_numpy(start))
        optimizer = AdamW8bit([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for t, gradient in enumerate(gradients, start=1):
            p.grad = torch.from_numpy(gradient)
            optimizer.step()
            state = optimizer.state[p]
            arrays[f"{name}.p.{t}"] = p.detach().numpy().reshape(-1).copy()
            for key in ("state1", "state2", "absmax1", "absmax2"):
                if key in state:
                    arrays[f"{name}.{key}.{t}"] = state[key].numpy().reshape(-1).copy()
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    _record(Path(sys.argv[1]))
