"""Decoding with a cache, and sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.ops.attention import attend, attention
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.delta_net import causal_conv, gated_delta_rule, short_conv
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.mamba import mamba_scan
from qlora_wgpu.ops.pointwise import qk_norm
from qlora_wgpu.ops.sampling import (
    DECODE_STEPS_AHEAD,
    NONE,
    SamplerState,
    choose,
    encode_choices,
    make_choices,
    make_seen,
    seen_words,
)
from qlora_wgpu.reference import attention as attention_reference
from qlora_wgpu.reference import delta_net as delta_net_reference
from qlora_wgpu.reference import mamba as mamba_reference
from qlora_wgpu.reference import norms as norms_reference
from qlora_wgpu.reference import sampling as sampling_reference
from qlora_wgpu.selfcheck.cases.common import Exact, each, normal, of_halves, uneven
from qlora_wgpu.selfcheck.cases.new_tokens import cached_batch, compare_rotated, new_tokens
from qlora_wgpu.selfcheck.runner import ROUNDING, Array, Runner, rounded


def _compare_steps(
    run: Runner,
    op: Callable[..., Tensor],
    formula: Callable[..., Array],
    inputs: Sequence[Array | Exact],
    prompt: int,
    padding: int = 3,
) -> None:
    """Compares an op on a prompt with padding after it, then on two further tokens.

    The op takes the inputs and a batch, the formula their arrays and segments.
    """
    cache, outputs = KVCache(prompt + 5), []
    for first, last in ((0, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 2)):
        behind = ((0, 0 if first else padding), (0, 0))
        tensors = [
            run.float32(np.pad(given.array[first:last], behind))
            if isinstance(given, Exact)
            else run.operand(np.pad(given[first:last], behind))
            for given in inputs
        ]
        mask = np.pad(np.ones((last - first, 1), np.int64), behind).T
        outputs.append(op(*tensors, cached_batch(cache, mask, past=first)))
    got = run.run(*outputs)
    held = (x.array if isinstance(x, Exact) else run.rounded(x) for x in inputs)
    exact, rows = formula(*held, np.ones((1, prompt + 2), np.int64)), [got[0][:prompt], *got[1:]]
    run.compare(np.concatenate(rows), exact, outputs[0].dtype, inner=of_halves(run))


@each((True, 6), (False, 2))
def check_short_conv_step(run: Runner, has_bias: bool, prompt: int) -> None:
    """A prompt with more or fewer tokens than taps, padding after it, then two further tokens."""
    _compare_conv(run, (short_conv, delta_net_reference.short_conv), 3, has_bias, prompt)


@each((True, 6), (False, 2))
def check_causal_conv_step(run: Runner, has_bias: bool, prompt: int) -> None:
    """The same without gates."""
    _compare_conv(run, (causal_conv, delta_net_reference.causal_conv), 1, has_bias, prompt)


def _compare_conv(
    run: Runner, pair: tuple[Any, Any], parts: int, has_bias: bool, prompt: int
) -> None:
    channels, taps = 16, 4
    x, weight = normal("x", prompt + 2, parts * channels), normal("weight", channels, taps)
    bias = normal("bias", channels) if has_bias else None
    frozen = run.float32(weight), None if bias is None else run.float32(bias)

    def op(x: Tensor, batch: BatchBuffers) -> Tensor:
        made: Tensor = pair[0](run.graph, x, *frozen, batch)
        return made

    def formula(x: Array, segments: Array) -> Any:
        return pair[1](x, weight, bias, segments)

    _compare_steps(run, op, formula, [x], prompt)


@each((24, 40), (8, 8))
def check_gated_delta_step(run: Runner, key_dim: int, value_dim: int) -> None:
    """A prompt with padding after it, then two further tokens."""
    total, sizes = 68, (1, 2, key_dim, value_dim)
    q, k = normal("q", total, key_dim), normal("k", total, key_dim)
    v, decay = normal("v", total, 2 * value_dim), -np.exp(normal("decay", total, 2) - 2)
    beta = 1 / (1 + np.exp(-normal("beta", total, 2)))

    def op(*given: Any) -> Tensor:
        return gated_delta_rule(run.graph, *(*given, *sizes))

    def formula(*given: Any) -> Any:
        return delta_net_reference.gated_delta_rule(*(*given, delta_net_reference.Heads(*sizes)))

    _compare_steps(run, op, formula, [q, k, v, Exact(decay), Exact(beta)], total - 2)


@each((24, 40), (8, 8))
def check_mamba_step(run: Runner, state_size: int, head_dim: int) -> None:
    """A prompt with padding after it, then two further tokens."""
    total, heads = 68, 4
    x, bc = normal("x", total, heads * head_dim), normal("bc", total, 4 * state_size)
    dt, a_log, d = (
        np.exp(normal("dt", total, heads) - 1),
        normal("a_log", heads),
        normal("d", heads),
    )
    frozen = run.float32(a_log), run.float32(d)

    def op(x: Tensor, bc: Tensor, dt: Tensor, batch: BatchBuffers) -> Tensor:
        return mamba_scan(run.graph, x, bc, dt, *frozen, batch, heads, state_size)

    def formula(x: Array, bc: Array, dt: Array, segments: Any) -> Any:
        return mamba_reference.mamba_scan(x, bc, dt, a_log, d, segments, state_size)

    _compare_steps(run, op, formula, [x, bc, Exact(dt)], total - 2)


@each(
    (20, 13, None, None, False),
    (64, 150, 7, None, True),
    (22, 13, 5, 3.0, False),
    (64, 13, None, 3.0, False),
    (32, 13, None, None, False),
    (64, 13, None, None, False),
    (128, 13, None, None, False),
)
def check_cached_attention(
    run: Runner,
    head_dim: int,
    prompt: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """A prompt, then two further tokens: with window, softcap, sinks and grouped heads."""
    total, how = prompt + 2, (head_dim, 1 / np.sqrt(head_dim), window, softcap)
    q = 2 * normal("q", total, 4 * head_dim)
    k, v = normal("k", total, 2 * head_dim), normal("v", total, 2 * head_dim)
    sinks = rounded(2 * normal("sinks", 4), "float32") if has_sinks else None
    held = None if sinks is None else run.float32(sinks)

    def op(*given: Any) -> Tensor:
        return attention(run.graph, *(*given, *how, held))

    def formula(*given: Any) -> Any:
        return attention_reference.attention(*(*given, *how, sinks))

    _compare_steps(run, op, formula, [q, k, v], prompt, padding=0)


@each((40, 6, None, False), (16, 8, 4, True), (64, 16, None, False))
def check_attention_of_sequences(
    run: Runner, head_dim: int, heads: int, window: int | None, has_sinks: bool
) -> None:
    """New tokens of sequences of different lengths, whose places in the cache are mixed."""
    capacity, kv_columns, scale = 19, 2 * head_dim, 1 / np.sqrt(head_dim)
    past, places = [0, 3, 18, 8, 15], [3, 0, 4, 1, 2]
    q = 2 * normal("q", len(past), heads * head_dim)
    k, v = (normal(name, len(past) * capacity, kv_columns) for name in "kv")
    sinks = rounded(2 * normal("sinks", heads), "float32") if has_sinks else None
    batch = cached_batch(
        KVCache(capacity, len(past)), np.ones((len(past), 1), np.int64),
        past=np.array(past)[:, None], places=np.array(places)[:, None],
    )  # fmt: skip
    held = None if sinks is None else run.float32(sinks)
    of_q, of_k, of_v = map(run.operand, (q, k, v))
    o = attend(run.graph, of_q, of_k, of_v, batch, head_dim, scale, window, None, held)
    exact = []
    for row, (count, place) in enumerate(zip(past, places, strict=True)):
        own = slice(place * capacity, place * capacity + count + 1)
        queries = np.repeat(run.rounded(q)[row : row + 1], count + 1, axis=0)
        made = attention_reference.attention(
            queries, run.rounded(k)[own], run.rounded(v)[own], np.ones((1, count + 1), np.int64),
            head_dim, scale, window, None, sinks,
        )  # fmt: skip
        exact.append(made[-1])
    (got,) = run.run(o)
    run.compare(got, np.array(exact), o.dtype, inner=of_halves(run))


@each(
    (64, 64, True, False, False),
    (40, 16, False, False, True),
    (24, 16, True, True, False),
    (16, 16, False, True, True),
    (40, 32, True, False, True),
)
def check_rotated_append(
    run: Runner, head_dim: int, rotary_dim: int, has_norms: bool, by_rows: bool, alone: bool
) -> None:
    """Rotated queries and keys of three sequences at different places, and the cache's contents."""
    v, xs = normal("v", 3, 2 * head_dim), {"q": uneven("q", 3, 6 * head_dim)}
    xs["k"] = uneven("k", 3, 2 * head_dim)
    weights = {n: rounded(normal(f"{n} weight", head_dim), "float32") for n in xs}

    def make(batch: BatchBuffers) -> list[Tensor]:
        given = {n: run.operand(x) for n, x in xs.items()}
        if has_norms:
            frozen = {n: run.float32(weight) for n, weight in weights.items()}
            given = {n: qk_norm(run.graph, x, frozen[n], 1e-5) for n, x in given.items()}
        return [*given.values(), run.operand(v)]

    exact = [run.rounded(x) for x in xs.values()]
    if has_norms:
        pairs = zip(exact, weights.values(), strict=True)
        exact = [norms_reference.qk_norm(x, weight, 1e-5) for x, weight in pairs]
    # A norm within float32's error may be rounded to a neighbour.
    near = [2.0 * ROUNDING[run.dtype] * has_norms] * 2
    where = KVCache(5, 4), np.array([[3], [0], [4]]), np.array([[1], [3], [0]])
    how: Any = {"by_rows": by_rows, "alone": alone}
    compare_rotated(run, *where, (head_dim, rotary_dim), make, [*exact, v], [*near, 0.0], **how)


