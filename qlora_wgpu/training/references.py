"""What the reference says of answers: the model as a run begins, asked once for each answer.

It is TRL's reference of an adapter: the base alone, or with the adapter that a run goes on from.
What it said is kept on disk beside prepared data, under a hash of all that decides it.
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
from qlora_wgpu.training.observers import Observer
from qlora_wgpu.training.preferences import (
    Block,
    KLPairs,
    PreferenceData,
    References,
    in_blocks,
    preference_of,
)

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
) -> PreferenceData | None:
    """A data set as an objective over answers reads it, with what the reference says of it."""
    preference = preference_of(config.train)
    if preference is None or rows is None:
        return None
    most = max(longest, rows.longest)
    reference = ReferenceModel(model, executor, rows, preference, config.rows_at_once, most)
    said = reference.logps(keep=config.data.cache, progress=observer.activity)
    return PreferenceData(rows, preference, said, most)


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """A model as it is now, to be asked of all answers of a data set."""

    model: AdapterModel  # the model
    executor: Executor  # who computes
    dataset: Dataset  # the answers
    preference: Preference  # the objective that they are asked for
    batch_size: int  # rows of a micro-batch
    longest: int  # most tokens of an answer

    def logps(self, *, keep: bool, progress: Progress) -> References:
        """What it says of each answer, from the disk where that is kept there."""
        dataset, count = self.dataset, len(self.dataset)
        if not self.preference.has_reference:
            return References.none(count)
        parts: list[Sequence[Example]] = [dataset]
        if self.preference.has_divergence:
            parts.append(KLPairs(dataset, self.longest))
        devices, name = self.executor.devices(), self.key()
        kept = _kept(name, len(parts) * count) if keep else None
        if kept is not None:  # memory is planned for what asks
            for examples, block in product(parts, self._blocks()):
                tokens = max(sum(len(examples[i]) for i in row) for row in block)
                length = bucket_length(tokens, max(self.longest, tokens))
                self.executor.prepare(self.batch_size, length, "sums")
        else:
            kept = np.concatenate([self._asked(part, progress) for part in parts])
            progress("")
            if keep and cache_problem() is None:
                if self.executor.devices() != devices:  # workers of another kind came meanwhile
                    name = self.key()
                _keep(name, kept)
        return References(kept[:count], kept[count:])

    def _blocks(self) -> list[Block]:
        return in_blocks(self.dataset, self.preference, self.batch_size)

    def _asked(self, examples: Sequence[Example], progress: Progress) -> FloatArray:
        said = np.zeros(len(self.dataset), np.float32)
        blocks, size = self._blocks(), self.batch_size

        def made(block: Block) -> MicroBatch:
            rows = [[examples[i] for i in row] for row in block]
            most = max(self.longest, max(len(example) for row in rows for example in row))
            batch = padded_batch(rows, size, most)
            checked = self.model.checked(batch.input_ids, batch.labels, batch.attention_mask)
            tokens = sum(len(example) for row in rows for example in row)
            return MicroBatch(*checked, None, tokens, samples=PreferenceInputs.plain(len(rows)))

        def done(count: int) -> None:
            progress(f"asking the reference: {count * size:,} answers of {len(said):,}")

        logps = self.executor.answer_logps(map(made, blocks), done)
        for block, each in zip(blocks, logps, strict=True):
            said[[i for row in block for i in row]] = each
        if not np.isfinite(said).all():
            raise DataError("the reference's log probability of an answer is not finite")
        return said

    def key(self) -> str:
        """A hash of what decides the numbers, to the bit where all devices are of one kind."""
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
            "device": "; ".join(name for name, _ in devices),
            "profile": "; ".join(kernels for _, kernels in devices),
        }
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]

    def _adapter(self) -> list[object] | None:
        """What the adapter adds to the base: its numbers, where they lie and their scale.

        None where it leaves the base as it is, wherever its first factors begin. One that began as
        a part of the base never does, since its base is rounded without it.
        """
        adapter = self.model.adapter
        parameters = self.model.read_flat(adapter.parameters)
        own, idle = adapter.split(parameters), adapter.split(self.executor.neutral())
        free = {name for name in own if (parse_name(name) or ("", ""))[1] in (LORA_A, EMBEDDING_B)}
        does_nothing = all(np.array_equal(own[name], idle[name]) for name in own.keys() - free)
        if does_nothing and adapter.start is None:
            return None
        settings = adapter.config.model_dump(exclude={"lora_dropout", "init_from"})
        return [hashlib.sha256(parameters.tobytes()).hexdigest(), sorted(own), settings]


def _kept(name: str, count: int) -> FloatArray | None:
    """Numbers that were kept; None where they are not there, or not whole."""
    try:
        with open_file(cache_path("references") / f"{name}.bin") as file:
            data = file.read(4 * count + 33)
    except OSError:
        return None
    body, digest = data[: 4 * count], data[4 * count :]
    if len(body) != 4 * count or _digest(name, body) != digest:
        return None
    return np.frombuffer(body, np.float32).copy()


def _keep(name: str, numbers: FloatArray) -> None:
    folder = cache_path("references")
    body = numbers.tobytes()
    try:
        make_cache_folder(folder)
        write_file(folder / f"{name}.bin", body + _digest(name, body))
    except (CheckpointError, OSError):
        return  # it is asked again the next time


def _digest(name: str, body: bytes) -> bytes:
    """A hash of some numbers and of what they are of."""
    return hashlib.sha256(name.encode() + body).digest()
