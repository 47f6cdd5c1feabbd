"""A short form of the campaign."""

from campaigns.headers import run
from campaigns.support import Tally


def test_headers() -> None:
    tally = Tally(seconds=5)
    run(600, 7, tally)
    assert tally.failures == []
