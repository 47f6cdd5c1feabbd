"""Upload of a trained model to the Hugging Face Hub, with a model card."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import ModelFolder, write_file
from qlora_wgpu.checkpoint.hub import check_reachable, is_hub_name, name_on_hub, upload
from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import config_of_run, find_run
from qlora_wgpu.config.paths import RunPaths
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data import PromptKind, prompt_kind
from qlora_wgpu.errors import CheckpointError, ConfigError, option
from qlora_wgpu.exporting.model_card import CardKind, model_card
from qlora_wgpu.files import file_bytes, is_file, is_there
from qlora_wgpu.limits import MODEL_JSON_BYTES
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.peft_names import WHOLE, tensor_name
from qlora_wgpu.lora.scoring_files import is_scored_adapter, read_scoring
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.exporting import modelfile_of
from qlora_wgpu.runs.reporting import RunHistory
from qlora_wgpu.training import read_rows

_CARD, _CONFIG = "README.md", "adapter_config.json"
_MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
_DATA_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")
# The files that are uploaded; others in the folder are ignored.
_FILES = (
    *(_CARD, _CONFIG, "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("generation_config.json", "prompt_format.json"),
)
_PROMPTS: dict[PromptKind, str] = {
    "chat": "Prompts are chats, rendered with the template in `chat_template.jinja`.",
    "alpaca": "Prompts have the format of Stanford Alpaca, which the chat template renders.",
    "text": "Prompts are plain text, which the model continues.",
}


_SCORED = "It scores whole sequences, as a reward model or classifier."


@dataclass(frozen=True)
class UploadBundle:
    """The files of an upload."""

    name: str  # owner/name on the hub
    files: Mapping[str, Path | bytes]  # the path or content of each file, by its name there
    private: bool  # whether a new repository is private

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        sizes = (
            len(content) if isinstance(content, bytes) else content.stat().st_size
            for content in self.files.values()
        )
        return sum(sizes)


def push(
    adapter: str,
    name: str,
    *,
    base: str | None = None,
    private: bool = True,
    merged: str | None = None,
    gguf: str | None = None,
    agree: Callable[[UploadBundle], bool] = lambda bundle: True,
) -> str | None:
    """Uploads what was trained to the hub, with a model card; returns the page's address.

    ``merged``, the folder of ``merge``, or ``gguf``, the file of ``export``, is uploaded instead of
    the adapter. ``base`` is the base's name on the hub if the run used a folder. ``agree`` confirms
    the upload: None is returned if it does not. A missing model card is also written into the
    adapter's folder, if that is writable.
    """
    if merged is not None and gguf is not None:
        raise ConfigError(
            f"{option('merged', ...)} and {option('gguf', ...)} are mutually exclusive"
        )
    for text in filter(None, (name, base)):
        if not is_hub_name(text):
            raise ConfigError(f"{text!r} is not a name on the hub, expected owner/name")
    check_reachable()
    if merged is not None:
        files = _merged_files(Path(merged))
        kind: CardKind = "merged"
    elif gguf is not None:
        files, kind = _gguf_files(Path(gguf)), "gguf"
    else:
        folder = Path(adapter)
        if not is_file(folder / _CONFIG):
            raise CheckpointError(f"{folder} is not an adapter: {_CONFIG} does not exist")
        files = {file: folder / file for file in _FILES if is_file(folder / file)}
        files[_CONFIG], kind = _with_base(folder / _CONFIG, base), "adapter"
    if _CARD not in files:
        file = "model.gguf" if gguf is None else Path(gguf).name
        files[_CARD] = card = card_text(Path(adapter), name, base, kind, file).encode()
        if kind == "adapter":
            with suppress(CheckpointError):  # a read-only folder is uploaded as it is
                write_file(Path(adapter) / _CARD, card)
    plot = _plot_of(find_run(adapter))
    if plot is not None and plot.name.encode() in _content(files[_CARD]):
        files[plot.name] = plot
    bundle = UploadBundle(name, files, private)
    return upload(name, files, private=private) if agree(bundle) else None


def _merged_files(folder: Path) -> dict[str, Path | bytes]:
    if not is_file(folder / "config.json"):
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a merged model: qlora-wgpu merge writes one"
        )
    files: dict[str, Path | bytes] = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if is_file(path) and path.suffix in _MODEL_SUFFIXES and not path.name.startswith(".")
    }
    # A card in the folder is the base's, unless qlora-wgpu wrote it.
    card = folder / _CARD
    if is_there(card) and b"qlora-wgpu" in _content(card):
        files[_CARD] = card
    return files


def _gguf_files(path: Path) -> dict[str, Path | bytes]:
    if path.suffix != ".gguf" or not is_file(path):
        raise CheckpointError(f"{path} is not a GGUF file: qlora-wgpu export writes one")
    files: dict[str, Path | bytes] = {path.name: path}
    if is_file(modelfile_of(path)):
        files["Modelfile"] = modelfile_of(path)
    return files


def _content(file: Path | bytes) -> bytes:
    if isinstance(file, bytes):
        return file
    try:
        return file_bytes(file, MODEL_JSON_BYTES)
    except OSError as err:
        raise CheckpointError(f"cannot read {file}: {err.strerror or err}") from err


def card_text(
    folder: Path, name: str, base: str | None, kind: CardKind = "adapter", file: str = "model.gguf"
) -> str:
    """The model card of an adapter, from its files and its run."""
    tensors, config = load_adapter(folder, biases=True)
    named = base or name_on_hub(config.base_model_name_or_path)
    run = find_run(folder)
    facts = {"parameters": f"{sum(array.size for array in tensors.values()):,}"}
    if run is not None:
        facts |= _training_facts(config_of_run(run), run)
    plot = _plot_of(run)
    head = tensors.get(tensor_name("score", WHOLE))
    labels: tuple[str, ...] = ()
    if is_scored_adapter(folder) and head is not None:
        prompt, labels = _SCORED, read_scoring(folder, len(head)).names
    else:
        prompt = _PROMPTS[prompt_kind(folder)]
    return model_card(
        name, named, config, facts, prompt,
        kind=kind, file=file, plot=None if plot is None else plot.name, labels=labels,
    )  # fmt: skip


def _plot_of(run: Path | None) -> Path | None:
    plot = None if run is None else RunPaths(run).plot
    return plot if plot is not None and is_file(plot) else None


def _training_facts(settings: Config, run: Path) -> dict[str, str]:
    """A run's values for the model card, without paths of the user's machine."""
    log = RunHistory(read_rows(RunPaths(run).metrics))
    steps, losses = log.steps, [row["eval_loss"] for row in log.evaluations]
    products = settings.train.compute_dtype
    facts = {
        "quantization of the base": f"{_scheme(settings)}; products in {products}",
        "learning rate": f"{settings.optim.learning_rate:g}, {settings.optim.lr_scheduler_type}",
    }
    paths = [part.train or "" for part in settings.data.parts()]
    if on_hub := [path for path in paths if _DATA_ON_HUB.fullmatch(path)]:
        facts["data"] = ", ".join(on_hub)
    if steps:
        facts["trained"] = f"{steps[-1]['step']:,} steps, {steps[-1]['num_tokens']:,} tokens"
    if len(losses) > 1:
        facts["held-out loss"] = f"{losses[0]:.4f} before, {losses[-1]:.4f} after"
    return facts


def _scheme(settings: Config) -> str:
    """The base's quantization in training; the setting's, if the base is not a folder here."""
    base = Path(settings.model.path)
    scheme: str = settings.quant.scheme
    if is_file(base / "config.json"):
        with suppress(CheckpointError):
            config = ModelFolder.without_weights(base).config
            scheme = Pretrained.from_config(config).scheme(settings.quant)
    return "NF4" if scheme == "nf4" else scheme


def _with_base(config: Path, base: str | None) -> bytes:
    """adapter_config.json with the base's name on the hub, or without the path of its folder."""
    fields: dict[str, Any] = read_json_object(config)
    trained_on = fields.get("base_model_name_or_path")
    name = base or name_on_hub(trained_on)
    own = str(trained_on).partition("@")[2] or fields.get("revision")
    fields |= {
        "base_model_name_or_path": name,
        "revision": None if base or name is None else own,
    }
    return (json.dumps(fields, indent=2) + "\n").encode()
