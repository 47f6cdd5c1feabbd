"""Export of a trained model as one GGUF file, which is verified before it gets its name."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.atomic import atomic_file
from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.checkpoint.tokenizer_files import GENERATION, copy_tokenizer, tokenizer_folder
from qlora_wgpu.config import Config, QuantConfig
from qlora_wgpu.config.loading import changed, config_of_run, find_run
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data import PromptFormat, Tokenizer, read_prompt_files
from qlora_wgpu.data.dataset import encoded_examples
from qlora_wgpu.data.gguf_vocabulary import (
    LlamaCppTokenizer,
    TrainedText,
    pre_tokenizer_note,
    vocabulary_keys,
)
from qlora_wgpu.data.ollama import PROBES, modelfile, ollama_template
from qlora_wgpu.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    QLoRAError,
    TokenizerError,
    command,
    option,
)
from qlora_wgpu.exporting import export_gguf
from qlora_wgpu.exporting.folders import copy_prompt_files
from qlora_wgpu.exporting.gguf import gguf_model
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.exporting.merge import Base, MergedWeights
from qlora_wgpu.exporting.scored import refuse_scored
from qlora_wgpu.files import exists, file_bytes, is_there
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.gguf.architectures import model_type_of
from qlora_wgpu.limits import MODEL_JSON_BYTES
from qlora_wgpu.runs.data import read_data
from qlora_wgpu.runs.opening import OpenedModel, load_adapted
from qlora_wgpu.runs.prompts import tokenizer_for
from qlora_wgpu.training import Observer
from qlora_wgpu.training.data import preparation
from qlora_wgpu.training.observers import Unwatched

# ---- drift between two models --------------------------------------------------------------------

FloatArray = npt.NDArray[np.float64]
Logits = list[npt.NDArray[np.float32]]
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog. Two plus three makes five, and water boils at "
    "one hundred degrees. Once upon a time there was a little house by the sea."
)
_TEXTS, _TOKENS = 4, 64
_CHUNK = 1 << 22  # logits that are converted to float64 at once


@dataclass(frozen=True)
class Drift:
    """How much the predictions of two models differ."""

    tokens: int  # positions compared
    texts: str  # where they are from, in words
    mean: float  # mean absolute difference of logits
    largest: float  # largest difference
    divergence: float  # KL divergence of the second from the first, nats per token
    same: float  # share of positions with the same most likely token
    # KL divergence of the first model's predictions from their mean over all positions, nats per
    # token: what it knows about the text. A model that predicts at random has lost about as much
    knowledge: float

    @property
    def lost(self) -> float:
        """The divergence as a share of the first model's knowledge."""
        return self.divergence / max(self.knowledge, 1e-12)

    def __str__(self) -> str:
        return (
            f"over {self.tokens} tokens {self.texts}: logits by {self.mean:.3g} on average and "
            f"{self.largest:.3g} at most, KL divergence {self.divergence:.3g} nats per token "
            f"({100 * self.lost:.2g} % of what it knows of the text), "
            f"{100 * self.same:.0f} % of the most likely tokens agree"
        )


@dataclass(frozen=True)
class Measured:
    """The predictions of a model as it was trained."""

    ids: Sequence[Sequence[int]]  # the texts
    texts: str  # where they are from, in words
    logits: Logits  # of each text, (tokens, vocabulary)


@contextmanager
def on_a_device(what: str = "") -> Iterator[None]:
    """Adds to a device's error that --no-check skips the measurement."""
    try:
        yield
    except DeviceError as err:
        flag = "--no-check" if command() else "check=False"
        raise type(err)(f"{what}{err}; {flag} skips the measurement") from err


def measure_trained(
    source: OpenedModel, adapter: str | None, settings: Config, observer: Observer
) -> Measured:
    """What base and adapter, as trained, predict for a few examples of the run's data."""
    ids, texts = _texts(source, adapter, observer)
    with load_adapted(source, adapter, settings, observer) as model:
        return Measured(ids, texts, _logits(model, ids))


def measure_drift(
    trained: Measured, result: OpenedModel, settings: Config, observer: Observer
) -> Drift:
    """The drift of a result, which is not quantized again, from what was trained."""
    plain = changed(settings, {"quant": {"scheme": "none"}})
    with load_adapted(result, None, plain, observer, with_notes=False) as model:
        after = _logits(model, trained.ids)
    return drift_between(trained.logits, after, trained.texts)


def merge_drift(
    source: OpenedModel, adapter: str, merged: Path, settings: Config, observer: Observer
) -> Drift:
    """How far a merged model is from base and adapter as they were trained."""
    with on_a_device(f"{merged} is complete, but its drift is unknown: "):
        trained = measure_trained(source, adapter, settings, observer)
        return measure_drift(trained, OpenedModel.open(str(merged)), settings, observer)


