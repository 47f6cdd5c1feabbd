"""Options and arguments that several commands have, and types whose mistakes are our sentences."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.checkpoint.atomic import write_file
from qlora_wgpu.config.values import parse_bytes
from qlora_wgpu.errors import ConfigError, brief
from qlora_wgpu.files import exists, is_dir

# ---- types ---------------------------------------------------------------------------------------


class ReadBy(click.ParamType):  # type: ignore[type-arg]  # older versions' have none
    """What a function makes of an option's name and text, or refuses by a sentence."""

    def __init__(self, name: str, read: Callable[[str, Any], Any]) -> None:
        self.name, self.read = name, read

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help shows in the value's place."""
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads the text; a default is read already."""
        assert param is not None
        return self.read(param.opts[0], value)


class TargetFile(click.Path):
    """A file that is written, as ``target_file`` checks it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses what cannot be written, before anything is computed."""
        assert param is not None
        return target_file(param.opts[0], value)


def any_whole_number(option: str, text: str) -> int:
    """A whole number of either sign."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{option} must be a whole number, got {text!r}") from None


def whole_number(option: str, text: str, most: int | None = None) -> int:
    """A whole number above zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{option} must be a whole number above zero, got {brief(text)}")
    if most is not None and value > most:
        raise ConfigError(f"{option} must be at most {most:,}, got {brief(value)}")
    return value


def whole_numbers(option: str, text: str, most: int) -> tuple[int, ...]:
    """Several of them with commas between, each once."""
    parts = text.split(",") if text else []
    return tuple(dict.fromkeys(whole_number(option, part.strip(), most) for part in parts))


def read_bytes(option: str, text: str) -> int:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` are 8 · 10^9."""
    size = parse_bytes(text)
    if not size:
        raise ConfigError(f"{option} must be a size such as 8GiB or 500MiB, got {text!r}")
    return size


def target_file(option: str, name: str) -> Path:
    """Where an option's file goes; where a link leads, so that the link stays one."""
    path = Path(name).expanduser()
    if not name or is_dir(path):
        raise ConfigError(f"{option} {name!r} is not a file name: give one such as figures.json")
    if not is_dir(path.parent):
        raise ConfigError(f"{option} {name}: there is no folder {path.parent}")
    if not os.access(path if exists(path) else path.parent, os.W_OK):
        raise ConfigError(f"{option} {name} cannot be written: you may not write there")
    return path.resolve() if path.is_symlink() else path


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Writes an option's file as JSON."""
    write_file(path, (json.dumps(figures, indent=1) + "\n").encode())


def one_of(*names: str) -> ReadBy:
    """One of some words."""

    def read(option: str, text: str) -> str:
        if text not in names:
            raise ConfigError(f"{option} must be {' or '.join(names)}, got {text!r}")
        return text

    return ReadBy("|".join(names), read)


def counted(most: int | None = None) -> ReadBy:
    """A whole number above zero."""
    return ReadBy("N", partial(whole_number, most=most))


FILE_OR_FOLDER = click.Path(readable=False)  # whether it can be read is told by who reads it
DTYPE = one_of("bfloat16", "float32")
PORT = counted(65_535)
PORT_OR_ANY = ReadBy("N", lambda option, text: 0 if text == "0" else PORT.read(option, text))
SIZE = ReadBy("TEXT", read_bytes)
SIZE_OR_AUTO = ReadBy(
    "TEXT", lambda option, text: text if text == "auto" else SIZE.read(option, text)
)

# ---- options -------------------------------------------------------------------------------------

overrides_argument = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
chat_template_option = click.option(
    "--chat-template",
    "template_name",
    type=FILE_OR_FOLDER,
    help="Chat template instead of the run's or the tokenizer's: a .jinja file, or a built-in "
    "name.",
)
max_new_tokens_option = click.option(
    "--max-new-tokens", default=256, type=click.IntRange(1), help="Most tokens of an answer."
)
_SAMPLING = (
    max_new_tokens_option,
    click.option(
        "--temperature",
        default=0.0,
        type=click.FloatRange(0),
        help="How freely tokens are chosen; 0 takes the likeliest.",
    ),
    click.option(
        "--top-k",
        default=0,
        type=click.IntRange(0),
        help="Sample among this many of the likeliest tokens; 0 for all of them.",
    ),
    click.option(
        "--top-p",
        default=1.0,
        type=click.FloatRange(0, 1, min_open=True),
        help="Sample among the likeliest tokens that together have this probability.",
    ),
    click.option(
        "--min-p",
        default=0.0,
        type=click.FloatRange(0, 1),
        help="Sample among tokens that have at least this share of the likeliest's probability.",
    ),
    click.option(
        "--repetition-penalty",
        default=1.0,
        type=click.FloatRange(0, min_open=True),
        help="Divides the positive logits of tokens that the text already has; 1 changes nothing.",
    ),
    click.option(
        "--seed", default=0, type=click.IntRange(0), help="Seed of the random choice of tokens."
    ),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how tokens are chosen."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def json_option(text: str) -> Callable[..., Any]:
    """``--json FILE``, for figures."""
    return click.option("--json", "json_file", type=TargetFile(), metavar="FILE", help=text)


def batch_option(text: str) -> Callable[..., Any]:
    """``--batch``, for answers that are made at a time."""
    return click.option("--batch", default=8, type=click.IntRange(1), help=text)


def gpu_option(
    text: str, *old_names: str, default: str | None = "auto", show_default: bool | str = True
) -> Callable[..., Any]:
    """``--gpu``, which is still read under the names that the option used to have."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in old_names:
            command = click.option(
                name, "old_gpu", hidden=True, expose_value=False, callback=_take_old_name
            )(command)
        option = click.option(
            "--gpu", default=default, show_default=show_default, is_eager=True, help=text
        )
        return option(command)

    return decorate


def _take_old_name(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.params["gpu"] = value
