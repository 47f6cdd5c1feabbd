"""A short form of the campaign: a small Llama on a GPU that allows no more than WebGPU promises."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.tiny import CONFIG

from campaigns import adapter_limits, drawn_models
from campaigns.drawn_limits import BINDING, PROMISED, WORKGROUPS, Drawn, whole
from qlora_wgpu import LoraConfig, QuantConfig

LEAST = {name: values[0] for name, values in PROMISED.items()}


@pytest.mark.parametrize("way", ["buffers", "gpu"])
def test_adapter_limits(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, 9))
    config = {**CONFIG, "num_hidden_layers": 1, "vocab_size": 700}
    case = drawn_models.Drawn(config, LoraConfig(r=4), QuantConfig(), ids, np.ones_like(ids), ids)
    monkeypatch.setattr(adapter_limits, "small_model", lambda rng: case)
    trial = adapter_limits.Trial(random.Random(2), tmp_path, way)
    for binding in (60_000, 2_000):  # some is cut, and a row of logits cannot be
        limits = {**LEAST, BINDING: binding, WORKGROUPS: 64}
        outcome, wrong = trial.outcome(Drawn(way, replace(whole(way), limits=limits), 64))
        assert not wrong and ("refused" in outcome) == (binding == 2_000), outcome
