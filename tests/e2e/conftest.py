"""Where intermediates of runs lie, whatever the processor that runs the tests; their tier."""

from pathlib import Path

import pytest

from qlora_wgpu.gpu import device


@pytest.fixture(scope="module")
def in_buffers():
    """Sums in place, as on most processors: what saves memory is then what is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "wants_textures", lambda lanes: False)
        yield


@pytest.fixture
def in_textures(monkeypatch):
    """Intermediates in textures, as processors of AMD before Zen 5 want them."""
    monkeypatch.setattr(device, "wants_textures", lambda lanes: True)


def pytest_collection_modifyitems(items):
    """Whole runs are slow, but for a few."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("quick"):
            item.add_marker("slow")


def pytest_ignore_collect(collection_path, config):
    """Quick does not import files of which it has no test: most of them."""
    if config.getoption("tier") == "quick" and collection_path.name.startswith("test_"):
        return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None
    return None
