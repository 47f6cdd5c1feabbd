"""Text from a model, token by token."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from qlora_wgpu.errors import CheckpointError, ConfigError, DataError
from qlora_wgpu.generation.decoder import Decoder
from qlora_wgpu.model.qlora_model import QLoRAModel


def generate(
    model: QLoRAModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    max_length: int | None = None,
    decoder: Decoder | None = None,
) -> Iterator[int]:
    """Yields one token id after another.

    Args:
        model: Base and adapter.
        prompt_ids: The prompt's tokens; at least one.
        max_new_tokens: Most tokens to yield.
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: Sample among this many of the likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens that together have this probability.
        seed: Seed of the sampling.
        stop_ids: Tokens that end the text; they are not yielded.
        max_length: Longest text the model was made for; generation ends there.
        decoder: One with room for the whole text, to be used again; a new one by default.

    Raises:
        ConfigError: If the temperature is no number from 0 on.
        DataError: If the prompt is empty or leaves no room within ``max_length``.
        CheckpointError: If the logits are not finite.
    """
    ids = list(prompt_ids)
    if not ids:
        raise DataError("the prompt is empty: give at least one token to go on from")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature must be a number from 0 on, got {temperature}")
    limit = max_length or len(ids) + max_new_tokens
    if len(ids) >= limit:
        raise DataError(f"the prompt has {len(ids)} tokens, and the model takes at most {limit}")
    random = np.random.Generator(np.random.Philox(seed))
    count = min(max_new_tokens, limit - len(ids))
    decoder = decoder or Decoder(model, len(ids) + count)
    logits = decoder.start(ids)
    token = ids[-1]
    for index in range(count):
        if index:
            logits = decoder.step(token)
        if not np.isfinite(logits).all():
            raise CheckpointError(
                "the model's logits are not finite: its adapter, or the base model, is damaged"
            )
        token = _pick(logits, temperature, top_k, top_p, random)
        if token in stop_ids:
            return
        yield token


def _pick(
    logits: npt.NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    random: np.random.Generator,
) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    # The largest is taken off first: however small the temperature, nothing overflows.
    p = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    if top_p < 1.0:
        # The token that crosses the threshold is kept, so one always is.
        kept = int(np.searchsorted(np.cumsum(p), top_p)) + 1
        order, p = order[:kept], p[:kept] / p[:kept].sum()
    return int(random.choice(order, p=p))