def drift_between(before: Logits, after: Logits, texts: str) -> Drift:
    """The drift between two models' logits, (tokens, vocabulary) for each text."""
    sums = np.zeros(4)
    largest, count, elements = 0.0, 0, 0
    mean_of_all = _mean_prediction(before)
    for rows, others in _chunks(before, after):
        p, q = log_softmax(rows), log_softmax(others)
        difference = np.abs(rows - others)
        sums += (
            difference.sum(),
            (np.exp(p) * (p - q)).sum(),
            (rows.argmax(-1) == others.argmax(-1)).sum(),
            (np.exp(p) * (p - np.log(mean_of_all))).sum(),
        )
        largest = float(np.max([largest, difference.max()]))  # keeps NaN
        count, elements = count + len(rows), elements + rows.size
    difference_sum, divergence, same, knowledge = sums
    return Drift(
        tokens=count,
        texts=texts,
        mean=difference_sum / elements,
        largest=largest,
        divergence=divergence / count,
        same=same / count,
        knowledge=knowledge / count,
    )


def log_softmax(logits: FloatArray) -> FloatArray:
    """Log probabilities along the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _mean_prediction(logits: Logits) -> FloatArray:
    total, count = np.zeros(logits[0].shape[-1]), 0
    for rows, _ in _chunks(logits, logits):
        total += np.exp(log_softmax(rows)).sum(0)
        count += len(rows)
    smallest = np.finfo(np.float64).tiny
    mean: FloatArray = np.maximum(total / count, smallest)
    return mean


def _chunks(before: Logits, after: Logits) -> Iterator[tuple[FloatArray, FloatArray]]:
    """A few rows of both at a time, in float64."""
    step = max(_CHUNK // before[0].shape[-1], 1)
    for one, other in zip(before, after, strict=True):
        for i in range(0, len(one), step):
            yield one[i : i + step].astype(np.float64), other[i : i + step].astype(np.float64)


def _logits(model: QLoRAModel, texts: Sequence[Sequence[int]]) -> Logits:
    return [model.logits(np.array([ids]))[0].astype(np.float32) for ids in texts]


def _texts(
    source: OpenedModel, adapter: str | None, observer: Observer
) -> tuple[list[list[int]], str]:
    """A few sequences of the run's data, or else of a sample text, and where they are from."""
    vocabulary = source.for_adapter(adapter).architecture.vocab_size
    try:
        tokenizer = tokenizer_for(source, adapter)
    except TokenizerError:
        rng = np.random.default_rng(0)
        return [rng.integers(0, vocabulary, _TOKENS).tolist()], "drawn at random"
    run = None if adapter is None else find_run(adapter)
    settings = None if run is None else config_of_run(run)
    for held_out in (True, False):
        if settings is None or (held_out and not (settings.data.eval or settings.data.eval_split)):
            continue
        try:
            dataset = read_data(settings, tokenizer, observer, held_out=held_out)
        except QLoRAError:  # it has moved, or the hub is not reachable
            continue
        step = max(len(dataset) // _TEXTS, 1)
        rows = [dataset[i] for i in range(0, len(dataset), step)][:_TEXTS]
        ids = [[int(i) for i in row.input_ids[:_TOKENS]] for row in rows]
        kept = [row for row in ids if row and max(row) < vocabulary]
        if kept:
            return kept, f"of {'held-out' if held_out else 'training'} data"
    ids_of_sample = [i for i in tokenizer.encode(_SAMPLE) if i < vocabulary][:_TOKENS]
    return [ids_of_sample], "of a sample text"


@dataclass(frozen=True)
class MergeResult:
    """A merged model that was written."""

    path: Path  # its folder
    drift: Drift | None  # how far it is from what was trained; None if not measured


# ---- GGUF files ----------------------------------------------------------------------------------

SUFFIX = ".gguf"
# The maximum divergence of a correct file, as a share of the model's knowledge: with 8 or more bits
# per weight, and with fewer. A wrong file loses nearly all.
_MAX_LOST, _MAX_LOST_IN_FEW_BITS = 0.1, 0.25
_ROWS = 3  # of each data set, whose tokens are compared
_FEW_BYTES = 34  # of 32 weights in 8 bits
_FROM_NF4 = (
    "most of this drift is due to training on NF4, not to the file: --base dequantized reduces it; "
    "from the stored weights with the adapter the file drifts"
)
_PHI3 = ("</s>", "<unk>", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>")
_PHI3_NAME = re.compile("phi-?3", re.IGNORECASE)


@dataclass(frozen=True)
class ExportResult:
    """A GGUF file that was written."""

    path: Path  # the file
    nbytes: int  # its size
    type_name: str  # the type of most of its matrices
    drift: Drift | None  # its drift from what was trained; None if it was not measured
    notes: tuple[str, ...]  # where llama.cpp differs


def check_target(path: Path) -> None:
    """Refuses a file name that cannot be written, before anything takes time."""
    if path.suffix != SUFFIX:
        name = "--gguf" if command() else "gguf"
        raise ConfigError(f"{name} {str(path)!r} must end in {SUFFIX}")
    if exists(path):
        raise ConfigError(
            f"{path} already exists: choose another name with {option('gguf', ...)}, or remove it"
        )


def export_model(
    model: str,
    adapter: str,
    out: str | Path,
    *,
    type_name: str | None = None,
    base: Base = "original",
    quant: QuantConfig | None = None,
    settings: Config | None = None,
    observer: Observer | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> ExportResult:
    """Writes base and adapter, merged, as a GGUF file with its tokenizer.

    Matrices are stored as ``type_name``, by default in the base's own 16 bits. The adapter is
    merged into the stored weights, or into the dequantized ones (``quant``, by default as in the
    adapter's run). With ``settings`` the file's drift from base and adapter, opened with them, is
    measured.
    """
    path, observer = Path(out), observer or Unwatched()
    check_target(path)
    file_type = None if type_name is None else find_file_type(type_name)
    merged = MergedWeights(model, adapter, base, quant)
    refuse_scored(adapter, merged.folder)
    where = (tokenizer_folder(adapter) or merged.folder.text_folder) / "tokenizer.json"
    with _text_folder(merged.folder, adapter) as texts:
        written = read_prompt_files(texts)
        first = next((text for text, _ in _rendered(written)), None)

        def vocabulary(tokens: int) -> Mapping[str, Any]:
            is_gemma4 = model_type_of(merged.folder.config).startswith("gemma4")
            keys = vocabulary_keys(
                written.tokenizer, texts, tokens, where, prompt=first, joins_pairs=is_gemma4
            )
            return {"general.name": _name(model, adapter, keys), **keys}

        made = gguf_model(merged, file_type, vocabulary)
        ollama = _modelfile(path, texts)
    made.check_room(path)
    kind = made.file_type.kind

    def measured(settings: Config) -> Measured:
        with on_a_device():
            return measure_trained(OpenedModel.open(model), adapter, settings, observer)

    def drift_from(trained: Measured, file: Path, settings: Config) -> Drift:
        with on_a_device():
            return measure_drift(trained, OpenedModel.open(str(file)), settings, observer)

    # Whatever fails here fails before the file is written.
    trained = None if settings is None else measured(settings)
    with _with_modelfile(path, ollama), atomic_file(path) as unfinished:
        made.write(unfinished, progress)
        note = pre_tokenizer_note(made.keys.get("tokenizer.ggml.pre"))
        difference = _difference(unfinished, adapter, written, of_rows=settings is not None)
        no_template = None
        if written.template is not None and ollama_template(written) is None:
            no_template = (
                f"the Modelfile has no TEMPLATE: the chat template in {where.parent} does more "
                "than wrap turns in text, or does not support a system message, so it cannot be "
                "translated to Ollama's language"
            )
        drift, notes = None, (*made.notes, *filter(None, (note, difference, no_template)))
        if settings is not None and trained is not None:
            drift = drift_from(trained, unfinished, settings)
            in_few_bits = not kind.is_float and kind.nbytes < _FEW_BYTES
            maximum = _MAX_LOST_IN_FEW_BITS if in_few_bits else _MAX_LOST
            if not drift.lost <= maximum and base == "original" and settings.quant.scheme == "nf4":
                # Is that due to the file, or to NF4, on which the adapter was trained?
                stored = measured(changed(settings, {"quant": {"scheme": "none"}}))
                plain = drift_from(stored, unfinished, settings)
                if plain.lost <= maximum:
                    notes = (*notes, f"{_FROM_NF4}, {plain}")
                    maximum = drift.lost
            if not drift.lost <= maximum:  # true of NaN, too
                raise CheckpointError(
                    f"{path} is not kept, because its predictions differ from what was trained, "
                    f"{drift}, and only {100 * maximum:.0f} % are allowed: choose a larger --type, "
                    "or --base dequantized; --no-check keeps the file as it is"
                )
    return ExportResult(path, path.stat().st_size, kind.name.lower(), drift, notes)


def export_adapter(model: str, adapter: str, out: str | Path) -> int:
    """Writes an adapter that llama.cpp loads with ``--lora``, and its Modelfile."""
    path = Path(out)
    check_target(path)
    with _text_folder(ModelFolder.without_weights(model), adapter) as texts:
        if not is_there(texts / "tokenizer.json"):
            return export_gguf(model, adapter, path)
        base = model if Path(model).suffix == SUFFIX else "./base.gguf"
        ollama = _modelfile(path, texts, base)
    with _with_modelfile(path, ollama):
        return export_gguf(model, adapter, path)


def modelfile_of(path: Path) -> Path:
    """The path of a GGUF file's Modelfile."""
    return path.with_suffix(".Modelfile")


@contextmanager
def _with_modelfile(path: Path, text: str) -> Iterator[None]:
    """Writes the Modelfile of a GGUF file; it is removed if writing that file fails.

    It comes first, so that a full disk is noticed before the long write.
    """
    target, content = modelfile_of(path), text.encode()
    existed = is_there(target)
    if existed and not _holds(target, content):
        raise ConfigError(
            f"{target} already exists: choose another name with {option('gguf', ...)}, or remove it"
        )
    with atomic_file(target) as unfinished:
        unfinished.write_bytes(content)
    try:
        yield
    except BaseException:
        if not existed:
            with suppress(OSError):
                target.unlink()
        raise


def _holds(path: Path, content: bytes) -> bool:
    try:
        return file_bytes(path, MODEL_JSON_BYTES) == content
    except OSError:
        return False


def _difference(path: Path, adapter: str, written: PromptFormat, *, of_rows: bool) -> str | None:
    """Where llama.cpp tokenizes the run's examples differently from training, in words."""
    trained = [*(_trained_rows(adapter, written.tokenizer) if of_rows else ())] or _rendered(
        written
    )
    tokenizer = LlamaCppTokenizer(GGUFFile(path).metadata, path)
    return tokenizer.first_difference(trained, written.tokenizer.eos_token_id)


def _trained_rows(adapter: str, tokenizer: Tokenizer) -> Iterator[TrainedText]:
    """The first rows of a run's data that are not truncated; none if the data is not available."""
    run = find_run(adapter)
    if run is None:
        return
    with suppress(QLoRAError):
        settings = config_of_run(run)
        for part in settings.require_train().parts():
            config = preparation(part, settings.train.objective)
            rows = encoded_examples(str(part.train), tokenizer, config)
            whole = (TrainedText(row.text, row.ids) for row in rows if row.text is not None)
            yield from islice(whole, _ROWS)


def _rendered(written: PromptFormat) -> Iterator[TrainedText]:
    """Prompts rendered by the chat template; none if prompts are plain text."""
    if written.kind != "chat" or written.template is None:
        return
    for messages in PROBES:
        with suppress(QLoRAError):
            text = written.template.render(messages, add_generation_prompt=True).text
            yield TrainedText(text, written.tokenizer.encode(text, add_special_tokens=False))


def _modelfile(path: Path, texts: Path, adapter_of: str | None = None) -> str:
    generation = read_json_object(texts / GENERATION) if is_there(texts / GENERATION) else {}
    return modelfile(path.name, read_prompt_files(texts), generation, adapter_of=adapter_of)


@contextmanager
def _text_folder(folder: ModelFolder, adapter: str) -> Iterator[Path]:
    """A temporary folder with the adapter's tokenizer and prompt files."""
    with tempfile.TemporaryDirectory(prefix="qlora-wgpu-export-") as temporary:
        made, source = Path(temporary), folder.text_folder
        copy_tokenizer(source, made)
        for name in ("config.json", GENERATION):
            if is_there(source / name):
                (made / name).write_bytes(file_bytes(source / name, MODEL_JSON_BYTES))
        copy_prompt_files(Path(adapter), made)
        yield made


def _name(model: str, adapter: str, vocabulary: Mapping[str, Any]) -> str:
    """The model's name, from its base and its run.

    Where the name contains "phi-3", llama.cpp lets the tokens of turns strip the spaces that
    follow, and fails if the vocabulary lacks these tokens.
    """
    run, base = find_run(adapter), Path(model).name.removesuffix(SUFFIX) or model
    name = base if run is None else f"{base} {run.name}"
    strips = vocabulary["tokenizer.ggml.model"] == "llama" and set(_PHI3) <= set(
        vocabulary["tokenizer.ggml.tokens"]
    )
    if strips:
        return name if _PHI3_NAME.search(name) else f"Phi-3 {name}"
    return _PHI3_NAME.sub("Phi 3", name)
