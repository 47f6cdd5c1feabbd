"""Held-out rows answered, and how many answers are those of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.errors import DataError, option
from qlora_wgpu.generation import QLoRAModel, continuation
from qlora_wgpu.generation.generate import Prompt, complete
from qlora_wgpu.labels import IGNORE_INDEX


@dataclass(frozen=True)
class GenerationEval:
    """How held-out rows are answered: with the likeliest tokens."""

    max_new_tokens: int = 256  # most tokens of an answer
    batch: int = 8  # how many are computed at a time


@dataclass(frozen=True)
class Prediction:
    """A row's first answer."""

    prompt: str  # the text before it
    reference: str  # the data's answer
    prediction: str  # the model's

    @property
    def exact_match(self) -> bool:
        """Whether they are the same but for white space around them."""
        return self.prediction.strip() == self.reference.strip()


@dataclass(frozen=True)
class EvalPrompt:
    """The beginning of a row, up to its first answer, and that answer's tokens."""

    ids: list[int]
    answer: list[int]


def questions(dataset: Dataset) -> list[EvalPrompt]:
    """The rows that have something before what is learnt."""
    found = []
    for number in range(len(dataset)):
        example = dataset[number]
        learnt = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
        if not learnt or learnt[0] < 2:
            continue
        later = set(range(learnt[0], len(example))) - set(learnt)
        end = min(later, default=None)
        ids = [int(i) for i in example.input_ids]
        found.append(EvalPrompt(ids[: learnt[0]], ids[learnt[0] : end]))
    if not found:
        raise DataError(
            "no held-out row has a prompt before what is learnt, as texts have none: leave "
            f"{option('generate', ...)} out, or give rows of messages, or of prompt and completion"
        )
    return found


def predictions(
    model: QLoRAModel,
    tokenizer: Tokenizer,
    asked: list[EvalPrompt],
    how: GenerationEval,
    progress: Callable[[int, int], None],
) -> list[Prediction]:
    """The model's answers.

    Args:
        model: Base and adapter.
        tokenizer: The model's.
        asked: From ``questions``.
        how: How they are answered.
        progress: Told how many are done, and of how many.
    """
    ends = {question.answer[-1] for question in asked}
    special = {token for token in ends if not tokenizer.decode([token])}
    stops = tokenizer.eos_token_ids | special  # of the template's turns, too
    prompts = [Prompt(question.ids, stops) for question in asked]
    made = complete(
        model, tokenizer, prompts, max_new_tokens=how.max_new_tokens, batch=how.batch,
        max_length=model.max_length,
    )  # fmt: skip
    found = []
    for number, (question, each) in enumerate(zip(asked, made, strict=True), 1):
        reference = continuation(tokenizer, (), [t for t in question.answer if t not in stops])
        found.append(Prediction(tokenizer.decode(question.ids), reference, each.text))
        progress(number, len(asked))
    return found
