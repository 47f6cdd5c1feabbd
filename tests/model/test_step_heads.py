"""What a step makes of a model's head."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.model.steps import head_of

MODULES = SimpleNamespace(head="matrix", head_lora="pair", norms={"lm_head.bias": "bias"})


def architecture(softcap=None, bias=None):
    return SimpleNamespace(logit_softcap=softcap, head_bias=bias, logit_scale=3.0)


@pytest.mark.parametrize(
    ("softcap", "temperature", "scale", "expected"),
    [(None, 1.0, 3.0, None), (30.0, 1.0, 3.0, 30.0), (30.0, 0.5, 6.0, 60.0)],
)
def test_logits_are_divided_by_a_temperature(softcap, temperature, scale, expected):
    head = head_of(architecture(softcap), MODULES, temperature)
    assert (head.scale, head.softcap, head.bias) == (scale, expected, None)
    assert (head.matrix, head.lora) == ("matrix", "pair")


def test_a_bias_is_not_divided():
    assert head_of(architecture(bias="lm_head.bias"), MODULES).bias == "bias"
    for temperature in (0.5, 1.5):
        with pytest.raises(ConfigError, match=r"lm_head\.bias: a head with a bias needs a temp"):
            head_of(architecture(bias="lm_head.bias"), MODULES, temperature)
