"""Sampling of each sequence's next token, on the device.

The token is written where the next forward pass reads it, so that several can be computed before
the host reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, GraphError
from qlora_wgpu.graph.tensor import Storage, Tensor, ceil_div, vector
from qlora_wgpu.kernels.common import row_constants
from qlora_wgpu.limits import LOGIT_BIASES
from qlora_wgpu.ops.batch import BatchBuffers

NONE = 0xFFFFFFFF
"""The token if a logit is not finite."""
DECODE_STEPS_AHEAD = 8
"""How many tokens of a sequence can be computed before they are read."""
_THREADS = 256  # minimum per row: every device allows this many in a workgroup
_PASSES = 70  # over a row's logits, at most
_MOST_TURNS = 60_000  # software GPUs end a shader's loops after 65,535 turns of all together
_WORDS = 8  # of a sequence's settings
_LEAST_LOG = -3.0e38


class Settings(Protocol):
    """A sequence's sampling settings."""

    @property
    def temperature(self) -> float:
        """0 is greedy; else logits are divided by it."""

    @property
    def top_k(self) -> int:
        """Sample from this many of the most likely tokens; 0 for all."""

    @property
    def top_p(self) -> float:
        """Sample from the most likely tokens with this total probability."""

    @property
    def min_p(self) -> float:
        """Sample from tokens with at least this fraction of the highest probability."""

    @property
    def repetition_penalty(self) -> float:
        """Divisor of positive logits of tokens that the sequence contains."""

    @property
    def logit_bias(self) -> Mapping[int, float]:
        """Biases added to the logits of tokens, at most ``LOGIT_BIASES``."""


@dataclass(frozen=True)
class SamplerState:
    """The sampling settings of a batch's rows, and the sampled tokens."""

    settings: Tensor  # float32 (rows · 8), by ``encode_choices``
    seen: Tensor  # uint32 (sequences · words), by ``seen_words``
    # uint32 (rows · DECODE_STEPS_AHEAD): the tokens at positions 0, 1, 2, … modulo that number; the
    # first one after prefill.
    chosen: Tensor


def _words_of_text(vocab: int) -> int:
    return -(-vocab // 32) + 1 + 2 * LOGIT_BIASES


def make_seen(texts: int, vocab: int) -> Tensor:
    """Space for the ``seen_words`` of each sequence.

    The last one is for rows without a sequence, if their tokens are sampled.
    """
    count = texts * _words_of_text(vocab)
    return vector("seen tokens", count, "uint32", Storage("seen tokens", "kv cache", 4 * count))


def unused_place(seen: Tensor, vocab: int) -> int:
    """The place in ``seen`` of rows without a sequence: the last one."""
    return seen.columns // _words_of_text(vocab) - 1


def make_choices(rows: int, seen: Tensor) -> SamplerState:
    words = _WORDS * rows
    settings = Storage("choices", "inputs", 4 * words)
    chosen = Storage("chosen tokens", "inputs", 4 * rows * DECODE_STEPS_AHEAD)
    return SamplerState(
        vector("choices", words, "float32", settings),
        seen,
        vector("chosen", rows * DECODE_STEPS_AHEAD, "uint32", chosen),
    )


def choose(g: Graph, logits: Tensor, batch: BatchBuffers, choices: SamplerState) -> None:
    """Samples each row's token from its float32 logits, which are modified, and marks it as seen.

    A decoding batch is overwritten with the sampled tokens.
    """
    rows, words = logits.rows, _words_of_text(logits.columns)
    places, fits = batch.places, choices.chosen.columns == rows * DECODE_STEPS_AHEAD
    if not fits or choices.seen.columns % words or places is None or batch.cache is None:
        raise GraphError(f"sampling: {logits} do not fit {choices}")
    inputs = vector("inputs", batch.storage.nbytes // 4, "uint32", batch.storage)
    g.launch(
        "sampling/choose.wgsl",
        (rows, 1, 1),
        {
            "logits": logits,
            "choices": choices.settings,
            "inputs": inputs,
            "seen": choices.seen,
            "chosen": choices.chosen,
            "rotated": batch.rotated,
        },
        {
            "vocab": logits.columns,
            "stride": logits.stride,
            "words": words,
            "rows": rows,
            "ids_at": batch.input_ids.offset // 4,
            "positions_at": batch.positions.offset // 4,
            "places_at": places.offset // 4,
            "capacity": batch.cache.capacity,
        },
        {**_threads(g, logits.columns), "NEXT": batch.decodes, "AHEAD": DECODE_STEPS_AHEAD},
    )


def _threads(g: Graph, vocab: int) -> dict[str, Constant]:
    """The invocations that share a row: on software GPUs a subgroup, if that ends their loops."""
    of_rows = int(row_constants(g, vocab)["THREADS"])
    in_subgroup = g.profile.textures and _PASSES * ceil_div(vocab, 4 * of_rows) < _MOST_TURNS
    return {
        "THREADS": of_rows if in_subgroup else max(of_rows, _THREADS),
        "ONE_THREAD": False,
        "SUBGROUP": in_subgroup,
    }


def encode_choices(
    settings: Sequence[Settings], seeds: Sequence[int], steps: Sequence[int]
) -> npt.NDArray[np.uint32]:
    words = np.zeros((len(settings), _WORDS), np.uint32)
    floats = words.view(np.float32)
    for row, (own, seed, step) in enumerate(zip(settings, seeds, steps, strict=True)):
        floats[row, 0] = inverse_of(own.temperature)
        floats[row, 1] = own.top_p
        floats[row, 2] = np.log(own.min_p) if own.min_p > 0 else _LEAST_LOG
        floats[row, 3] = own.repetition_penalty
        words[row, 4:] = [
            min(own.top_k, NONE), step & 0xFFFFFFFF, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        ]  # fmt: skip
    return words.reshape(-1)


def inverse_of(temperature: float) -> float:
    """The factor of logits, 0 if greedy; at most 1e30, where only the largest logit matters."""
    return min(1 / temperature, 1e30) if temperature > 1e-30 else 1e30 * (temperature > 0)


def seen_words(
    ids: Sequence[int], vocab: int, biases: Mapping[int, float] | None = None
) -> npt.NDArray[np.uint32]:
    """Encodes a bit for each token that a sequence contains, and its logit biases.

    At most ``LOGIT_BIASES`` biases, for tokens of the vocabulary.
    """
    words, room = np.zeros(_words_of_text(vocab), np.uint32), 1 + 2 * LOGIT_BIASES
    bits = np.zeros(32 * (len(words) - room), np.uint8)
    bits[list(ids)] = 1
    words[:-room] = np.packbits(bits, bitorder="little").view(np.uint32)
    given = dict(biases or {})
    words[-room] = len(given)
    pairs = words[1 - room :].reshape(-1, 2)[: len(given)]
    pairs[:, 0] = list(given)
    pairs[:, 1] = np.array(list(given.values()), np.float32).view(np.uint32)
    return words
