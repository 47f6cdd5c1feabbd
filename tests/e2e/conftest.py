"""Where intermediates of runs lie, whatever the processor that runs the tests."""

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
