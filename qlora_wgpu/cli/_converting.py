"""``init --from``: a run's YAML from another trainer's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config.dialects.conversion import convert_file
from qlora_wgpu.config.dialects.draft import Taken
from qlora_wgpu.data import Tokenizer, chosen_template
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.families.family import find_family


def converted(
    path: str, model: str | None, data: str | None, held_out: str | None, console: Console
) -> str:
    """The run's YAML, after a line about what was taken over.

    Args:
        path: The other trainer's file.
        model: The base to train instead of the file's.
        data: The training data, likewise.
        held_out: The held-out data, likewise.
        console: Where the line is printed.

    Raises:
        ConfigError: If the file cannot be read or converted.
    """
    given = {"model.path": model, "data.train": data, "data.eval": held_out}
    conversion = convert_file(
        Path(path), {key: value for key, value in given.items() if value}, _num_layers
    )
    others = len(conversion.left_out)
    console.print(
        f"{path} is a file of {conversion.dialect}: {len(conversion.taken)} settings are taken "
        f"over, {others} {'is' if others == 1 else 'are'} not; the new file says of each where it "
        "comes from, or why it is left out.",
        highlight=False,
        markup=False,
    )
    for note in conversion.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    template = _template(conversion.taken)
    return replace(conversion, taken={**conversion.taken, **template}).text()


def _template(taken: Mapping[str, Taken]) -> dict[str, Taken]:
    """The chat template that the run lacks: none where their file names one, or none is needed."""
    if "data.chat_template" in taken:
        return {}
    try:
        folder = ModelFolder.without_weights(str(taken["model.path"].value))
        tokenizer = Tokenizer.from_folder(folder.text_folder)
        paths = (
            [taken["data.train"].value]
            if "data.train" in taken
            else [source["path"] for source in taken["data.sources"].value]
        )
        names = (chosen_template(str(path), tokenizer) for path in paths)
        name = next((name for name in names if name is not None), None)
    except QLoRAError:  # told where the run is begun
        return {}
    origin = "what fits the tokenizer, which has none"
    return {} if name is None else {"data.chat_template": Taken(name, origin)}


def _num_layers(model: str) -> int | None:
    """Number of a model's layers, or None where it cannot be had."""
    try:
        config = ModelFolder.without_weights(model).config
        return find_family(config).read(config).num_layers
    except QLoRAError:
        return None
