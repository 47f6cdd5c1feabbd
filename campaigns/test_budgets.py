"""A short form of the campaign: a run of a mixture that only takes memory, under some budgets."""

from campaigns.budgets import run
from campaigns.support import Tally


def test_budgets() -> None:
    tally = Tally(seconds=600, first=8)
    run(1, 1, tally, every=1000)
    assert tally.failures == [] and tally.outcomes == {"planned, as taken": 1}
