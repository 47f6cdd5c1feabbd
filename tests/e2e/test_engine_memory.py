"""Engines decode fewer sequences at a time if memory does not allow all that were requested."""

import pytest

from e2e.test_generation import opened
from qlora_wgpu.generation import Engine
from qlora_wgpu.generation.plans import bound_sequences
from qlora_wgpu.runs.workload import GenerationWorkload

PROMPTS = [[5, 6, 7, n] for n in range(9)]


@pytest.fixture
def model(device, tmp_path):
    return opened("llama", tmp_path, device, "bfloat16", "nf4")


def test_a_budget_allows_fewer_sequences(device, model, monkeypatch):
    alone = Engine(model, 1, 1000, packs_weights=False)  # as within a budget
    expected = [list(alone.add(prompt, max_new_tokens=5)) for prompt in PROMPTS]
    monkeypatch.setattr(device, "budget", device.memory.total + (3 << 20))
    engine = Engine(model, 64, 1000)
    assert 1 < engine.texts < 64
    texts = [engine.add(prompt, max_new_tokens=5) for prompt in PROMPTS]
    while not engine.is_idle:
        engine.step()
    assert [text.ids for text in texts] == expected
    monkeypatch.setattr(device, "budget", device.memory.total)
    assert Engine(model, 64, 1000).texts == 1


def test_all_keys_of_a_layer_are_one_binding(device, model):
    layout = model.layout
    cache = Engine(model, 1, 1000)
    list(cache.add([1], max_new_tokens=1))
    keys = cache._cache.layers[0][0].nbytes
    assert [bound_sequences(layout, 1000, 64, count * keys) for count in (0, 1, 7, 99)] == [
        1, 1, 7, 64
    ]  # fmt: skip


def test_workloads_plan_fewer_sequences(device, model):
    """Without a limit all that a binding allows; if weights must be offloaded anyway, too."""
    layout, whole = model.layout, GenerationWorkload(20, 1000, 64)
    total = whole.memory(layout, whole.plans(layout)).total()
    assert whole.within(layout, 1 << 40, None) == whole.within(layout, 1 << 40, total) == whole
    fewer = whole.within(layout, 1 << 40, total - 1)
    assert fewer.count == 32 and fewer.capacity == 1000
    assert whole.within(layout, 1 << 40, 1000) == whole
