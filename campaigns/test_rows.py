"""A few files of the campaign in which rows are malformed, hostile or large."""

from campaigns.rows import run


def test_rows():
    assert run(count=3, seed=1, seconds=30) == 0
