"""The measures by which programs that read keep to a budget, in their order, on a made-up model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import fit_inference_to_budget
from qlora_wgpu.model.offload_plan import OffloadPlan

LAYERS, EMBEDDING, HEAD, TEXTURES, REST = [10] * 6, 30, 25, 5, 40  # MiB


class Layout:
    """Takes what each measure leaves; three layers that come and go are always there."""

    num_layers = len(LAYERS)
    placement = SimpleNamespace(group_bytes=[MIB * n for n in LAYERS])
    embedding_bytes, head_options = EMBEDDING * MIB, (False, True)
    profile = SimpleNamespace(in_textures=True)

    def __init__(self, offload=None):
        self.offload = offload or OffloadPlan()

    def changed(self, offload):
        return Layout(offload)

    @property
    def taken(self):
        own = self.offload
        layers = sum(LAYERS[: len(LAYERS) - own.streamed_layers])
        layers += 20 * (own.streamed_layers > 0)
        return (
            REST
            + layers
            + EMBEDDING * (not own.host_embedding)
            + (HEAD * (not own.streamed_head) + TEXTURES * (not own.in_buffers))
        )


@pytest.fixture(autouse=True)
def total(monkeypatch):
    monkeypatch.setattr(
        "qlora_wgpu.model.budget._total", lambda layout, plans_of: MIB * layout.taken
    )


def way(budget):
    return fit_inference_to_budget(Layout(), None, budget * MIB).offload


def test_the_cheapest_measures_come_first():
    everything, plain = Layout().taken, OffloadPlan(in_buffers=True)
    base = replace(plain, host_embedding=True)
    assert way(everything) == OffloadPlan()
    assert way(everything - 1) == way(everything - TEXTURES) == plain
    assert way(everything - TEXTURES - 1) == way(everything - TEXTURES - EMBEDDING) == base
    kept = everything - TEXTURES - EMBEDDING
    assert way(kept - 10) == replace(base, streamed_layers=3)
    assert way(kept - 11) == replace(base, streamed_layers=4)
    assert way(kept - 40) == replace(base, streamed_layers=6)
    assert way(kept - 41) == replace(base, streamed_layers=4, streamed_head=True)


@pytest.mark.parametrize("budget", [59, 0, -5])
def test_what_takes_more_than_there_is_says_by_how_much(budget):
    there = max(budget, 0)
    told = f"at least 60 MiB of device memory, {60 - there} MiB more than the {there} MiB available"
    assert way(60).streamed_layers == 6
    with pytest.raises(OutOfMemoryError, match=told):
        way(budget)
