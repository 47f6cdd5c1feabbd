"""Campaigns that Hypothesis draws: --count says how many examples, --hypothesis-seed which."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--count", type=int, default=100, help="how many examples a campaign draws")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile(
        "campaigns",
        max_examples=config.getoption("count"),
        derandomize=config.getoption("--hypothesis-seed") is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("campaigns")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a module."""
    return tmp_path_factory.mktemp("campaign")
