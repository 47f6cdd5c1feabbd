"""``init``: a commented YAML for a model and data, or from another trainer's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.cli._options import FILE_OR_FOLDER, ParsedType
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config.dialects.conversion import convert_file
from qlora_wgpu.config.dialects.draft import MappedValue
from qlora_wgpu.config.yaml import commented_yaml
from qlora_wgpu.data import Tokenizer, infer_chat_template
from qlora_wgpu.data.sources import has_validation
from qlora_wgpu.errors import ConfigError, QLoRAError, command, shell_word
from qlora_wgpu.files import exists

# ---- another trainer's file ----------------------------------------------------------------------


def _template(taken: Mapping[str, MappedValue]) -> dict[str, MappedValue]:
    """A chat template for a tokenizer without one; empty if the file sets one or none is needed."""
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
        names = (infer_chat_template(str(path), tokenizer) for path in paths)
        name = next((name for name in names if name is not None), None)
    except QLoRAError:  # reported when the run starts
        return {}
    origin = "fits the tokenizer, which has no template"
    return {} if name is None else {"data.chat_template": MappedValue(name, origin)}


def _num_layers(model: str) -> int | None:
    """Number of a model's layers; None if it is not available."""
    try:
        from qlora_wgpu.families.family import find_family  # imports the engine

        config = ModelFolder.without_weights(model).config
        return find_family(config).read(config).num_layers
    except QLoRAError:
        return None


# ---- the file ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class InitResult:
    """A run's YAML that was written.

    Attributes:
        path: The file.
        converted_from: Name of the trainer whose file was converted, or None.
        converted: Number of its settings that were converted.
        dropped: Number of its settings that have no counterpart; the new file lists them.
        notes: What differs from that trainer.
    """

    path: Path
    converted_from: str | None = None
    converted: int = 0
    dropped: int = 0
    notes: tuple[str, ...] = ()


def write_run_file(
    out: str, *, model: str | None, data: Sequence[str], held_out: str | None,
    columns: Mapping[str, str], other: str | None, overwrite: bool,
) -> InitResult:  # fmt: skip
    """Writes the YAML of a run, for a model and its data or from another trainer's file."""
    file = Path(out)
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{_named('out')} {out!r} must end in .yaml")
    if exists(file) and not overwrite:
        raise ConfigError(
            f"{out} already exists: pass another {_named('out')}, or use {_named('overwrite')}"
        )
    for name, path in (("model", model), ("eval", held_out), *(("data", path) for path in data)):
        _check_text(_named(name), path or "")
    if other is not None:
        if len(data) > 1 or columns:
            one = f"accepts only one {_named('data')}"
            what = f"does not accept {_named('columns')}" if columns else one
            raise ConfigError(f"{_named('from')} {what}")
        given = {"model.path": model, "data.train": next(iter(data), None), "data.eval": held_out}
        named = {key: path for key, path in given.items() if path}
        made = convert_file(Path(other), named, _num_layers)
        whole = replace(made, settings={**made.settings, **_template(made.settings)})
        write_file(file, whole.text().encode())
        return InitResult(
            file, made.dialect, len(made.settings), len(made.dropped), tuple(made.notes)
        )
    if model is None or not data:
        missing = "model" if model is None else "data"
        raise ConfigError(f"{_named(missing)} is required")
    from qlora_wgpu.runs.recommend import recommend_config  # imports the engine

    if held_out is None and len(data) == 1 and has_validation(Path(data[0])):
        held_out = data[0]
    settings = recommend_config(model, data, held_out, columns=columns)
    write_file(file, commented_yaml(*settings).encode())
    return InitResult(file)


def _named(name: str) -> str:
    return f"--{name}" if command() else f"{name}_" if name == "from" else name


# ---- the command ---------------------------------------------------------------------------------


def _column(option: str, text: str) -> tuple[str, str]:
    key, equals, column = text.partition("=")
    if not (key and equals and column):
        raise ConfigError(f"{option} {text!r} must be KEY=COLUMN, such as prompt=question")
    return key, column


@click.command()
@click.option("--model", "model_path", type=FILE_OR_FOLDER, help="Folder or hub name of the base.")
@click.option(
    "--data",
    "data_paths",
    type=FILE_OR_FOLDER,
    multiple=True,
    help="File, folder or hub name of the training data; several make a mixture.",
)
@click.option("--eval", "eval_path", type=FILE_OR_FOLDER, help="Held-out data in the same format.")
@click.option(
    "--columns",
    type=ParsedType("KEY=COLUMN", _column),
    multiple=True,
    help="Map a key to a column of the data, such as prompt=question; may be repeated.",
)
@click.option(
    "--from",
    "other",
    metavar="FILE",
    help="Config of Axolotl, TRL, LLaMA-Factory, mlx-lm, Unsloth Studio or torchtune to convert; "
    "the options above take precedence.",
)
@click.option("--out", default="run.yaml", type=FILE_OR_FOLDER, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def init(
    model_path: str | None,
    data_paths: tuple[str, ...],
    eval_path: str | None,
    columns: tuple[tuple[str, str], ...],
    other: str | None,
    out: str,
    overwrite: bool,
) -> None:
    """Write a commented YAML file for a model and data.

    Its settings fit the model, the data and the GPU. Then `qlora-wgpu data run.yaml` previews the
    training examples, and `qlora-wgpu train run.yaml` trains.
    """
    console = Terminal()
    if other is None and (model_path is None or not data_paths):
        missing = "--model" if model_path is None else "--data"
        raise click.MissingParameter(param_hint=f"'{missing}'", param_type="option")
    with console.status("reading the data"):
        written = write_run_file(
            out, model=model_path, data=data_paths, held_out=eval_path, columns=dict(columns),
            other=other, overwrite=overwrite,
        )  # fmt: skip
    if written.converted_from is not None:
        others = written.dropped
        console.print(
            f"{other} is a config of {written.converted_from}: {written.converted} settings were "
            f"converted, {others} {'was' if others == 1 else 'were'} not; comments in the new file "
            "say where each comes from, or why it is left out."
        )
        for note in written.notes:
            console.note(note)
    typed = shell_word(f"./{out}" if out.startswith("-") else out)  # else it would be an option
    console.print(
        f"{out} written. Preview the data with `qlora-wgpu data {typed}`, estimate memory with "
        f"`qlora-wgpu estimate {typed}`, and train with `qlora-wgpu train {typed}`."
    )


def _check_text(option: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as err:  # surrogates, which YAML cannot represent
        raise ConfigError(
            f"{option} {name!r} is not valid text in this locale: set LC_ALL to a UTF-8 locale, or "
            "rename it"
        ) from err
