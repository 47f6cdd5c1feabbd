"""Patterns of a file that are for no layer: PEFT passes over them, and its files open."""

import dataclasses

import numpy as np
import pytest

from qlora_wgpu.bench.workload import config_of as shape
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, tensor_name
from qlora_wgpu.model.adapter_state import config_of

STORED = AdapterConfig(2, 4, 0.0, ["q_proj"], False, None)


@pytest.mark.parametrize("targets", [["q_proj"], r".*\.q_proj"])
def test_a_file_with_a_pattern_for_no_layer_opens(targets):
    config = shape("S")
    architecture = find_family(config).read(config)
    layers = [spec for spec in architecture.linears if spec.name.endswith("q_proj")]
    tensors = {
        tensor_name(spec.name, part): np.zeros((2, 2), np.float32)
        for spec in layers
        for part in (LORA_A, LORA_B)
    }
    ranks = {"up_proj": 8, "q_proj": 2, "nothing": 3}
    stored = dataclasses.replace(
        STORED, target_modules=targets, rank_pattern=ranks, alpha_pattern={"nothing": 1}
    )
    found = config_of(stored, tensors, architecture)
    assert (found.rank_pattern, found.alpha_pattern) == ({"q_proj": 2}, {})
    assert len(AdapterLayout(found, architecture.linears).targets) == len(layers)
