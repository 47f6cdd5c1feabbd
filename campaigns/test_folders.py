"""A short form of the campaigns of folders and of numbers."""

from campaigns import folders, numbers
from campaigns.support import Tally


def test_folders() -> None:
    tally = Tally(seconds=5)
    folders.run(3, 7, tally)
    assert tally.failures == []


def test_numbers() -> None:
    tally = Tally(seconds=5)
    numbers.run(4, 7, tally)
    assert tally.failures == []
