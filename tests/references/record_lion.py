"""Records steps of bitsandbytes' Lion on the CPU: ``tests/ops/lion.npz``.

    python tests/references/record_lion.py

With torch 2.13.0 and bitsandbytes 0.50.2. Parameters and gradients follow from a seed
(``lion_case``); the file holds what each step made of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[1] / "ops" / "lion.npz"
STEPS, LR, BETAS, DECAY = 5, 1e-2, (0.9, 0.99), 0.1
ELEMENTS = 1216


def lion_case() -> tuple[np.ndarray, list[np.ndarray]]:
    """Parameters and gradients, float32: of all sizes, some zero, some of them always."""
    rng = np.random.default_rng(21)
    start = rng.standard_normal(ELEMENTS).astype(np.float32)
    gradients = []
    for _ in range(STEPS):
        g = rng.standard_normal(ELEMENTS) * 10.0 ** rng.uniform(-6, 2, ELEMENTS)
        g[rng.random(ELEMENTS) < 0.1] = 0
        g[:64] = 0
        gradients.append(g.astype(np.float32))
    return start, gradients


def _record() -> None:
    import torch
    from bitsandbytes.optim import Lion

    start, gradients = lion_case()
    p = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = Lion([p], lr=LR, betas=BETAS, weight_decay=DECAY)
    arrays = {}
    for t, gradient in enumerate(gradients, start=1):
        p.grad = torch.from_numpy(gradient)
        optimizer.step()
        arrays[f"p.{t}"] = p.detach().numpy().copy()
        arrays[f"m.{t}"] = optimizer.state[p]["state1"].numpy().copy()
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    _record()
