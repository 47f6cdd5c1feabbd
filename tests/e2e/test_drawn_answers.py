"""Objectives over answers of drawn models and lengths, against what TRL's losses are of them.

``tests/references/record_answers.py`` records them (tests/references/answers).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from references.projections import distance, projections
from references.seeded import adapter, weights

from campaigns.drawn_answers import Answer, Asked, ours, scaled
from campaigns.drawn_models import profiles, write_model
from e2e.test_family_types import normalize, shapes
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.config import Config
from qlora_wgpu.ops.preference import Preference

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[1] / "references/answers"
RECORDED = sorted(path.stem for path in FOLDER.glob("*.npz"))


@pytest.mark.parametrize("name", RECORDED)
def test_against_trl(device, tmp_path, monkeypatch, name):
    recorded = np.load(FOLDER / f"{name}.npz")
    told = json.loads(str(recorded["case"]))
    step = Asked(
        Preference(**told["given"]), [Answer(**each) for each in told["answers"]],
        Config.model_validate(told["run"]), told["from_adapter"],
    )  # fmt: skip
    write_model(tmp_path / "model", told["config"], normalize(weights(*shapes(told["config"]))))
    ways = profiles(device)
    way = sorted(ways)[RECORDED.index(name) % len(ways)]  # every case in one of them
    monkeypatch.setattr(device, "profile", ways[way])
    lora, quant = LoraConfig(**told["lora"]), QuantConfig(**told["quant"])
    model = QLoRAModel.from_pretrained(tmp_path / "model", lora, quant, "float32", device)
    start = adapter({n: a.shape for n, a in model.adapter_state_dict().items()})
    normalize(start)
    got = ours(model, step, scaled(start, told["factor"]))

    metrics = json.loads(str(recorded["metrics"]))
    assert got.loss == pytest.approx(float(recorded["loss"]), rel=2e-5, abs=1e-6)
    for metric, value in got.metrics.items():
        assert value == pytest.approx(metrics[metric], rel=2e-5, abs=2e-5), metric
    names = [str(each) for each in recorded["names"]]
    assert sorted(got.gradients) == names
    whole = np.linalg.norm(recorded["norms"])
    for each, norm, expected in zip(names, recorded["norms"], recorded["gradients"], strict=True):
        off = distance(projections(each, got.gradients[each]), expected)
        # What of a gradient is nothing but rounding is held to the whole, as in test_drawn_shapes.
        assert off <= 5e-5 * max(norm, 0.01 * whole), (each, off / norm)
