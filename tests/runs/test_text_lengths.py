"""How long texts may be, wherever a config.json says it: generation and its plan ask one place."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.runs.workload import GenerationWorkload


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 40}, 40),
        ({"text_config": {"max_position_embeddings": 40}}, 40),  # of a model with images
        (
            {
                "max_position_embeddings": 10,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            40,
        ),
        ({"max_position_embeddings": None}, None),
        ({}, None),
    ],
)
def test_all_that_write_texts_go_as_far(config, longest):
    folder = SimpleNamespace(folder=SimpleNamespace(config=config))
    assert QLoRAModel.max_length.fget(folder) == longest
    texts = GenerationWorkload.of(SimpleNamespace(config=config), 30, 60)
    assert texts.capacity == (longest or 90) and texts.prompt == 30
