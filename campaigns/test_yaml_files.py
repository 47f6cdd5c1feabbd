"""A short form of the campaign."""

from campaigns.support import Tally
from campaigns.yaml_files import run


def test_yaml_files() -> None:
    tally = Tally(seconds=4)
    run(60, 7, tally)
    assert tally.failures == []
