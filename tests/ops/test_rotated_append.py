"""New tokens' queries and keys, rotated and kept by one launch: as by those that it replaces."""

import numpy as np
import pytest
from support.harness import PROFILES, VARIANTS, Bench

from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.selfcheck.cases import generation
from qlora_wgpu.selfcheck.cases.common import arguments_of

TOGETHER = "kv_cache/append_rotated.wgsl"


@pytest.mark.parametrize("arguments", arguments_of(generation.check_rotated_append))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_norms_rotation_and_keys_that_are_kept(device, profile, dtype, arguments):
    bench = Bench(device, dtype, PROFILES[profile])
    generation.check_rotated_append(bench, *arguments)
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
    device, monkeypatch, profile, texts, heads, kv_heads, head_dim
):
    """Two tokens of each text, grouped heads; texts in reversed places."""
    random = np.random.default_rng(5)
    table = random.standard_normal((3, 8, 2)).astype(np.float32)
    widths = {"q": heads, "k": kv_heads, "v": kv_heads}
    xs = {n: random.standard_normal((2, texts, w * head_dim)) for n, w in widths.items()}

    def made():
        bench, cache, outputs = Bench(device, "bfloat16", PROFILES[profile]), KVCache(3, texts), []
        for token in range(2):
            batch = make_batch_buffers(texts, 1, CacheView(cache))
            ids, places = np.zeros((texts, 1), np.int64), np.arange(texts)[::-1, None]
            batch.storage.data = encode_batch(batch, ids, ids + 1, past=token, places=places)
            q, k, v = (bench.operand(x[token]) for x in xs.values())
            constant = bench.graph.constant("table", table)
            q, k = rope(bench.graph, [q, k], constant, batch, head_dim, 16)
            outputs.append(attention(bench.graph, q, k, v, batch, head_dim, 0.1))
        return bench, np.stack(bench.run_bits(*outputs))

    bench, got = made()
    monkeypatch.setattr(Graph, "last_made", lambda *_: None)
    apart, exact = made()
    assert TOGETHER in bench.shaders and TOGETHER not in apart.shaders
    assert np.array_equal(got, exact)
