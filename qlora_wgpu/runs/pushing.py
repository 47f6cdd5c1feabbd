"""An adapter on the Hugging Face hub, with a model card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from qlora_wgpu.checkpoint import ModelFolder, write_file
from qlora_wgpu.checkpoint.hub import is_hub_name
from qlora_wgpu.checkpoint.hub_upload import check_reachable, upload
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.data import PromptKind, prompt_kind
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.export.model_card import model_card
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.training import read_rows

_CARD, _CONFIG = "README.md", "adapter_config.json"
# What is sent, and nothing else that may lie there.
_FILES = (
    *(_CARD, _CONFIG, "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("generation_config.json", "prompt_format.json"),
)
_PROMPTS: dict[PromptKind, str] = {
    "chat": "Prompts are turns of the chat template in `chat_template.jinja`.",
    "alpaca": "Prompts are Stanford Alpaca's: the chat template writes an instruction so.",
    "text": "It continues text: there are no turns.",
}


def push(adapter: str, name: str, *, base: str | None = None, private: bool = False) -> str:
    """Sends an adapter to the hub, with a model card, which is written beside it if there is none.

    Args:
        adapter: The adapter's folder.
        name: owner/name on the hub.
        base: The base's name on the hub, where the adapter was trained on a folder.
        private: Whether a new repository is seen by its owner alone, whatever their default is.

    Returns:
        The address of its page.

    Raises:
        ConfigError: If a name is none of the hub's, or the hub may not be written to from here.
        CheckpointError: If the adapter is damaged, or the hub refuses it or cannot be reached.
    """
    for text in filter(None, (name, base)):
        if not is_hub_name(text):
            raise ConfigError(f"{text!r} is no name on the hub, which would be owner/name")
    check_reachable()
    folder = Path(adapter)
    card = write_card(folder, name, base)
    files: dict[str, Path | bytes] = {file: folder / file for file in _present(folder)}
    files[_CONFIG] = _with_base(folder / _CONFIG, base)
    return upload(name, {**files, _CARD: card}, private=private)


def write_card(folder: Path, name: str, base: str | None) -> Path:
    """The model card beside an adapter; one that is there is left alone.

    Raises:
        CheckpointError: If the adapter is damaged, or the card cannot be written.
    """
    card = folder / _CARD
    if not card.exists():
        tensors, config = load_adapter(folder, biases=True)
        named = base or name_on_hub(config.base_model_name_or_path)
        run = find_run(folder)
        figures = {"parameters": f"{sum(array.size for array in tensors.values()):,}"}
        if run is not None:
            figures |= _figures(load_config(run / "config.yaml"), run)
        prompt = _PROMPTS[prompt_kind(folder)]
        text = model_card(name, named, config, figures, prompt)
        write_file(card, text.encode())
    return card


def _figures(settings: Config, run: Path) -> dict[str, str]:
    """What a card tells of a run; paths of the user's machine are left out."""
    rows = read_rows(run / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    products = settings.train.compute_dtype
    figures = {
        "quantization of the base": f"{_scheme(settings)}; products in {products}",
        "learning rate": f"{settings.optim.learning_rate:g}, {settings.optim.lr_scheduler_type}",
    }
    if steps:
        figures["trained"] = f"{steps[-1]['step']:,} steps, {steps[-1]['num_tokens']:,} tokens"
    if len(losses) > 1:
        figures["held-out loss"] = f"{losses[0]:.4f} before, {losses[-1]:.4f} after"
    return figures


def _scheme(settings: Config) -> str:
    """How the base was stored in training, as far as is known where it is no folder here."""
    base = Path(settings.model.path)
    scheme: str = settings.quant.scheme
    if (base / "config.json").is_file():
        with suppress(CheckpointError):
            config = ModelFolder.without_weights(base).config
            scheme = Pretrained.from_config(config).scheme(settings.quant)
    return "NF4" if scheme == "nf4" else scheme


def _present(folder: Path) -> Iterator[str]:
    if not (folder / _CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {_CONFIG}: it is no adapter")
    yield from (name for name in _FILES if (folder / name).is_file())


def name_on_hub(base: str | None) -> str | None:
    """A base's name, if it is one of the hub and no folder of the user's."""
    known = base is not None and is_hub_name(base) and not Path(base).is_dir()
    return base if known else None


def _with_base(config: Path, base: str | None) -> bytes:
    """adapter_config.json with the base's name on the hub; a folder's is the user's own affair."""
    fields: dict[str, Any] = read_json_object(config)
    name = base or name_on_hub(fields.get("base_model_name_or_path"))
    return (json.dumps({**fields, "base_model_name_or_path": name}, indent=2) + "\n").encode()
