"""How far what a result computes is from base and adapter, as they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import changed, find_run
from qlora_wgpu.errors import DeviceError, QLoRAError, TokenizerError
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.runs.data import read_data
from qlora_wgpu.runs.opening import OpenedModel, load_adapted
from qlora_wgpu.runs.prompts import tokenizer_for
from qlora_wgpu.training import Observer

FloatArray = npt.NDArray[np.float64]
Logits = list[npt.NDArray[np.float32]]
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Two plus three makes five, and water boils at "
    "one hundred degrees. Once upon a time there was a little house by the sea."
)
_TEXTS, _TOKENS = 4, 64
_AT_ONCE = 1 << 22  # logits that become float64 at once


@dataclass(frozen=True)
class Drift:
    """How two models' next tokens differ.

    Attributes:
        tokens: Positions that were compared.
        texts: What they are of, in words.
        mean: Mean difference of logits.
        largest: Largest difference.
        divergence: Kullback-Leibler divergence from the first to the second, nats a token.
        same: Share of positions whose likeliest token is the same.
        knowledge: How far the first model's predictions are from their mean over all positions,
            nats a token: what it knows from the texts. A model that predicts at random has lost
            about as much.
    """

    tokens: int
    texts: str
    mean: float
    largest: float
    divergence: float
    same: float
    knowledge: float

    @property
    def lost(self) -> float:
        """The divergence as a share of what the model knows."""
        return self.divergence / max(self.knowledge, 1e-12)

    def __str__(self) -> str:
        return (
            f"over {self.tokens} tokens {self.texts}: logits by {self.mean:.3g} in the mean and "
            f"{self.largest:.3g} at most, KL divergence {self.divergence:.3g} nats a token "
            f"({100 * self.lost:.2g} % of what it knows of the text), "
            f"{100 * self.same:.0f} % of the likeliest tokens the same"
        )


@dataclass(frozen=True)
class Measured:
    """A model as it was trained, and what it predicts.

    Attributes:
        ids: The texts.
        texts: What they are, in words.
        logits: Of each text, (tokens, vocabulary).
    """

    ids: Sequence[Sequence[int]]
    texts: str
    logits: Logits


@contextmanager
def on_a_device(what: str = "") -> Iterator[None]:
    """Says where the device fails to measure that a result can be had without it.

    Args:
        what: What is there already, to be told first.
    """
    try:
        yield
    except DeviceError as err:
        raise type(err)(f"{what}{err}; --no-check does without measuring") from err


def measure_trained(
    source: OpenedModel, adapter: str | None, settings: Config, observer: Observer
) -> Measured:
    """What base and adapter predict for a few texts of the run's data, as they were trained.

    Args:
        source: The base.
        adapter: The adapter's folder.
        settings: From ``opened_as_trained``.
        observer: Who is told how far it is.
    """
    ids, texts = _texts(source, adapter, observer)
    with load_adapted(source, adapter, settings, observer) as model:
        return Measured(ids, texts, _logits(model, ids))


def measure_drift(
    trained: Measured, result: OpenedModel, settings: Config, observer: Observer
) -> Drift:
    """How far a result is from what was trained.

    Args:
        trained: From ``measure_trained``.
        result: The result, opened.
        settings: Those of ``measure_trained``; the result is not quantized anew.
        observer: Who is told how far it is.
    """
    plain = changed(settings, {"quant": {"scheme": "none"}})
    with load_adapted(result, None, plain, observer, with_notes=False) as model:
        after = _logits(model, trained.ids)
    return drift_between(trained.logits, after, trained.texts)


def drift_between(before: Logits, after: Logits, texts: str) -> Drift:
    """The figures of two models' logits, each text's (tokens, vocabulary)."""
    sums = np.zeros(4)
    largest, count, elements = 0.0, 0, 0
    mean_of_all = _mean_prediction(before)
    for rows, others in _pieces(before, after):
        p, q = log_softmax(rows), log_softmax(others)
        apart = np.abs(rows - others)
        sums += (
            apart.sum(),
            (np.exp(p) * (p - q)).sum(),
            (rows.argmax(-1) == others.argmax(-1)).sum(),
            (np.exp(p) * (p - np.log(mean_of_all))).sum(),
        )
        largest = float(np.max([largest, apart.max()]))  # NaN stays
        count, elements = count + len(rows), elements + rows.size
    apart_sum, divergence, same, knowledge = sums
    return Drift(
        tokens=count,
        texts=texts,
        mean=apart_sum / elements,
        largest=largest,
        divergence=divergence / count,
        same=same / count,
        knowledge=knowledge / count,
    )


def log_softmax(logits: FloatArray) -> FloatArray:
    """Logarithms of probabilities, along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _mean_prediction(logits: Logits) -> FloatArray:
    total, count = np.zeros(logits[0].shape[-1]), 0
    for rows, _ in _pieces(logits, logits):
        total += np.exp(log_softmax(rows)).sum(0)
        count += len(rows)
    smallest = np.finfo(np.float64).tiny
    mean: FloatArray = np.maximum(total / count, smallest)
    return mean


def _pieces(before: Logits, after: Logits) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Some rows of both at a time, in float64."""
    step = max(_AT_ONCE // before[0].shape[-1], 1)
    for one, other in zip(before, after, strict=True):
        for i in range(0, len(one), step):
            yield one[i : i + step].astype(np.float64), other[i : i + step].astype(np.float64)


def _logits(model: QLoRAModel, texts: Sequence[Sequence[int]]) -> Logits:
    return [model.logits(np.array([ids]))[0].astype(np.float32) for ids in texts]


def _texts(
    source: OpenedModel, adapter: str | None, observer: Observer
) -> tuple[list[list[int]], str]:
    """A few texts of the run's data, else of nobody's, and what they are in words."""
    vocabulary = source.for_adapter(adapter).architecture.vocab_size
    try:
        tokenizer = tokenizer_for(source, adapter)
    except TokenizerError:
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocabulary, _TOKENS).tolist()], "at random"
    run = None if adapter is None else find_run(adapter)
    settings = None if run is None else load_config(run / "config.yaml")
    for held_out in (True, False):
        if settings is None or (held_out and not (settings.data.eval or settings.data.eval_split)):
            continue
        try:
            dataset = read_data(settings, tokenizer, observer, held_out=held_out)
        except QLoRAError:  # moved, or of a hub that is not reached
            continue
        step = max(len(dataset) // _TEXTS, 1)
        rows = [dataset[i] for i in range(0, len(dataset), step)][:_TEXTS]
        ids = [[int(i) for i in row.input_ids[:_TOKENS]] for row in rows]
        kept = [row for row in ids if row and max(row) < vocabulary]
        if kept:
            return kept, f"of {'held-out' if held_out else 'training'} data"
    ids_of_sample = [i for i in tokenizer.encode(_SAMPLE) if i < vocabulary][:_TOKENS]
    return [ids_of_sample], "of a sample text"