@dataclass(frozen=True)
class Row:
    """A sequence's sampling settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)


# Including neighbours, more for some invocations than for others.
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
# Of equally likely tokens the first wins; others belong to the same invocation or an earlier one.
_FIRST, _AS_LIKELY = 300, (301, 320, 300 + 256, 300 + 512, 255 + 256, 255 + 512)


@each((1000, False), (49_155, True), (1000, False, 7))
def check_choice(run: Runner, vocab: int, has_rotated: bool, times: int = 1) -> None:
    """Rows with settings of all kinds, ``times`` each, the last with a NaN logit.

    They are the last tokens that fit; the batch becomes that of the next ones, with their own
    positions for RoPE if it has some.
    """
    rows, past = [*times * ROWS[:-1], ROWS[-1]], 3
    count = len(rows)
    logits = 3 * normal("logits", count, vocab).astype(np.float32)
    logits[0, [_FIRST, *_AS_LIKELY]] = 20.0
    logits[-1, vocab // 2] = np.nan
    for row, settings in enumerate(rows):
        logits[row, list(settings.logit_bias)] += 12.0  # biased tokens are among the most likely
    seen = normal("seen", count, vocab) > 0.5
    seeds = [index * 0x1234567890 for index in range(count)]
    steps = [7 * index for index in range(count)]
    words = [
        seen_words(np.flatnonzero(row).tolist(), vocab, settings.logit_bias)
        for row, settings in zip(seen, rows, strict=True)
    ]
    choices = _choices(rows, words, vocab, seeds, [step - past for step in steps])
    batch = new_tokens(count, past)
    before = np.arange(count, dtype=np.uint32) % (past + 1)
    if has_rotated:
        storage = Storage("rotated", "check", before.nbytes, before)
        batch = replace(batch, rotated=vector("rotated", count, "uint32", storage))
    choose(run.graph, run.float32(logits.astype(np.float64)), batch, choices)
    own = [] if batch.rotated is None else [batch.rotated]
    made, ids, positions, *rotated = run.run(choices.chosen, batch.input_ids, batch.positions, *own)
    for after in rotated:
        run.compare_exactly(after, before.astype(np.float64) + 1.0)
    got = made.reshape(DECODE_STEPS_AHEAD, count)[past]
    run.compare_exactly(ids, np.minimum(ids, vocab - 1))
    run.compare_exactly(ids[:-1], got[:-1])
    run.compare_exactly(positions, np.full(count, past + 1.0))
    run.compare_exactly(got[[0, -1]], np.array([_FIRST, NONE], np.float64))
    for row, (settings, token) in enumerate(zip(rows[:-1], got.astype(int), strict=False)):
        _compare_choice(run, logits[row], seen[row], settings, seeds[row], steps[row], token)


def _choices(
    rows: Sequence[Row], seen: Sequence[Any], vocab: int, seeds: list[int], steps: list[int]
) -> SamplerState:
    bits = make_seen(len(seen), vocab)
    choices = make_choices(len(rows), bits)
    assert bits.storage is not None and choices.settings.storage is not None
    bits.storage.data = np.concatenate(seen)
    choices.settings.storage.data = encode_choices(rows, seeds, steps).view(np.float32)
    return choices


def _compare_choice(
    run: Runner, logits: Any, seen: Any, settings: Row, seed: int, step: int, token: int
) -> None:
    scores = sampling_reference.scores(
        logits.astype(np.float64), seen, biases=settings.logit_bias,
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
        min_p=settings.min_p, penalty=settings.repetition_penalty, seed=seed, step=step,
    )  # fmt: skip
    chosen = scores[token] if 0 <= token < len(logits) else np.inf
    run.compare(np.array([chosen]), np.array([scores.max()]))


@each((Row(0.0),), (Row(0.9, top_k=40, top_p=0.8, min_p=0.1, repetition_penalty=1.3),))
def check_choice_after_a_prompt(run: Runner, settings: Row) -> None:
    """The first token of the second of two sequences, whose prompt has two tokens."""
    vocab, seed, step, place = 1000, 0x1234567890, 7, 1
    logits = 3 * normal("logits", 1, vocab).astype(np.float32)
    seen = normal("seen", vocab) > 0.5
    own, other = (seen_words(np.flatnonzero(row).tolist(), vocab) for row in (seen, ~seen))
    choices = _choices([settings], [other, own], vocab, [seed], [step])
    ones, places = np.ones((1, 2), np.int64), np.array([[place]])
    batch = cached_batch(KVCache(4, 2), ones, rows=np.array([1]), places=places)
    choose(run.graph, run.float32(logits.astype(np.float64)), batch, choices)
    made, kept = run.run(choices.chosen, batch.input_ids)
    run.compare_exactly(kept, np.zeros(2))  # the batch stays the prompt's
    _compare_choice(run, logits[0], seen, settings, seed, step, int(made.reshape(-1)[0]))
