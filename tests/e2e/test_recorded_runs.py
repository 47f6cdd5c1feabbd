"""Tiny runs tell what they told when they were recorded, in that order, and fail as they did."""

import json

import pytest
from support.recorded_runs import DRIVERS_OWN, RECORDED, SCENES, played, write_base

NAMES = [name for name in SCENES if name not in DRIVERS_OWN]
EVENTS = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.mark.cover(name=["shown", "reported"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_tells_what_it_told(base, name):
    assert played(name, base).events == EVENTS[name]
