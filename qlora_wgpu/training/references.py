"""What the reference says of answers: the model as a run begins, asked once for each answer.

It is TRL's reference of an adapter: the base alone, or with the adapter that a run goes on from.
What it said is kept on disk beside prepared data, under a hash of all that decides it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

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
    references = compute_ref_logps(
        model, executor, rows, preference, config.rows_at_once, most,
        keep=config.data.cache, progress=observer.activity,
    )  # fmt: skip
    return PreferenceData(rows, preference, references, most)


def compute_ref_logps(
    model: AdapterModel,
    executor: Executor,
    dataset: Dataset,
    preference: Preference,
    batch_size: int,
    longest: int,
    *,
    keep: bool,
    progress: Progress = lambda text: None,
) -> References:
    """What a model as it is now says of all answers of a data set."""
    if not preference.has_reference:
        return References.none(len(dataset))
    parts: list[Sequence[Example]] = [dataset]
    if preference.has_divergence:
        parts.append(KLPairs(dataset, longest))
    devices, decides = executor.devices(), (model, executor, dataset, preference)
    name = _key(*decides, batch_size, longest)
    kept = _kept(name, len(parts) * len(dataset)) if keep else None
    if kept is not None:  # memory is planned for what asks
        for part in parts:
            _make_ready(executor, part, dataset, preference, batch_size, longest)
    if kept is None:
        given = (dataset, preference, batch_size, longest, progress)
        kept = np.concatenate([_asked(model, executor, part, *given) for part in parts])
        progress("")
        if keep and cache_problem() is None:
            if executor.devices() != devices:  # workers of another kind have come meanwhile
                name = _key(*decides, batch_size, longest)
            _keep(name, kept)
    return References(kept[: len(dataset)], kept[len(dataset) :])


def _make_ready(
    executor: Executor,
    examples: Sequence[Example],
    dataset: Dataset,
    preference: Preference,
    batch_size: int,
    longest: int,
) -> None:
    for block in in_blocks(dataset, preference, batch_size):
        tokens = max(sum(len(examples[i]) for i in row) for row in block)
        length = bucket_length(tokens, max(longest, tokens))
        executor.prepare(batch_size, length, "sums")


def _asked(
    model: AdapterModel,
    executor: Executor,
    examples: Sequence[Example],
    dataset: Dataset,
    preference: Preference,
    batch_size: int,
    longest: int,
    progress: Progress,
) -> FloatArray:
    said = np.zeros(len(dataset), np.float32)
    blocks = in_blocks(dataset, preference, batch_size)

    def made(block: Block) -> MicroBatch:
        rows = [[examples[i] for i in row] for row in block]
        most = max(longest, max(len(example) for row in rows for example in row))
        batch = padded_batch(rows, batch_size, most)
        checked = model.checked(batch.input_ids, batch.labels, batch.attention_mask)
        tokens = sum(len(example) for row in rows for example in row)
        return MicroBatch(*checked, None, tokens, samples=PreferenceInputs.plain(len(rows)))

    def done(count: int) -> None:
        progress(f"asking the reference: {count * batch_size:,} answers of {len(dataset):,}")

    logps = executor.answer_logps(map(made, blocks), done)
    for block, each in zip(blocks, logps, strict=True):
        said[[i for row in block for i in row]] = each
    if not np.isfinite(said).all():
        raise DataError("the reference's log probability of an answer is not finite")
    return said


def _key(
    model: AdapterModel, executor: Executor, dataset: Dataset, preference: Preference,
    batch_size: int, longest: int,
) -> str:  # fmt: skip
    """A hash of what decides the numbers, to the bit where all devices are of one kind."""
    parameters = model.read_flat(model.adapter.parameters)
    folder, devices = model.folder, executor.devices()
    does_nothing = _does_nothing(model, parameters, executor.neutral())
    folder.finish_fingerprint()
    known = {
        "version": _VERSION,
        "base": folder.fingerprint,
        "quant": model.quant.model_dump(),
        "compute_dtype": model.compute_dtype,
        "vocabulary": [model.architecture.vocab_size, list(model.architecture.new_tokens)],
        "adapter": None if does_nothing else _identity(model, parameters),
        "data": dataset.fingerprint,
        "divergence": preference.has_divergence,
        "batch": [batch_size, longest],
        "device": "; ".join(name for name, _ in devices),
        "profile": "; ".join(kernels for _, kernels in devices),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _identity(model: AdapterModel, parameters: FloatArray) -> list[object]:
    """What an adapter adds to the base: its numbers, where they lie and what they are scaled by."""
    names = sorted(model.adapter.split(parameters))
    settings = model.adapter.config.model_dump(exclude={"lora_dropout", "init_from"})
    return [hashlib.sha256(parameters.tobytes()).hexdigest(), names, settings]


def _does_nothing(model: AdapterModel, parameters: FloatArray, neutral: FloatArray) -> bool:
    """Whether an adapter leaves the base as it is, wherever its first factors begin.

    One that began as a part of the base is never such, since its base is rounded without it.
    """
    if model.adapter.start is not None:
        return False
    own, idle = (model.adapter.split(flat) for flat in (parameters, neutral))
    free = {name for name in own if (parse_name(name) or ("", ""))[1] in (LORA_A, EMBEDDING_B)}
    return all(np.array_equal(own[name], idle[name]) for name in own.keys() - free)


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
