"""``init``: a commented YAML for a given model and data, to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.cli._converting import converted
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.config.commented_yaml import commented_yaml
from qlora_wgpu.data.sources import has_validation
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.presence import exists
from qlora_wgpu.runs.first_settings import first_settings
from qlora_wgpu.shell_words import shell_word


@click.command()
@click.option("--model", "model_path", help="Folder or hub name of the base.")
@click.option(
    "--data",
    "data_paths",
    multiple=True,
    help="File, folder or hub name of the data; several make a mixture.",
)
@click.option("--eval", "eval_path", help="Held-out data in the same form.")
@click.option(
    "--columns",
    "columns",
    multiple=True,
    metavar="KEY=COLUMN",
    help="A column of the data that has another name, such as prompt=question; may be given "
    "several times.",
)
@click.option(
    "--from",
    "other",
    help="A file of Axolotl, TRL, LLaMA-Factory, mlx-lm, Unsloth Studio or torchtune to convert; "
    "the options above win over what it says.",
)
@click.option("--out", default="run.yaml", show_default=True, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
def init(
    model_path: str | None,
    data_paths: tuple[str, ...],
    eval_path: str | None,
    columns: tuple[str, ...],
    other: str | None,
    out: str,
    overwrite: bool,
) -> None:
    """Write a commented YAML for a model and a data file, fitted to both.

    Then `qlora-wgpu data run.yaml` shows what is learnt and `qlora-wgpu train run.yaml` trains.
    """
    console = Terminal()
    file = Path(out)
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out!r} must end in .yaml")
    if exists(file) and not overwrite:
        raise ConfigError(f"{out} is there already: name another with --out, or use --overwrite")
    named = [("--model", model_path), ("--eval", eval_path), *(("--data", d) for d in data_paths)]
    for option, name in named:
        _check_text(option, name or "")
    if other is not None:
        if len(data_paths) > 1 or columns:
            what = "--columns" if columns else "one --data, in place of what the file names"
            raise ConfigError(f"--from takes {'no ' if columns else ''}{what}")
        text = converted(other, model_path, next(iter(data_paths), None), eval_path, console)
    elif model_path is None or not data_paths:
        missing = "--model" if model_path is None else "--data"
        raise click.MissingParameter(param_hint=f"'{missing}'", param_type="option")
    else:
        if eval_path is None and len(data_paths) == 1 and has_validation(Path(data_paths[0])):
            eval_path = data_paths[0]
        with console.status("looking at the data"):
            text = commented_yaml(
                *first_settings(model_path, data_paths, eval_path, columns=_named(columns))
            )
    write_file(file, text.encode())
    typed = shell_word(f"./{out}" if out.startswith("-") else out)  # else it is an option
    console.print(
        f"{out} written. Look at the data with `qlora-wgpu data {typed}`, at the memory with "
        f"`qlora-wgpu estimate {typed}`, and train with `qlora-wgpu train {typed}`.",
        highlight=False,
    )


def _named(columns: tuple[str, ...]) -> dict[str, str]:
    named = {}
    for text in columns:
        key, equals, column = text.partition("=")
        if not (key and equals and column):
            raise ConfigError(f"--columns {text!r} must be KEY=COLUMN, such as prompt=question")
        named[key] = column
    return named


def _check_text(option: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as err:  # its bytes are half characters, which no YAML says
        raise ConfigError(
            f"{option} {name!r} is not text in this locale, so that no file can name it: set "
            "LC_ALL to one of UTF-8, or rename it"
        ) from err
