"""Attention of a new token to keys and values that are kept."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.attention import attention
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.reference import attention as reference
from qlora_wgpu.selfcheck.cases.common import normal
from qlora_wgpu.selfcheck.runner import Runner

_PROMPT, _CAPACITY = 13, 16


def _batch(cache: KVCache, tokens: int, past: int) -> BatchBuffers:
    batch = make_batch_buffers(1, tokens, CacheView(cache))
    ids = np.zeros((1, tokens), np.int64)
    batch.storage.data = encode_batch(batch, ids, np.ones_like(ids), past=past)
    return batch


def check_cached_attention(run: Runner) -> None:
    """A prompt, then a token after it: with a window, a softcap and grouped heads."""
    total = _PROMPT + 1
    for head_dim, window, softcap in ((20, None, None), (64, 7, None), (22, 5, 3.0)):
        cache, scale = KVCache(_CAPACITY), 1 / np.sqrt(head_dim)
        q = normal("q", total, 4 * head_dim)
        k, v = normal("k", total, 2 * head_dim), normal("v", total, 2 * head_dim)
        for rows, past in ((slice(0, _PROMPT), 0), (slice(_PROMPT, total), _PROMPT)):
            tq, tk, tv = (run.operand(a[rows]) for a in (q, k, v))
            batch = _batch(cache, rows.stop - rows.start, past)
            o = attention(run.graph, tq, tk, tv, batch, head_dim, scale, window, softcap)
        (got,) = run.run(o)
        q, k, v = (run.rounded(a) for a in (q, k, v))
        mask = np.ones((1, total), np.int64)
        exact = reference.forward(q, k, v, mask, head_dim, scale, window, softcap)
        run.compare(got, exact[_PROMPT:])
