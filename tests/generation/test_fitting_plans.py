"""How many sequences are decoded at a time: what bindings and free memory allow."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.generation import plans


@pytest.mark.parametrize(("texts", "sizes"), [
    (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]),
])  # fmt: skip
def test_sizes_of_batches(texts, sizes):
    assert plans.batch_sizes(texts) == sizes


@pytest.mark.parametrize(("texts", "max_binding", "bound"), [
    (1, 0, 1), (8, 100, 8), (8, 79, 7), (8, 80, 8), (8, 10, 1), (8, 9, 1), (8, 29, 2),
])  # fmt: skip
def test_a_binding_holds_the_largest_tensor_of_each_sequence(
    monkeypatch, texts, max_binding, bound
):
    tensors = [SimpleNamespace(nbytes=nbytes) for nbytes in (10, 4, 7)]
    cache = SimpleNamespace(layers=[tensors[:2]], states=tensors[2:])
    monkeypatch.setattr(plans, "KVCache", lambda capacity: cache)
    monkeypatch.setattr(plans, "make_seen", lambda *given: None)
    architecture = SimpleNamespace(vocab_size=9)
    layout = SimpleNamespace(
        token_graphs=lambda *given: None, pretrained=SimpleNamespace(architecture=architecture)
    )
    assert plans.bound_sequences(layout, 64, texts, max_binding) == bound


@pytest.mark.parametrize(("free", "count"), [
    (None, 8), (80, 8), (79, 4), (40, 4), (39, 2), (19, 1), (0, 1), (-5, 1),
])  # fmt: skip
@pytest.mark.parametrize("how", ["budget", "room", "host"])
def test_half_of_the_sequences_until_they_fit(monkeypatch, free, count, how):
    monkeypatch.setattr(plans, "bound_sequences", lambda layout, capacity, texts, binding: texts)
    monkeypatch.setattr(plans, "_bytes_beside_weights", lambda layout, capacity, texts: 10 * texts)
    monkeypatch.setattr(plans, "room", lambda device: free)
    monkeypatch.setattr(plans, "copied_bytes", lambda layout, budget: 7)
    monkeypatch.setattr(
        plans, "available_bytes", lambda: None if how != "host" or free is None else free + 4
    )
    budget = 100 + free if how == "budget" and free is not None else None
    device = SimpleNamespace(
        max_binding=0, budget=budget, memory=SimpleNamespace(total=100), is_cpu=how == "host"
    )
    layout = SimpleNamespace(packed_weights=SimpleNamespace(nbytes=3))
    assert plans.fitting_sequences(layout, device, 64, 8) == count
