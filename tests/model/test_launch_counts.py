"""How many launches a step takes on a GPU: each costs some microseconds, whatever it does."""

import pytest

from qlora_wgpu.bench.shapes import config_of
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.profile import GPU_PROFILE
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.pretrained import Pretrained


@pytest.mark.parametrize(("model", "most"), [("llama-3.2-1b", 718), ("llama-3.1-8b", 1358)])
def test_a_step_has_no_more_launches(model, most):
    """The update's three come on top."""
    layout = ModelLayout(
        Pretrained.from_config(config_of(model), model), LoraConfig(r=8), QuantConfig(),
        "bfloat16", profile=GPU_PROFILE, max_binding=(1 << 31) - 1,
    )  # fmt: skip
    assert len(layout.step(StepOptions("train", 1, 1024)).plan.launches) <= most
