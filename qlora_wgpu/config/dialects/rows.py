"""What other trainers say of the rows of their data, and tokens that they add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qlora_wgpu import presence
from qlora_wgpu.config.dialects.draft import Draft
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template

# ---- tokens that are added -----------------------------------------------------------------------

_NAMED = ("bos_token", "eos_token", "unk_token")
_TRAINED = "their rows of the embedding and of the head are trained here"


def listed_tokens(value: Any) -> list[str]:
    """Tokens of a list, or of a text with commas between them."""
    given = value if isinstance(value, list) else str(value).split(",")
    return list(dict.fromkeys(token for each in given if (token := str(each).strip())))


def convert_llama_factory(draft: Draft) -> None:
    """Its ``add_tokens``, ``add_special_tokens`` (``new_special_tokens``) and ``resize_vocab``."""
    plain, special = draft.take("add_tokens"), draft.take("add_special_tokens")
    origin = "add_special_tokens"
    if special is None:
        special, origin = draft.take("new_special_tokens"), "new_special_tokens"
    tokens = listed_tokens(special or [])
    others = [token for token in listed_tokens(plain or []) if token not in tokens]
    _set(draft, "add_tokens", others, "add_tokens")
    _set(draft, "add_special_tokens", tokens, origin)
    draft.drop("resize_vocab", "the embedding has as many rows as there are tokens")


def convert_axolotl(draft: Draft) -> None:
    """Its ``tokens``, and those of ``special_tokens`` that a tokenizer may lack."""
    given = draft.take("special_tokens", {})
    if not isinstance(given, Mapping):
        draft.leave_out("special_tokens", given, "it must name each one's use")
        given = {}
    more = given.get("additional_special_tokens") or []
    named = [str(given[key]) for key in _NAMED if given.get(key)]
    tokens = list(dict.fromkeys([*named, *listed_tokens(more)]))
    plain = [token for token in listed_tokens(draft.take("tokens", [])) if token not in tokens]
    _set(draft, "add_tokens", plain, "tokens")
    _set(draft, "add_special_tokens", tokens, "special_tokens, where the tokenizer lacks them")
    if named:
        draft.notes.append(
            "special_tokens: which tokens begin and end a text stays as the tokenizer's files and "
            "the chat template say"
        )
    if (padding := given.get("pad_token")) is not None:
        reason = "padding is masked, whatever its token is"
        draft.leave_out("special_tokens.pad_token", padding, reason)


def _set(draft: Draft, key: str, tokens: list[str], origin: str) -> None:
    if tokens:
        draft.set(f"model.{key}", tokens, f"{origin}; {_TRAINED}")


# ---- rows ----------------------------------------------------------------------------------------

ONE_WINDOW = (
    "here data.truncation is of all rows; with windows texts are cut so, and other rows at the end"
)
PACKED_APART = "rows packed into one sequence see each other there; here they do not"


@dataclass(frozen=True)
class RowsOf:
    """How the rows of one data set are read."""

    format: str | None = None  # their format; None for what their keys tell
    # Their columns by the format's keys, where these are called otherwise
    columns: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""  # the key of theirs that says it

    @classmethod
    def named(cls, row_format: str | None, columns: Mapping[str, Any], origin: str) -> RowsOf:
        """Those of a format, of which some columns may have names of their own."""
        renamed = {key: str(name) for key, name in columns.items() if name and name != key}
        return cls(row_format, renamed, origin)


def set_rows(draft: Draft, row_format: str, columns: Mapping[str, Any], origin: str) -> None:
    """The rows' format, and their columns where these are called otherwise."""
    _set_rows(draft, RowsOf.named(row_format, columns, origin))


def _set_rows(draft: Draft, rows: RowsOf) -> None:
    if rows.format is not None:
        draft.set("data.format", rows.format, rows.origin)
    if rows.columns:
        draft.set("data.columns", dict(rows.columns), rows.origin)


@dataclass(frozen=True)
class Source:
    """One of the data sets of a file."""

    path: str  # where it is
    rows: RowsOf = RowsOf()  # how its rows are read
    # ``weight`` or ``rows``, where it gives no more than a part
    portion: Mapping[str, float] = field(default_factory=dict)


def set_sources(draft: Draft, sources: Sequence[Source], origin: str) -> None:
    """The training data: one data set, or a mixture of several."""
    if len(sources) == 1 and not sources[0].portion:
        draft.set("data.train", sources[0].path, origin)
        _set_rows(draft, sources[0].rows)
        return
    entries = []
    for source in sources:
        entry: dict[str, Any] = {"path": source.path}
        if source.rows.format is not None:
            entry["format"] = source.rows.format
        if source.rows.columns:
            entry["columns"] = dict(source.rows.columns)
        entries.append({**entry, **source.portion})
    draft.set("data.sources", entries, origin)


def hub_place(draft: Draft, path: str, subset: Any = None, split: Any = None) -> str:
    """A file, a folder or a data set of the hub, of which one part may be named.

    Of several parts that are joined the first is taken.
    """
    first, *more = hub_places(draft, path, subset, split)
    if more:
        draft.leave_out("split", split, f"one split of {path} is taken: {first}")
    return first


def hub_places(draft: Draft, path: str, subset: Any = None, split: Any = None) -> list[str]:
    """The parts of a file, a folder or a data set of the hub: its splits, or slices of them."""
    return [_part(draft.place(path), subset, part) for part in str(split or "train").split("+")]


def file_places(draft: Draft, files: Sequence[Any], split: Any, key: str) -> list[str]:
    """Files that a data set is made of, whose one split is theirs together."""
    places = [draft.place(str(file)) for file in files]
    _, bracket, rest = str(split or "train").partition("[")
    if len(places) == 1:
        return [_part(places[0], None, "train" + bracket + rest)]
    if bracket:
        draft.leave_out(f"{key}.split", split, "it is a slice of several files: take one of each, "
                        f"such as {places[0]}[:100]")  # fmt: skip
    return places


def _part(place: str, subset: Any, split: str) -> str:
    name, bracket, rest = split.strip().partition("[")
    rows = (bracket + rest).replace(" ", "")
    if subset:
        return f"{place}:{subset}/{name or 'train'}{rows}"
    return f"{place}{rows}" if name in ("", "train") else f"{place}:{name}{rows}"


def first_rows(draft: Draft, sources: Sequence[Source], most: Any, origin: str) -> list[Source]:
    """Sources of which each gives so many rows at most, its first ones."""
    limited = []
    for source in sources:
        if "rows" in source.portion and source.portion["rows"] >= 1:
            rows = min(source.portion["rows"], most)
            limited.append(replace(source, portion={"rows": rows}))
        elif source.path.endswith("]"):
            draft.leave_out(origin, most, f"{source.path} is a slice already")
            limited.append(source)
        else:
            limited.append(replace(source, path=f"{source.path}[:{most}]"))
    return limited


def is_file(draft: Draft, path: str) -> bool:
    """Whether a place of theirs is one file, which has no splits."""
    return presence.is_file(Path(draft.place(path)))


def set_template(draft: Draft, template: Any, origin: str, default: str = "") -> None:
    """The chat template, where it is one that is known here."""
    if template is None or template == default:
        return
    name = str(template)
    if name in BUILT_IN_CHAT_TEMPLATES or is_inline_template(name):
        draft.set("data.chat_template", name, origin)
    elif name.endswith(".jinja"):
        draft.set("data.chat_template", draft.place(name), origin)
    else:
        draft.leave_out(
            origin,
            template,
            "the tokenizer's own template is used; where it has none, set data.chat_template",
        )
