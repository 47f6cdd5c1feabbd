"""``init``: a commented YAML for a given model and data, or from another trainer's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.cli._options import FILE_OR_FOLDER, ReadBy
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config.dialects.conversion import convert_file
from qlora_wgpu.config.dialects.draft import MappedValue
from qlora_wgpu.config.yaml import commented_yaml
from qlora_wgpu.data import Tokenizer, infer_chat_template
from qlora_wgpu.data.sources import has_validation
from qlora_wgpu.errors import ConfigError, QLoRAError, command
from qlora_wgpu.files import exists
from qlora_wgpu.shell_words import shell_word

# ---- another trainer's file ----------------------------------------------------------------------


def _template(taken: Mapping[str, MappedValue]) -> dict[str, MappedValue]:
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
        names = (infer_chat_template(str(path), tokenizer) for path in paths)
        name = next((name for name in names if name is not None), None)
    except QLoRAError:  # told where the run is begun
        return {}
    origin = "what fits the tokenizer, which has none"
    return {} if name is None else {"data.chat_template": MappedValue(name, origin)}


def _num_layers(model: str) -> int | None:
    """Number of a model's layers, or None where it cannot be had."""
    try:
        from qlora_wgpu.families.family import find_family  # the engine

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
        taken: Number of settings that were taken from that file.
        left_out: Number of its settings that have no counterpart; the new file lists them.
        notes: What differs from that trainer.
    """

    path: Path
    converted_from: str | None = None
    taken: int = 0
    left_out: int = 0
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
            f"{out} already exists: choose another {_named('out')}, or use {_named('overwrite')}"
        )
    for name, path in (("model", model), ("eval", held_out), *(("data", path) for path in data)):
        _check_text(_named(name), path or "")
    if other is not None:
        if len(data) > 1 or columns:
            one = f"one {_named('data')}, in place of what the file names"
            what = f"no {_named('columns')}" if columns else one
            raise ConfigError(f"{_named('from')} takes {what}")
        given = {"model.path": model, "data.train": next(iter(data), None), "data.eval": held_out}
        named = {key: path for key, path in given.items() if path}
        made = convert_file(Path(other), named, _num_layers)
        whole = replace(made, taken={**made.taken, **_template(made.taken)})
        write_file(file, whole.text().encode())
        return InitResult(
            file, made.dialect, len(made.taken), len(made.left_out), tuple(made.notes)
        )
    if model is None or not data:
        missing = "model" if model is None else "data"
        raise ConfigError(f"{_named(missing)} is required")
    from qlora_wgpu.runs.recommend import recommend_config  # the engine, too

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
    help="File, folder or hub name of the data; several make a mixture.",
)
@click.option("--eval", "eval_path", type=FILE_OR_FOLDER, help="Held-out data in the same form.")
@click.option(
    "--columns",
    type=ReadBy("KEY=COLUMN", _column),
    multiple=True,
    help="A column of the data that has another name, such as prompt=question; may be given "
    "several times.",
)
@click.option(
    "--from",
    "other",
    help="A file of Axolotl, TRL, LLaMA-Factory, mlx-lm, Unsloth Studio or torchtune to convert; "
    "the options above win over what it says.",
)
@click.option("--out", default="run.yaml", type=FILE_OR_FOLDER, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
def init(
    model_path: str | None,
    data_paths: tuple[str, ...],
    eval_path: str | None,
    columns: tuple[tuple[str, str], ...],
    other: str | None,
    out: str,
    overwrite: bool,
) -> None:
    """Write a commented YAML for a model and a data file, fitted to both.

    Then `qlora-wgpu data run.yaml` shows what is learnt and `qlora-wgpu train run.yaml` trains.
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
        others = written.left_out
        console.print(
            f"{other} is a file of {written.converted_from}: {written.taken} settings are taken "
            f"over, {others} {'is' if others == 1 else 'are'} not; the new file says of each where "
            "it comes from, or why it is left out."
        )
        for note in written.notes:
            console.note(note)
    typed = shell_word(f"./{out}" if out.startswith("-") else out)  # else it is an option
    console.print(
        f"{out} written. Look at the data with `qlora-wgpu data {typed}`, at the memory with "
        f"`qlora-wgpu estimate {typed}`, and train with `qlora-wgpu train {typed}`."
    )


def _check_text(option: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as err:  # its bytes are half characters, which no YAML says
        raise ConfigError(
            f"{option} {name!r} is not text in this locale, so that no file can name it: set "
            "LC_ALL to one of UTF-8, or rename it"
        ) from err
