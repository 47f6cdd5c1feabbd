"""Generates text for one prompt, or for many in batches."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling, check_count, check_stop_ids
from qlora_wgpu.generation.sequence import FinishReason, Request
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.model.image_inputs import ImageFeatures
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
    images: Sequence[ImageFeatures] = (),
) -> Iterator[int]:
    """Yields generated token ids.

    Args:
        model: Base and adapter.
        prompt_ids: Token ids of the prompt; at least one.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Number of most likely tokens to sample from; 0 for all.
        top_p: Probability of the smallest set of most likely tokens to sample from.
        seed: Random seed; None for a new one each time.
        stop_ids: Token ids that end the generation; they are not yielded.
        min_p: Minimum probability of a token, relative to the most likely one.
        repetition_penalty: Divides positive logits of tokens that have occurred, and multiplies
            negative ones; 1 for none.
        logit_bias: Added to the logits of tokens, by token id; -100 bans a token.
        max_length: Maximum number of tokens, prompt included; by default unlimited.
        engine: An engine with sufficient capacity, to be reused; by default a new one.
        images: Features of the prompt's images, in the order of their image tokens.

    Raises:
        ConfigError: If a parameter is out of range, or the prompt is not a list of token ids.
        DataError: If the prompt is empty or as long as ``max_length``.
        CheckpointError: If the logits are not finite.
    """
    ids = token_ids(prompt_ids)
    if not ids:
        raise DataError("the prompt is empty: at least one token is required")
    max_new_tokens = check_count("max_new_tokens", max_new_tokens)
    check_stop_ids(stop_ids)
    biases = {} if logit_bias is None else logit_bias
    sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty, biases)
    limit = max_length or len(ids) + max_new_tokens
    if max_length and len(ids) >= limit:
        raise DataError(f"the prompt has {len(ids)} tokens, the model's maximum is {limit}")
    count = min(max_new_tokens, limit - len(ids))
    if not count:
        return
    engine = engine or Engine(model, 1, len(ids) + count)
    text = engine.add(ids, sampling, max_new_tokens=count, stop_ids=stop_ids, images=images)
    try:
        yield from text
    finally:
        text.cancel()


def token_ids(prompt: Iterable[Any]) -> list[int]:
    """Converts token ids to Python integers."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise ConfigError(
            "prompt_ids must be token ids, which are integers: for text or messages, use "
            "model.generate"
        ) from None


@dataclass(frozen=True)
class Prompt:
    """A prompt to complete."""

    ids: Sequence[int]
    stop_ids: Collection[int] = ()  # tokens that end the completion
    stop: Collection[str] = ()  # strings that end it
    is_text: bool = False  # whether the completion continues the prompt's text
    images: Sequence[ImageFeatures] = ()  # of its image tokens, in order


_QUEUED = 4  # requests per sequence of a batch that ``complete`` adds at a time


@dataclass(frozen=True)
class Completion:
    """The completion of a prompt."""

    text: str  # without the stop string
    finish_reason: FinishReason
    ids: Sequence[int]  # its tokens, including those of a stop string


def complete(
    model: QLoRAModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch: int = 1,
    sampling: Sampling | None = None,
    max_length: int | None = None,
) -> Iterator[Completion]:
    """Yields completions in the order of the prompts, bit-identical to unbatched ones.

    Images of a prompt are read shortly before it is prefilled.
    """
    if not prompts:
        return
    longest = max(len(prompt.ids) for prompt in prompts)
    capacity = min(longest + max_new_tokens, max_length or longest + max_new_tokens)
    engine = Engine(model, min(batch, len(prompts)), capacity)
    settings = sampling or Sampling()
    for number, prompt in enumerate(prompts, 1):
        try:
            engine.checked(prompt.ids, max_new_tokens)
        except DataError as err:
            raise DataError(f"prompt {number}: {err}") from err
    left = enumerate(prompts)
    active: deque[tuple[Request, TextStream]] = deque()
    streams: dict[int, TextStream] = {}  # by the id of their request
    while True:
        while len(streams) < _QUEUED * engine.texts and (following := next(left, None)):
            number, prompt = following
            own = settings
            if settings.seed is not None:
                own = replace(settings, seed=settings.seed + number)
            text = engine.add(
                prompt.ids, own, max_new_tokens=max_new_tokens, stop_ids=prompt.stop_ids,
                images=list(prompt.images),
            )  # fmt: skip
            context = prompt.ids if prompt.is_text else ()
            active.append((text, TextStream(tokenizer, prompt.stop, context)))
            streams[id(text)] = active[-1][1]
        if not active:
            return
        text, stream = active[0]
        if text.finish_reason is not None:
            active.popleft()
            del streams[id(text)]
            yield Completion(stream.text, text.finish_reason, tuple(text.ids))
            continue
        for each in engine.step():
            _read(each, streams[id(each)])


def _read(text: Request, stream: TextStream) -> None:
    if len(text.ids) > stream.count:
        stream.push(text.ids[-1])
        if stream.stopped:
            text.finish_reason = "stop"
