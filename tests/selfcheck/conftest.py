"""What the checks of a profile execute, traced once for all tests whose shaders are as they are."""

import pytest

from qlora_wgpu.selfcheck import results


@pytest.fixture(scope="session")
def traced():
    """``results._traced``, which remembers."""
    original, kept = results._traced, {}

    def once(device, profile, dtype, cases=None, paths=None):
        key = repr(profile), dtype
        if key not in kept:
            kept[key] = original(device, profile, dtype)
        return kept[key]

    return once


@pytest.fixture
def traced_once(traced, monkeypatch):
    monkeypatch.setattr(results, "_traced", traced)
