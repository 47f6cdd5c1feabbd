"""Models of sizes and kinds drawn at random against recorded PyTorch (tests/references/shapes)."""

import json
from pathlib import Path

import numpy as np
import pytest
from references.projections import distance, projections
from references.seeded import adapter, weights

from campaigns.drawn_models import Drawn, profiles, write_model
from e2e.test_family_types import normalize, shapes
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[1] / "references/shapes"
RECORDED = sorted(path.stem for path in FOLDER.glob("*.npz"))


@pytest.mark.parametrize("name", RECORDED)
def test_against_pytorch(device, tmp_path, monkeypatch, name):
    recorded = np.load(FOLDER / f"{name}.npz")
    told = json.loads(str(recorded["case"]))
    batch = (recorded[key].astype(np.int64) for key in ("ids", "mask", "labels"))
    case = Drawn(told["config"], LoraConfig(**told["lora"]), QuantConfig(**told["quant"]), *batch)
    write_model(tmp_path / "model", case.config, normalize(weights(*shapes(case.config))))
    ways = profiles(device)
    way = sorted(ways)[RECORDED.index(name) % len(ways)]  # every case in one of them
    monkeypatch.setattr(device, "profile", ways[way])
    model = QLoRAModel.from_pretrained(tmp_path / "model", case.lora, case.quant, "float32", device)
    start = adapter({n: a.shape for n, a in model.adapter_state_dict().items()})
    normalize(start)
    model.load_adapter(start)

    logits = model.logits(case.ids, case.mask)
    rows = np.concatenate([logits[s.row, s.first : s.first + len(s.ids)] for s in case.samples])
    off = distance(projections("logits", rows), recorded["logits"])
    assert off <= 2e-5 * recorded["logits_norm"], off  # float32 sums in another order
    loss, gradients = model.loss_and_grads(case.ids, case.labels, case.mask)
    assert abs(loss - recorded["loss"]) <= 1e-5 * abs(recorded["loss"])
    names = [str(each) for each in recorded["names"]]
    assert sorted(gradients) == names
    whole = np.linalg.norm(recorded["norms"])
    for each, norm, expected in zip(names, recorded["norms"], recorded["gradients"], strict=True):
        off = distance(projections(each, gradients[each]), expected)
        # Measured at most 1e-5; what of a gradient is nothing but rounding is held to the whole.
        assert off <= 5e-5 * max(norm, 0.01 * whole), (each, off / norm)
