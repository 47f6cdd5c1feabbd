"""The values of a drift, against a computation by hand."""

from __future__ import annotations

import numpy as np
import pytest

from qlora_wgpu.runs import exporting as module
from qlora_wgpu.runs.exporting import drift_between


def logits(seed: int, *shapes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) * 3 for shape in shapes]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("at_once", [1 << 22, 20])
def test_figures(monkeypatch, at_once) -> None:
    monkeypatch.setattr(module, "_CHUNK", at_once)
    before, after = logits(0, (5, 7), (3, 7)), logits(1, (5, 7), (3, 7))
    found = drift_between(before, after, "of nobody's")
    p, q = (softmax(np.concatenate(each)) for each in (before, after))
    apart = np.abs(np.concatenate(before).astype(np.float64) - np.concatenate(after))
    assert found.tokens == 8
    assert found.mean == pytest.approx(apart.mean())
    assert found.largest == pytest.approx(apart.max())
    assert found.divergence == pytest.approx((p * np.log(p / q)).sum(-1).mean())
    assert found.knowledge == pytest.approx((p * np.log(p / p.mean(0))).sum(-1).mean())
    assert found.same == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert found.lost > 1  # an unrelated model has lost more than all


def test_the_same_model() -> None:
    before = logits(0, (5, 7))
    found = drift_between(before, before, "")
    assert (found.mean, found.largest, found.divergence, found.same) == (0, 0, 0, 1)
    assert found.knowledge > 0.5


def test_what_is_no_number_is_told() -> None:
    before, after = logits(0, (5, 7)), logits(0, (5, 7))
    after[0][2, 3] = np.nan
    found = drift_between(before, after, "")
    assert np.isnan(found.largest) and np.isnan(found.lost)
