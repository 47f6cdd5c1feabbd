"""Scores of sequences by a reward model or classifier, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import Example, PromptFormat, bucket_length, collate, find_chat_template
from qlora_wgpu.data.row_formats import RowEncoder, encoded_or_raised
from qlora_wgpu.data.scored_rows import without_padding
from qlora_wgpu.errors import ConfigError, DataError, TokenizerError
from qlora_wgpu.generation.generate import token_ids
from qlora_wgpu.model.batch_encoding import pooled_rows
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import ScoreInputs
from qlora_wgpu.ops.score import Scoring

FloatArray = npt.NDArray[np.float32]
_INPUT = (
    "an input must be a string, a list of token ids, or a list of messages such as "
    "[{'role': 'user', 'content': '...'}]"
)


@dataclass(frozen=True)
class Classification:
    """A sequence's scores by a reward model or classifier.

    Attributes:
        scores: The score of each label, unnormalized (logits); of a reward model, the reward.
        label: The most likely label; for several labels per row, a list of those with a probability
            above 0.5; None of a reward model or a regression.
        probabilities: The probability of each label; None of a reward model or a regression.
    """

    scores: dict[str, float]
    label: str | list[str] | None = None
    probabilities: dict[str, float] | None = None

    @classmethod
    def of(cls, row: FloatArray, scoring: Scoring) -> Classification:
        """The meaning of a row of scores."""
        names = scoring.names
        z = row.astype(np.float64)
        scores = dict(zip(names, z.tolist(), strict=True))
        if scoring.is_paired or scoring.problem_type == "regression":
            return cls(scores)
        if scoring.problem_type == "multi_label_classification":
            shares = 1 / (1 + np.exp(-np.clip(z, -700, 700)))
            chosen = [name for name, share in zip(names, shares, strict=True) if share > 0.5]
            return cls(scores, chosen, dict(zip(names, shares.tolist(), strict=True)))
        shares = np.exp(z - z.max())
        shares /= shares.sum()
        label = names[int(z.argmax())]
        return cls(scores, label, dict(zip(names, shares.tolist(), strict=True)))

    def to_json(self) -> dict[str, Any]:
        """The fields of a row of output: only the reward of a reward model."""
        if self.label is None:
            values = list(self.scores.values())
            return {"score": values[0]} if len(values) == 1 else {"scores": self.scores}
        return {"label": self.label, "probabilities": self.probabilities, "scores": self.scores}


def scoring_of_model(model: QLoRAModel) -> Scoring:
    """The objective of a reward model or classifier.

    Raises:
        ConfigError: If the model is a language model.
    """
    scoring = model.options.objective.scoring
    if scoring is None or not model.architecture.classes:
        raise ConfigError(
            "the model is a language model, which has no scores: open the adapter of a run with "
            "train.objective: reward or classification"
        )
    return scoring


def encoded_inputs(
    inputs: Sequence[Any], prompts: PromptFormat, scoring: Scoring, limit: int | None
) -> list[list[int]]:
    """The tokens of inputs, encoded as in training, without what exceeds ``limit``.

    Raises:
        ConfigError: If an input is not a string, token ids or messages.
        DataError: If an input is empty.
        TokenizerError: If there are messages, but no chat template.
    """
    tokenizer, template = prompts.tokenizer, prompts.template
    if template is None:
        template = find_chat_template(None, tokenizer)
    encoder = RowEncoder(tokenizer, template, "all", use_flags=False, add_eos=scoring.is_paired)
    sequences = []
    for number, each in enumerate(inputs):
        if isinstance(each, str):
            row: dict[str, Any] = {"text": each}
            row_format = "text"
        elif isinstance(each, Sequence) and each and all(isinstance(m, Mapping) for m in each):
            if template is None:
                raise TokenizerError(
                    "the model has no chat template: use a string instead of messages"
                )
            row, row_format = {"messages": [dict(message) for message in each]}, "messages"
        else:
            try:
                ids = token_ids(each)
            except (ConfigError, TypeError):
                raise ConfigError(f"{_INPUT}, got {type(each).__name__}") from None
            if not ids:
                raise DataError(f"input {number} has no tokens")
            sequences.append(ids[:limit])
            continue
        made = encoded_or_raised(next(encoder.encode_many([(row, row_format)])), f"input {number}")
        if not made.ids:
            raise DataError(f"input {number} has no tokens")
        short = without_padding(made, tokenizer).ids
        sequences.append(list(short[:limit]))
    return sequences


def scores_of(
    model: QLoRAModel, sequences: Sequence[Sequence[int]], batch_size: int
) -> Iterator[tuple[list[int], FloatArray]]:
    """Yields the numbers of some sequences and their scores (sequences, classes).

    Sequences of similar length are batched; a score does not depend on its batch.
    """
    scoring = scoring_of_model(model)
    longest = max(map(len, sequences), default=1)
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        ids = [np.array(sequences[i], np.int32) for i in chosen]
        length = bucket_length(max(map(len, ids)), max(longest, 2))
        rows = [[Example(each, each)] for each in ids] + [[]] * (batch_size - len(ids))
        batch = collate(rows, 0, max(length, 2))
        checked, _, mask = model.checked(batch.input_ids, batch.labels, batch.attention_mask)
        targets = np.zeros((len(ids), scoring.width), np.float32)
        with model.device.in_turn:
            made = model.scores(
                checked, mask, ScoreInputs(pooled_rows(checked, mask, None), targets)
            )
            model.zero_stats()
        if not np.isfinite(made).all():
            raise DataError("the scores are not finite: the adapter, or the base model, is damaged")
        yield chosen, made
