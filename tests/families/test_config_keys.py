"""Every key of config.json as transformers reads it: recorded logits of small models.

``tests/references/configs.py`` makes the recordings, from many more trials.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from references import numpy_model
from references.config_trials import changed
from references.configs import SHOWN
from references.seeded import norm_offset, samples, weights

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import find_family, known_families

RECORDED = np.load(Path(__file__).with_name("config_keys.npz"))
TRIALS = json.loads(str(RECORDED["trials"]))
SHARES = 8


def last_logits(config, ids):
    architecture = find_family(config).read(config)
    arrays = weights(numpy_model.names(architecture), norm_offset(config["model_type"]))
    return numpy_model.logits(config, arrays, ids)[-1, :SHOWN]


@pytest.mark.slow
@pytest.mark.cover("values")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("model_type", known_families())
def test_keys_mean_what_they_do_in_transformers(model_type, share):
    ids = samples((20,))[0]
    trials = [(i, changes) for i, (kind, changes) in enumerate(TRIALS) if kind == model_type]
    assert len(trials) > 20
    for index, changes in trials[share::SHARES]:
        expected = RECORDED["logits"][index]
        got = last_logits(changed(model_type, changes), ids)
        scale = np.abs(expected).max()  # of a dozen of the logits that agree to 1e-5 in all
        assert np.abs(got - expected).max() <= 1e-4 * scale, changes


REFUSED = {
    "both ways": ("llama", {"is_causal": False}, "is_causal"),
    "both ways, images": ("gemma3", {"is_causal": None}, "is_causal"),
    "share of scaled heads": (
        "llama",
        {"partial_rotary_factor": 0.67, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "partial_rotary_factor 0.67",
    ),
    "one rotation": ("gemma3_text", {"rope_parameters": {"rope_theta": 77.0}}, "full_attention"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_transformers_computes_and_we_do_not_is_refused(case):
    model_type, changes, message = REFUSED[case]
    config = changed(model_type, changes)
    with pytest.raises(UnsupportedModelError, match=message):
        find_family(config).read(config)


def test_a_bound_that_transformers_ignores_is_told():
    config = changed("gemma3_text", {"attn_logit_softcapping": 0.7})
    (note,) = find_family(config).read(config).notes
    assert "attn_logit_softcapping = 0.7" in note
    plain = changed("gemma3_text", {})
    assert not find_family(plain).read(plain).notes
