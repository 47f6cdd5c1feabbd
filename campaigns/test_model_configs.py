"""A short form of the campaign."""

from campaigns.model_configs import run
from campaigns.support import Tally


def test_model_configs() -> None:
    tally = Tally(seconds=5)
    run(300, 7, tally)
    assert tally.failures == []
