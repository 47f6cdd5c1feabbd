"""The reference model of DPO and KTO: its log probabilities are computed once, before training.

As in TRL with an adapter, it is the base alone, or with the adapter in ``lora.init_from``. Its log
probabilities are cached on disk, under a hash of everything that determines them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from qlora_wgpu.cache_folder import cache_path, cache_problem, make_cache_folder
from qlora_wgpu.checkpoint import write_file
from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example, bucket_length
from qlora_wgpu.errors import CheckpointError, DataError
from qlora_wgpu.files import open_file
from qlora_wgpu.lora.peft_names import EMBEDDING_B, LORA_A, parse_name
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.steps import PreferenceInputs
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.training.batching import padded_batch
from qlora_wgpu.training.executor import Executor, MicroBatch
from qlora_wgpu.training.images import BatchImages
from qlora_wgpu.training.observers import Observer
from qlora_wgpu.training.preferences import (
    Block,
    KLPairs,
    PreferenceData,
    References,
    in_blocks,
    preference_of,
    scoring_of,
)
from qlora_wgpu.training.scoring import ScoredData

_VERSION = 2
FloatArray = npt.NDArray[np.float32]
Progress = Callable[[str], None]


def answers_of(
    rows: Dataset | None,
    model: AdapterModel,
    executor: Executor,
    config: Config,
    observer: Observer,
    longest: int,
    images: BatchImages | None = None,
) -> PreferenceData | ScoredData | None:
    """A data set of sequences, or of answers with the reference model's log probabilities."""
    preference, scoring = preference_of(config.train), scoring_of(config.train)
    if rows is None:
        return None
    limit = max(longest, rows.longest)
    if scoring is not None:
        return ScoredData(rows, scoring, limit)
    if preference is None:
        return None
    size = config.rows_at_once
    reference = ReferenceModel(model, executor, rows, preference, size, limit, images)
    logps = reference.logps(keep=config.data.cache, progress=observer.activity)
    return PreferenceData(rows, preference, logps, limit, images)


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """The current model as the reference for all answers of a data set."""

    model: AdapterModel  # the model
    executor: Executor  # computes the micro-batches
    dataset: Dataset  # the answers
    preference: Preference  # the objective that needs them
    batch_size: int  # rows of a micro-batch
    longest: int  # maximum number of tokens of an answer
    images: BatchImages | None = None  # the answers' images, if they have any

    def logps(self, *, keep: bool, progress: Progress) -> References:
        """The log probability of each answer; with ``keep``, cached on disk."""
        dataset, count = self.dataset, len(self.dataset)
        if not self.preference.has_reference:
            return References.none(count)
        parts: list[Sequence[Example]] = [dataset]
        if self.preference.has_divergence:
            parts.append(KLPairs(dataset, self.longest))
        devices, name = self.executor.devices(), self.key()
        logps = _cached(name, len(parts) * count) if keep else None
        if logps is not None:  # memory is planned with these programs
            for examples, block in product(parts, self._blocks()):
                tokens = max(sum(len(examples[i]) for i in row) for row in block)
                length = bucket_length(tokens, max(self.longest, tokens))
                self.executor.prepare(self.batch_size, length, "sums")
        else:
            logps = np.concatenate([self._computed(part, progress) for part in parts])
            progress("")
            if keep and cache_problem() is None:
                if self.executor.devices() != devices:  # workers with other GPUs have joined
                    name = self.key()
                _store(name, logps)
        return References(logps[:count], logps[count:])

    def _blocks(self) -> list[Block]:
        return in_blocks(self.dataset, self.preference, self.batch_size)

    def _computed(self, examples: Sequence[Example], progress: Progress) -> FloatArray:
        result = np.zeros(len(self.dataset), np.float32)
        blocks, size = self._blocks(), self.batch_size

        def encoded(block: Block) -> MicroBatch:
            rows = [[examples[i] for i in row] for row in block]
            longest = max(self.longest, max(len(example) for row in rows for example in row))
            batch = padded_batch(rows, size, longest)
            checked = self.model.checked(batch.input_ids, batch.labels, batch.attention_mask)
            tokens = sum(len(example) for row in rows for example in row)
            images = None if self.images is None else self.images(rows, checked[0], checked[2])
            plain = PreferenceInputs.plain(len(rows))
            return MicroBatch(*checked, None, tokens, samples=plain, images=images)

        def done(count: int) -> None:
            progress(f"reference model: {count * size:,} of {len(result):,} answers")

        logps = self.executor.answer_logps(map(encoded, blocks), done)
        for block, each in zip(blocks, logps, strict=True):
            result[[i for row in block for i in row]] = each
        if not np.isfinite(result).all():
            raise DataError("the reference model's log probability of an answer is not finite")
        return result

    def key(self) -> str:
        """A hash of everything that determines the results, bit-exactly on one kind of device."""
        model, devices = self.model, self.executor.devices()
        folder = model.folder
        folder.finish_fingerprint()
        known = {
            "version": _VERSION,
            "base": folder.fingerprint,
            "quant": model.quant.model_dump(),
            "compute_dtype": model.compute_dtype,
            "vocabulary": [model.architecture.vocab_size, list(model.architecture.new_tokens)],
            "adapter": self._adapter(),
            "data": self.dataset.fingerprint,
            "divergence": self.preference.has_divergence,
            "batch": [self.batch_size, self.longest],
            **({} if self.images is None else {"images": self.images.key}),
            "device": "; ".join(name for name, _ in devices),
            "profile": "; ".join(kernels for _, kernels in devices),
        }
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]

    def _adapter(self) -> list[object] | None:
        """What the adapter adds to the base: a hash of its parameters, their names and settings.

        None if it leaves the base unchanged, whatever its A matrices are. An adapter that is part
        of the base (PiSSA, OLoRA) never does, since that base is rounded without it.
        """
        adapter = self.model.adapter
        parameters = self.model.read_flat(adapter.parameters)
        own, idle = adapter.split(parameters), adapter.split(self.executor.neutral())
        free = {name for name in own if (parse_name(name) or ("", ""))[1] in (LORA_A, EMBEDDING_B)}
        is_neutral = all(np.array_equal(own[name], idle[name]) for name in own.keys() - free)
        if is_neutral and adapter.start is None:
            return None
        settings = adapter.config.model_dump(exclude={"lora_dropout", "init_from"})
        return [hashlib.sha256(parameters.tobytes()).hexdigest(), sorted(own), settings]


def _cached(name: str, count: int) -> FloatArray | None:
    """Log probabilities from the cache; None if they are missing or damaged."""
    try:
        with open_file(cache_path("references") / f"{name}.bin") as file:
            data = file.read(4 * count + 33)
    except OSError:
        return None
    body, digest = data[: 4 * count], data[4 * count :]
    if len(body) != 4 * count or _digest(name, body) != digest:
        return None
    return np.frombuffer(body, np.float32).copy()


def _store(name: str, numbers: FloatArray) -> None:
    folder = cache_path("references")
    body = numbers.tobytes()
    try:
        make_cache_folder(folder)
        write_file(folder / f"{name}.bin", body + _digest(name, body))
    except (CheckpointError, OSError):
        return  # they are computed again next time


def _digest(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + body).digest()
