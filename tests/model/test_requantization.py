"""How far weights moved that had to be quantized anew, by hand."""

import numpy as np
import pytest

from qlora_wgpu.config import QuantConfig
from qlora_wgpu.model.checkpoint_reader import Requantization


def test_movements_add_up_over_layers_and_processes():
    rng, moved = np.random.default_rng(1), Requantization()
    weights = [rng.standard_normal((4, 64)).astype(np.float32) * size for size in (1, 10)]
    quantized = [moved.quantize(weight, QuantConfig()).dequantize() for weight in weights]
    apart = sum(((q - w) ** 2).sum() for q, w in zip(quantized, weights, strict=True))
    whole = sum((w**2).sum() for w in weights)
    assert moved.count == 2 and moved.whole == pytest.approx(whole)
    assert moved.relative_rms == pytest.approx(np.sqrt(apart / whole))
    both = Requantization(1, 2.0, 3.0)
    both.add(moved)
    assert both.since(Requantization(1, 2.0, 3.0)) == pytest.approx(moved)
    assert Requantization().relative_rms == 0.0


def test_it_is_told_once():
    moved = Requantization(3, 1.0, 100.0)
    with pytest.warns(UserWarning, match=r"3 linear layers .* changed their weights by 10 %"):
        moved.warn()
    moved.warn()
