"""Tokens of long texts attend to all of them: software GPUs end loops after 65,535 turns."""

import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_close, rounded, tolerance

from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache

TOKENS = 40_000


@pytest.mark.parametrize("profile", PROFILES)
def test_forty_thousand_tokens(device, profile):
    """The last ones weigh most, so that a loop that ends early is off by far."""
    rng = np.random.default_rng(5)
    keys, values = rng.standard_normal((2, TOKENS, 8))
    keys[:, 0] = np.linspace(-4, 4, TOKENS)
    q = np.full((1, 8), 0.5)
    q[0, 0] = 4.0
    bench = Bench(device, "bfloat16", PROFILES[profile])
    cache = KVCache(TOKENS)
    cache.layers.append((bench.operand(keys), bench.operand(values)))
    batch = make_batch_buffers(1, 1, CacheView(cache))
    one = np.ones((1, 1), np.int64)
    batch.storage.data = encode_batch(batch, one, one, past=TOKENS - 1)
    new = [bench.operand(each) for each in (q, keys[-1:], values[-1:])]
    (got,) = bench.run(attention(bench.graph, *new, batch, 8, 1.0))
    scores = rounded(keys, "bfloat16") @ rounded(q, "bfloat16")[0]
    shares = np.exp(scores - scores.max())
    expected = shares @ rounded(values, "bfloat16") / shares.sum()
    assert_close(got, expected[None], tolerance("bfloat16", TOKENS), "sums over the keys")
