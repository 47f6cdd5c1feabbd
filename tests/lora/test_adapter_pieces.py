"""Where an adapter's vectors are cut, and what stays together."""

import numpy as np
import pytest

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.families.family import ExpertSpec, LinearSpec
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.graph.launch import GraphError
from qlora_wgpu.lora.flat_vector import AdapterDtypes, Group, cut
from qlora_wgpu.lora.layout import AdapterLayout

LINEARS = [
    LinearSpec(f"model.layers.{i}.{name}", out, 64)
    for i in range(4)
    for name, out in (("self_attn.q_proj", 64), ("self_attn.k_proj", 24), ("mlp.up_proj", 130))
]
STACKS = [ExpertSpec(f"model.layers.{i}.mlp.experts", "up_proj", 5, 40, 64) for i in range(3)]
LORA = LoraConfig(r=5)


@pytest.mark.parametrize("most", [4, 5, 6, 9, 100])
def test_cut(most):
    groups = [Group(name) for name in "aabbbcd"]
    cuts = cut([2, 3, 2, 2, 1, 7, 1], groups, most)
    expected = {4: [1, 2, 4, 5, 6], 5: [2, 5, 6], 6: [2, 5, 6], 9: [2, 5], 100: []}
    assert cuts == expected[most]


def test_what_is_read_as_one_is_never_cut():
    groups = [Group("a"), *[Group("experts", always=True)] * 3, Group("b")]
    assert cut([1, 4, 4, 4, 1], groups, 5) == [1, 4]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "lion"])
@pytest.mark.parametrize("limit", [4_400, 8_000, 20_000, 10**6])
def test_every_tensor_lies_in_one_piece(optimizer, limit, experts):
    lora = LORA.model_copy(update={"target_modules": ["up_proj"]}) if experts else LORA
    stacks, forms = STACKS if experts else [], AdapterDtypes(optimizer)
    whole = AdapterLayout(lora, LINEARS, stacks, forms)
    adapter = AdapterLayout(lora, LINEARS, stacks, forms, limit)
    assert adapter.length == whole.length and adapter.names == whole.names
    assert (len(adapter.parameters.shards) == 1) == (limit == 10**6)
    seen = []
    for pair in (*adapter.loras.values(), *adapter.expert_loras.values()):
        for tensor, gradient in ((pair.a, pair.grad_a), (pair.b, pair.grad_b)):
            number = adapter.parameters.storages.index(tensor.storage)
            assert gradient.storage is adapter.gradient.storages[number]
            assert tensor.offset == gradient.offset and tensor.offset % ALIGNMENT == 0
            assert tensor.offset + tensor.nbytes <= tensor.storage.nbytes
            seen.append(number)
    assert set(seen) == set(range(len(adapter.parameters.shards)))
    vectors = [adapter.parameters, adapter.gradient, *adapter.moments.vectors]
    assert len(vectors) == (3 if optimizer == "lion" else 4)
    assert len({len(each.shards) for each in vectors}) == 1
    if not experts:
        assert max(s.nbytes for each in vectors for s in each.storages) <= limit
    assert adapter.moments.nbytes == whole.moments.nbytes


def test_layers_of_one_input_lie_together():
    adapter = AdapterLayout(LORA, LINEARS, max_binding=8_000)
    for layer in range(4):
        q, k = (adapter.loras[f"model.layers.{layer}.self_attn.{x}_proj"] for x in "qk")
        assert q.a.storage is k.a.storage and q.b.storage is k.b.storage


def test_a_part_of_a_vector_lies_in_one_piece():
    vector = AdapterLayout(LORA, LINEARS, max_binding=4_400).parameters
    (begin, second), count = list(vector.numbered())[1], 64
    part = vector.part(begin + count, count)
    assert part.storage is second.storage and part.offset == 4 * count and part.columns == count
    with pytest.raises(GraphError, match="not in one shard"):
        vector.part(begin - count, 2 * count)
    with pytest.raises(GraphError, match="16 shards"):
        _ = vector.whole


def test_tensors_are_split_and_joined_as_of_one_piece():
    adapter, whole = AdapterLayout(LORA, LINEARS, max_binding=4_400), AdapterLayout(LORA, LINEARS)
    np.testing.assert_array_equal(adapter.initial(3), whole.initial(3))
    tensors = adapter.split(adapter.initial(3))
    np.testing.assert_array_equal(adapter.join(tensors), whole.initial(3))
