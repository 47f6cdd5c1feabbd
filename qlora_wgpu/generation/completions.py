"""Many prompts completed, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import DataError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.growing_text import FinishReason, Text
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.model.qlora_model import QLoRAModel


@dataclass(frozen=True)
class Prompt:
    """What is completed.

    Attributes:
        ids: Its tokens.
        stop_ids: Tokens that end the completion.
        stop: Strings that end it.
        is_text: Whether the completion goes on with it as one text, instead of answering.
    """

    ids: Sequence[int]
    stop_ids: Collection[int] = ()
    stop: Collection[str] = ()
    is_text: bool = False


@dataclass(frozen=True)
class Completion:
    """What a prompt was completed with.

    Attributes:
        text: Without what ended it.
        finish_reason: Why it ended: a stop token or string came, or it is as long as it may be.
        tokens: How many there are, those of a stop string included.
    """

    text: str
    finish_reason: FinishReason
    tokens: int


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
    """Yields completions in the order of the prompts; each is as if it were computed alone.

    Args:
        model: Base and adapter.
        tokenizer: The model's.
        prompts: What is completed.
        max_new_tokens: Most tokens of each.
        batch: How many are computed at a time.
        sampling: How tokens are chosen, each prompt with a seed of its own: this one's and the
            prompt's number from 0 on. By default the likeliest.
        max_length: Longest text that the model was made for.

    Raises:
        DataError: If a prompt is empty or longer than the model takes.
        CheckpointError: If logits are not finite.
    """
    if not prompts:
        return
    longest = max(len(prompt.ids) for prompt in prompts)
    capacity = min(longest + max_new_tokens, max_length or longest + max_new_tokens)
    engine = Engine(model, min(batch, len(prompts)), capacity)
    settings = sampling or Sampling()
    growing: deque[tuple[Text, TextStream]] = deque()
    for number, prompt in enumerate(prompts):
        own = settings
        if settings.seed is not None:
            own = replace(settings, seed=settings.seed + number)
        try:
            text = engine.add(
                prompt.ids, own, max_new_tokens=max_new_tokens, stop_ids=prompt.stop_ids
            )
        except DataError as err:
            raise DataError(f"prompt {number + 1}: {err}") from err
        context = prompt.ids if prompt.is_text else ()
        growing.append((text, TextStream(tokenizer, prompt.stop, context)))
    streams = {id(text): stream for text, stream in growing}
    while growing:
        text, stream = growing[0]
        if text.finish_reason is not None:
            growing.popleft()
            yield Completion(stream.text, text.finish_reason, len(text.ids))
            continue
        for each in engine.step():
            _read(each, streams[id(each)])


def _read(text: Text, stream: TextStream) -> None:
    """Takes the token that a text has got, if it did not end with none."""
    if len(text.ids) > stream.count:
        stream.push(text.ids[-1])
        if stream.stopped:
            text.finish_reason = "stop"
