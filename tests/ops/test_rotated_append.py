"""New tokens' queries and keys, rotated and kept by one launch: as by those that it replaces."""

import numpy as np
import pytest
from support.harness import DTYPES, PROFILES, VARIANTS, Bench

from qlora_wgpu.graph.tensor import Storage
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.fusion import FUSIONS
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.linear import linear_group
from qlora_wgpu.ops.modules import Linear
from qlora_wgpu.ops.quantized import PackedWeightCache
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.selfcheck.cases import new_tokens, texts
from qlora_wgpu.selfcheck.cases.common import arguments_of

TOGETHER = "kv_cache/append_rotated.wgsl"
IN_PRODUCT = "few_rows/strips_rotated.wgsl"


@pytest.mark.quick("values")
@pytest.mark.parametrize("arguments", arguments_of(texts.check_rotated_append))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_norms_rotation_and_keys_that_are_kept(device, profile, dtype, arguments):
    bench = Bench(device, dtype, PROFILES[profile])
    texts.check_rotated_append(bench, *arguments)
    assert bench.excess <= 1.0
    _, _, has_norms, by_rows, alone = arguments
    # Where keys are kept in buffers, there are too many of them to bind some more.
    assert (TOGETHER in bench.shaders) == (alone or not by_rows or profile == "texture")
    fits = profile == "texture" and not alone and not by_rows
    assert ("qk_norm/forward.wgsl" in bench.shaders) == (has_norms and not fits)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("texts", [1, 3, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 24), (4, 4, 64), (8, 1, 128)])
def test_attention_has_the_bits_that_it_has_of_several_launches(
    device, profile, texts, heads, kv_heads, head_dim
):
    """Two tokens of each text, grouped heads; texts in reversed places."""
    random = np.random.default_rng(5)
    table = random.standard_normal((3, 8, 2)).astype(np.float32)
    widths = {"q": heads, "k": kv_heads, "v": kv_heads}
    xs = {n: random.standard_normal((2, texts, w * head_dim)) for n, w in widths.items()}

    def made(rules):
        bench, cache, outputs = Bench(device, "bfloat16", PROFILES[profile]), KVCache(3, texts), []
        bench.graph.rules = rules
        for token in range(2):
            batch = make_batch_buffers(texts, 1, CacheView(cache))
            ids, places = np.zeros((texts, 1), np.int64), np.arange(texts)[::-1, None]
            batch.storage.data = encode_batch(batch, ids, ids + 1, past=token, places=places)
            q, k, v = (bench.operand(x[token]) for x in xs.values())
            constant = bench.graph.constant("table", table)
            q, k = rope(bench.graph, [q, k], constant, batch, head_dim, 16)
            outputs.append(attention(bench.graph, q, k, v, batch, head_dim, 0.1))
        return bench, np.stack(bench.run_bits(*outputs))

    bench, got = made(FUSIONS)
    apart, exact = made(())
    assert TOGETHER in bench.shaders and TOGETHER not in apart.shaders
    assert np.array_equal(got, exact)


@pytest.mark.parametrize("arguments", arguments_of(new_tokens.check_rotated_product))
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_rotate(device, dtype, arguments):
    bench = Bench(device, dtype, PROFILES["texture"])
    new_tokens.check_rotated_product(bench, *arguments)
    assert bench.excess <= 1.0
    fits = 4 * bench.graph.profile.subgroup_size % arguments[0] == 0
    assert (IN_PRODUCT in bench.shaders) == fits
    assert (TOGETHER in bench.shaders) == (not fits)


def traced(device, rotary_dim, head_dim, dense=True, texts=3, dtype="bfloat16", rules=FUSIONS):
    """Attention after a product with strips, a norm's input that differs by text."""
    random = np.random.default_rng(8)
    heads = {"q": 4, "k": 2, "v": 2}
    stored = [
        new_tokens.stored_weight("double", n * head_dim, 64, i)
        for i, n in enumerate(heads.values())
    ]
    xs, table = (
        random.standard_normal((2, texts, 64)),
        random.standard_normal((4, rotary_dim // 2, 2)),
    )
    bench, cache, outputs = Bench(device, dtype, PROFILES["texture"]), KVCache(3, texts), []
    bench.graph.rules = rules
    matrices = new_tokens.in_one_range(stored, Storage("group", "test", 256))
    store = PackedWeightCache(dense=dense)
    store.of_quantized(bench.graph, matrices)
    store.fill(bench.graph)
    constant = bench.graph.constant("table", table.astype(np.float32))
    layers = [Linear(name, m, None, None) for name, m in zip(heads, matrices, strict=True)]
    for token in range(2):
        batch = make_batch_buffers(texts, 1, CacheView(cache))
        assert batch.cache is not None
        batch.cache.packed_weights = store
        ids, places = np.zeros((texts, 1), np.int64), np.arange(texts)[::-1, None]
        past = token + (np.arange(texts)[:, None] == texts - 1)
        batch.storage.data = encode_batch(batch, ids, ids + 1, past=past, places=places)
        q, k, v = linear_group(bench.graph, bench.operand(xs[token]), layers, batch)
        q, k = rope(bench.graph, [q, k], constant, batch, head_dim, rotary_dim)
        outputs.append(attention(bench.graph, q, k, v, batch, head_dim, 0.1))
    return bench, np.stack(bench.run_bits(*outputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "dense"), [(16, True), (32, False), (64, True)])
@pytest.mark.parametrize("texts", [1, 3, 8])
def test_products_that_rotate_have_the_bits_of_several_launches(
    device, dtype, head_dim, dense, texts
):
    bench, got = traced(device, head_dim, head_dim, dense, texts, dtype)
    apart, exact = traced(device, head_dim, head_dim, dense, texts, dtype, rules=())
    fits = 4 * bench.graph.profile.subgroup_size % head_dim == 0
    assert (IN_PRODUCT in bench.shaders) == fits and IN_PRODUCT not in apart.shaders
    assert np.array_equal(got, exact)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 16), (48, 48), (128, 128)])
def test_heads_that_are_rotated_in_part_or_fill_no_strip_are_rotated_apart(
    device, head_dim, rotary_dim
):
    bench, _ = traced(device, rotary_dim, head_dim)
    assert TOGETHER in bench.shaders and IN_PRODUCT not in bench.shaders
