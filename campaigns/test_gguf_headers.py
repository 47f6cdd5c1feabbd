"""A short form of the campaign."""

from campaigns.gguf_headers import run
from campaigns.support import Tally


def test_gguf_headers() -> None:
    tally = Tally(seconds=5)
    run(400, 7, tally)
    assert tally.failures == []
