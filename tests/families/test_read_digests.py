"""What is read of a config.json is what is recorded, for keys of every kind.

``tools/launch_digests.py`` records it.
"""

import json

import pytest

from tools.launch_digests import READ, reading_of, trials

RECORDED, TRIALS = json.loads(READ.read_text()), trials()


def test_every_type_is_recorded():
    assert RECORDED.keys() == TRIALS.keys()


@pytest.mark.parametrize("model_type", TRIALS)
def test_a_config_is_read_as_recorded(model_type):
    assert reading_of(model_type, TRIALS[model_type]) == RECORDED[model_type]
