"""The campaigns draw config.json files of every family, which it reads or refuses."""

import random

import pytest
from references.config_trials import TEXTS

from campaigns.drawn_configs import FAMILIES, drawn_config
from campaigns.drawn_oddities import odd_config
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families.family import find_family, known_families

DRAWS = 30
KINDS = {"usual": drawn_config, "odd": odd_config}


def test_every_family_is_drawn():
    assert set(FAMILIES) == set(known_families()) - set(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_most_draws_are_read(model_type, kind):
    refused = []
    for number in range(DRAWS):
        config = KINDS[kind](random.Random(f"{number} {model_type}"), model_type)
        try:
            find_family(config).read(config)
        except UnsupportedModelError as err:
            refused.append(str(err))
    assert len(refused) < DRAWS / 2, refused
