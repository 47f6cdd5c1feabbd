"""The choice of tokens on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from qlora_wgpu.model.batch_encoding import encode_batch
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.sampling import (
    MOST_AHEAD,
    NONE,
    choose,
    encode_choices,
    make_choices,
    make_seen,
    seen_words,
)
from qlora_wgpu.reference import sampling as sampling_reference
from qlora_wgpu.selfcheck.cases.common import each, normal
from qlora_wgpu.selfcheck.cases.few_rows import new_tokens
from qlora_wgpu.selfcheck.runner import Runner


@dataclass(frozen=True)
class Row:
    """A text's settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)


# Neighbours among them, more of some invocations than of others.
_BIASES = {token: (-1.0) ** token * (token % 7) for token in (*range(1, 1000, 13), 0, 2, 3, 999)}
ROWS = (
    Row(0.0),
    Row(),
    Row(0.7, top_k=5),
    Row(1.3, top_p=0.6),
    Row(0.9, top_k=40, top_p=0.8, min_p=0.1, repetition_penalty=1.3),
    Row(0.0, repetition_penalty=5.0),
    Row(2.0, min_p=0.2),
    Row(1e-9),
    Row(0.0, repetition_penalty=1.5, logit_bias=_BIASES),
    Row(1.1, top_p=0.9, logit_bias=_BIASES),
    Row(1.0, logit_bias={3: 1.0}),
)
# Of tokens as likely the first is taken; others are the same invocation's, or of one before it.
_FIRST, _AS_LIKELY = 300, (301, 300 + 256, 300 + 512, 255 + 256, 255 + 512)


@each((1000,), (49_155,))
def check_choice(run: Runner, vocab: int) -> None:
    """Rows with settings of all kinds, the last with a logit that is none.

    They are the last tokens that there is room for; the batch becomes that of the next ones.
    """
    count, past = len(ROWS), 3
    logits = 3 * normal("logits", count, vocab).astype(np.float32)
    logits[0, [_FIRST, *_AS_LIKELY]] = 20.0
    logits[-1, vocab // 2] = np.nan
    for row, settings in enumerate(ROWS):
        logits[row, list(settings.logit_bias)] += 12.0  # what is biased is among the likeliest
    seen = normal("seen", count, vocab) > 0.5
    seeds = [index * 0x1234567890 for index in range(count)]
    steps = [7 * index for index in range(count)]
    bits = make_seen(count, vocab)
    assert bits.storage is not None
    bits.storage.data = np.concatenate(
        [
            seen_words(np.flatnonzero(row).tolist(), vocab, settings.logit_bias)
            for row, settings in zip(seen, ROWS, strict=True)
        ]
    )
    choices = make_choices(count, bits)
    assert choices.settings.storage is not None
    choices.settings.storage.data = encode_choices(
        ROWS, seeds, [step - past for step in steps]
    ).view(np.float32)
    batch = new_tokens(count, past)
    choose(run.graph, run.float32(logits.astype(np.float64)), batch, choices)
    made, ids, positions = run.run(choices.chosen, batch.input_ids, batch.positions)
    got = made.reshape(MOST_AHEAD, count)[past]
    run.compare_exactly(ids, np.minimum(ids, vocab - 1))
    run.compare_exactly(ids[:-1], got[:-1])
    run.compare_exactly(positions, np.full(count, past + 1.0))
    run.compare_exactly(got[[0, -1]], np.array([_FIRST, NONE], np.float64))
    for row, (settings, token) in enumerate(zip(ROWS[:-1], got.astype(int), strict=False)):
        scores = sampling_reference.scores(
            logits[row].astype(np.float64), seen[row], biases=settings.logit_bias,
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
            min_p=settings.min_p, penalty=settings.repetition_penalty, seed=seeds[row],
            step=steps[row],
        )  # fmt: skip
        chosen = scores[token] if 0 <= token < vocab else np.inf
        run.compare(np.array([chosen]), np.array([scores.max()]))


@each((Row(0.0),), (Row(0.9, top_k=40, top_p=0.8, min_p=0.1, repetition_penalty=1.3),))
def check_choice_after_a_prompt(run: Runner, settings: Row) -> None:
    """The first token of the second of two texts, whose prompt has two tokens."""
    vocab, seed, step, place = 1000, 0x1234567890, 7, 1
    logits = 3 * normal("logits", 1, vocab).astype(np.float32)
    seen = normal("seen", vocab) > 0.5
    bits = make_seen(2, vocab)
    assert bits.storage is not None
    own, other = (seen_words(np.flatnonzero(row).tolist(), vocab) for row in (seen, ~seen))
    bits.storage.data = np.concatenate([other, own])
    choices = make_choices(1, bits)
    assert choices.settings.storage is not None
    choices.settings.storage.data = encode_choices([settings], [seed], [step]).view(np.float32)
    batch = make_batch_buffers(1, 2, CacheView(KVCache(4, 2)))
    ids = np.zeros((1, 2), np.int64)
    batch.storage.data = encode_batch(
        batch, ids, ids + 1, rows=np.array([1]), places=np.array([[place]])
    )
    choose(run.graph, run.float32(logits.astype(np.float64)), batch, choices)
    made, kept = run.run(choices.chosen, batch.input_ids)
    run.compare_exactly(kept, np.zeros(2))  # the batch stays the prompt's
    token = int(made.reshape(-1)[0])
    scores = sampling_reference.scores(
        logits[0].astype(np.float64), seen, biases={}, temperature=settings.temperature,
        top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p,
        penalty=settings.repetition_penalty, seed=seed, step=step,
    )  # fmt: skip
    chosen = scores[token] if 0 <= token < vocab else np.inf
    run.compare(np.array([chosen]), np.array([scores.max()]))
