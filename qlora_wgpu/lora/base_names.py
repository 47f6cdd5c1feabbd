"""Whether an adapter names the base that it is opened on."""

from __future__ import annotations

import re
import warnings
from os import PathLike
from pathlib import Path

_CACHED = re.compile(r"models--(.+)/snapshots/[^/]+/?$")
_NO_NAMES = ("", "..")  # of the working directory, as a user gives them
_PART = re.compile(r"-\d{5}-of-\d{5}$")
# What the same weights are called for the way in which they are stored.
_FORM = re.compile(
    r"[-_.](?:bnb|unsloth|dynamic|gguf|awq|gptq|autoround|hf|mlx|nf4|fp4|mxfp4|nvfp4|fp8|int[48]"
    r"|[248]-?bits?|w\d+a\d+|bf16|fp?16|fp?32|i?q\d(?:_\w+)?|g\d+|quantized|dequantized)$"
)
_told: set[tuple[str, str, str]] = set()


def warn_of_other_name(
    path: str | PathLike[str], named: str | None, base: str | PathLike[str]
) -> None:
    """Warns, once, where an adapter names another base than the one of its shapes it is opened on.

    Args:
        path: The adapter's folder.
        named: The base that it was trained on, as it says.
        base: The base's name or folder.
    """
    told = str(path), named or "", str(base)
    if told in _told or not is_other_name(named, base):
        return
    _told.add(told)
    warnings.warn(
        f"{path} was trained on {named} and is opened on {base}, which has the same shapes: unless "
        "that is the same model by another name, open it with the one that it was trained on",
        stacklevel=3,
    )


def is_other_name(named: str | None, base: str | PathLike[str]) -> bool:
    """Whether two names are of different models, as far as names tell.

    Folders, the hub's names and its cache are told apart by their last part, whatever case it has
    and however the weights are stored (``-bnb-4bit``, ``-Q4_K_M.gguf``).

    Args:
        named: The one that an adapter has, or nothing.
        base: The other one.
    """
    if not named or str(base) == named or _is_same_place(Path(named), Path(base)):
        return False
    here = Path(base).expanduser()
    ours, theirs = _plain(str(here.resolve() if here.name in _NO_NAMES else base)), _plain(named)
    return bool(ours and theirs) and ours != theirs


def _is_same_place(one: Path, other: Path) -> bool:
    try:
        return one.expanduser().samefile(other.expanduser())
    except (OSError, RuntimeError, ValueError):  # one is not here
        return False


def _plain(name: str) -> str:
    """The last part of a name without how its weights are stored."""
    cached = _CACHED.search(name.replace("\\", "/"))
    last = cached[1].rpartition("--")[2] if cached else Path(name.replace("\\", "/")).name
    last = _PART.sub("", last.casefold().removesuffix(".gguf"))
    if last in _NO_NAMES:
        return ""
    while (shorter := _FORM.sub("", last)) != last:
        last = shorter
    return last
