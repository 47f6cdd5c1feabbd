"""Text from a model, token by token."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling, check_count
from qlora_wgpu.model.qlora_model import QLoRAModel


def generate(
    model: QLoRAModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = 0,
    stop_ids: Collection[int] = (),
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    max_length: int | None = None,
    engine: Engine | None = None,
) -> Iterator[int]:
    """Yields one token id after another.

    Args:
        model: Base and adapter.
        prompt_ids: The prompt's tokens; at least one.
        max_new_tokens: Most tokens to yield.
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: Sample among this many of the likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens that together have this probability.
        seed: Seed of the sampling; None takes another each time.
        stop_ids: Tokens that end the text; they are not yielded.
        min_p: Sample among tokens that have at least this share of the likeliest's probability.
        repetition_penalty: What positive logits of tokens that the text has are divided by, and
            negative ones multiplied; 1 for none.
        logit_bias: What is added to the logits of tokens, by their ids; -100 bans one.
        max_length: Longest text the model was made for; generation ends there.
        engine: One with room for the whole text, to be used again; a new one by default.

    Raises:
        ConfigError: If a setting is out of its range, or the prompt is no token ids.
        DataError: If the prompt is empty or leaves no room within ``max_length``.
        CheckpointError: If the logits are not finite.
    """
    ids = token_ids(prompt_ids)
    if not ids:
        raise DataError("the prompt is empty: give at least one token to go on from")
    max_new_tokens = check_count("max_new_tokens", max_new_tokens)
    biases = {} if logit_bias is None else logit_bias
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty, biases)
    limit = max_length or len(ids) + max_new_tokens
    if max_length and len(ids) >= limit:
        raise DataError(f"the prompt has {len(ids)} tokens, and the model takes at most {limit}")
    count = min(max_new_tokens, limit - len(ids))
    if not count:
        return
    engine = engine or Engine(model, 1, len(ids) + count)
    text = engine.add(ids, sampling, max_new_tokens=count, stop_ids=stop_ids)
    try:
        yield from text
    finally:
        text.cancel()


def token_ids(prompt: Iterable[Any]) -> list[int]:
    """A prompt's tokens as plain integers.

    Raises:
        ConfigError: If it is none of token ids, such as a text.
    """
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ConfigError(
            "prompt_ids must be token ids, which are whole numbers: model.generate takes a text "
            "or messages, too"
        ) from None
