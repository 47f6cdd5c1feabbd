"""Launches are those that are recorded: what computes the same bits has the same digests.

``tools/launch_digests.py`` records them, and says which differ.
"""

import json
from itertools import cycle

import pytest

from tools.launch_digests import (
    CONFIGS,
    PROFILES,
    RECORDED,
    SHORT,
    combined,
    digests_of,
    forward_of,
    recorded_of,
)

DIGESTS = json.loads(RECORDED.read_text())


def test_every_family_is_recorded():
    assert DIGESTS.keys() == CONFIGS.keys()
    assert all(own.keys() == {*PROFILES, "forward"} for own in DIGESTS.values())


@pytest.mark.parametrize("family", CONFIGS)
def test_a_forward_pass_launches_what_is_recorded(family):
    assert forward_of(family) == DIGESTS[family]["forward"]


@pytest.mark.slow
@pytest.mark.cover(family=list(CONFIGS)[::2])
@pytest.mark.parametrize(("family", "profile"), list(zip(CONFIGS, cycle(PROFILES), strict=False)))
def test_a_checkpointed_step_and_its_texts_launch_what_is_recorded(family, profile):
    own = combined(digests_of(family, profile, [SHORT]))
    assert own == DIGESTS[family][profile]["short"]


@pytest.mark.full
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", CONFIGS)
def test_all_plans_launch_what_is_recorded(family, profile):
    assert recorded_of(family, profile) == DIGESTS[family][profile]
