"""Options that several commands share, and the types that parse them."""

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
from qlora_wgpu.limits import LONGEST_SIDE

# ---- types ---------------------------------------------------------------------------------------


class ParsedType(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions
    """A type that parses an option's name and text, or raises a ConfigError."""

    def __init__(self, name: str, parse: Callable[[str, Any], Any]) -> None:
        self.name, self.parse = name, parse

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help shows in place of the value."""
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses the text."""
        assert param is not None
        return self.parse(param.opts[0], value)


class OutputFile(click.Path):
    """A file to write, checked before anything is computed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Checks the path."""
        assert param is not None
        return output_file(param.opts[0], value)


def integer(option: str, text: str) -> int:
    """An integer, negative ones included."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{option} must be an integer, got {text!r}") from None


def positive_integer(option: str, text: str, maximum: int | None = None) -> int:
    """An integer from 1 to ``maximum``."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{option} must be a positive integer, got {brief(text)}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{option} must be at most {maximum:,}, got {brief(value)}")
    return value


def positive_integers(option: str, text: str, maximum: int) -> tuple[int, ...]:
    """Comma-separated integers, without duplicates."""
    parts = text.split(",") if text else []
    return tuple(dict.fromkeys(positive_integer(option, part.strip(), maximum) for part in parts))


def read_bytes(option: str, text: str) -> int:
    """A size in bytes: ``8GiB`` and ``8Gi`` are 8 · 2^30, ``8GB`` and ``8G`` are 8 · 10^9."""
    size = parse_bytes(text)
    if not size:
        raise ConfigError(f"{option} must be a size such as 8GiB or 500MiB, got {text!r}")
    return size


def read_size(option: str, text: str) -> tuple[int, int]:
    """A width and a height in pixels: ``1024x768``."""
    width, times, height = text.lower().partition("x")
    if not times:
        raise ConfigError(f"{option} must be a width and a height such as 1024x768, got {text!r}")
    most = LONGEST_SIDE
    return positive_integer(option, width, most), positive_integer(option, height, most)


def output_file(option: str, name: str) -> Path:
    """The path of a file to write; the target of a link, so that the link is kept."""
    path = Path(name).expanduser()
    if not name or is_dir(path):
        raise ConfigError(f"{option} must be a file name such as results.json, got {name!r}")
    if not is_dir(path.parent):
        raise ConfigError(f"{option} {name}: the folder {path.parent} does not exist")
    if not os.access(path if exists(path) else path.parent, os.W_OK):
        raise ConfigError(f"{option} {name} cannot be written: permission denied")
    return path.resolve() if path.is_symlink() else path


def write_json_file(path: Path, value: dict[str, Any]) -> None:
    """Writes an indented JSON file, atomically."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def one_of(*names: str) -> ParsedType:
    """A choice whose error is our sentence."""

    def parse(option: str, text: str) -> str:
        if text not in names:
            raise ConfigError(f"{option} must be {' or '.join(names)}, got {text!r}")
        return text

    return ParsedType("|".join(names), parse)


def count(maximum: int | None = None) -> ParsedType:
    """A positive integer."""
    return ParsedType("N", partial(positive_integer, maximum=maximum))


FILE_OR_FOLDER = click.Path(readable=False)  # the code that reads it reports what is wrong
DTYPE = one_of("bfloat16", "float32")
PORT = count(65_535)
PORT_OR_ANY = ParsedType("N", lambda option, text: 0 if text == "0" else PORT.parse(option, text))
SIZE = ParsedType("SIZE", read_bytes)
SIZE_OR_AUTO = ParsedType(
    "SIZE", lambda option, text: text if text == "auto" else read_bytes(option, text)
)

# ---- options -------------------------------------------------------------------------------------

overrides_argument = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
chat_template_option = click.option(
    "--chat-template",
    "template_name",
    type=FILE_OR_FOLDER,
    help="Chat template to use instead of the run's or the tokenizer's: a .jinja file or a "
    "built-in name.",
)
allow_code_option = click.option(
    "--allow-code",
    is_flag=True,
    help="Allow grpo.reward_funcs to run functions of Python files, with your rights.",
)
max_new_tokens_option = click.option(
    "--max-new-tokens",
    default=256,
    type=click.IntRange(1),
    help="Maximum number of tokens to generate.",
)
_SAMPLING = (
    max_new_tokens_option,
    click.option(
        "--temperature",
        default=0.0,
        type=click.FloatRange(0),
        help="Sampling temperature; 0 is greedy.",
    ),
    click.option(
        "--top-k",
        default=0,
        type=click.IntRange(0),
        help="Sample from this many most likely tokens; 0 for all.",
    ),
    click.option(
        "--top-p",
        default=1.0,
        type=click.FloatRange(0, 1, min_open=True),
        help="Sample from the most likely tokens whose probabilities add up to this.",
    ),
    click.option(
        "--min-p",
        default=0.0,
        type=click.FloatRange(0, 1),
        help="Sample from tokens with at least this fraction of the highest probability.",
    ),
    click.option(
        "--repetition-penalty",
        default=1.0,
        type=click.FloatRange(0, min_open=True),
        help="Penalty on tokens that the text already has; 1 disables it.",
    ),
    click.option("--seed", default=0, type=click.IntRange(0), help="Random seed of sampling."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of sampling."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def json_option(text: str) -> Callable[..., Any]:
    """``--json FILE``."""
    return click.option("--json", "json_file", type=OutputFile(), metavar="FILE", help=text)


def batch_option(text: str) -> Callable[..., Any]:
    """``--batch``, of generation."""
    return click.option("--batch", default=8, type=click.IntRange(1), help=text)


def gpu_option(
    text: str, *old_names: str, default: str | None = "auto", show_default: bool | str = True
) -> Callable[..., Any]:
    """``--gpu``, which is also read under its former names."""

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
