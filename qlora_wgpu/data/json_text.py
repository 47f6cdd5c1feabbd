"""JSON of others, read strictly: no key twice, no NaN, no half characters, no endless depth."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import MAX_COLUMNS, MAX_DEPTH
from qlora_wgpu.visible import quoted

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Refused(ValueError):
    """JSON that is well formed and yet no value to learn from."""


def parse_json(text: str, first_line: int | None = None) -> Any:
    """The value of a text.

    Args:
        text: All of it is the value.
        first_line: Number of its first line in a file; None for text of one line alone.

    Raises:
        DataError: If it is no JSON, or is refused; it names the place within the text alone.
    """
    decoder = _decoder()
    try:
        value, end = decoder.raw_decode(text, skip_space(text, 0))
        end = skip_space(text, end)
        if end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as err:
        raise DataError(f"not valid JSON ({err.msg} at {_place(err, first_line)})") from err
    except (ValueError, RecursionError) as err:
        raise refusal(err) from err
    return checked(value, text)


def raw_decode(text: str, begin: int) -> tuple[Any, int]:
    """The value that begins at a place of a text, and where it ends; not checked yet.

    Raises:
        JSONDecodeError: If there is none, or the text ends within it.
        ValueError: If it is refused; see ``refusal``.
        RecursionError: Likewise.
    """
    value, end = _decoder().raw_decode(text, begin)
    return value, int(end)


def refusal(err: ValueError | RecursionError) -> DataError:
    """The sentence for what the decoder raises besides a JSONDecodeError."""
    if isinstance(err, _Refused):
        return DataError(str(err))
    if isinstance(err, RecursionError):
        return _too_deep()
    return DataError("a number has too many digits")  # more than Python reads


def checked(value: Any, source: str) -> Any:
    """The value, after a look at what the decoder lets through.

    Args:
        value: What was decoded.
        source: Its text.

    Raises:
        DataError: If it is nested too deeply or holds half a character.
    """
    # Both looks are needed for few rows, which the text tells at once.
    if source.count("[") + source.count("{") > MAX_DEPTH and _is_deep(value):
        raise _too_deep()
    if "\\u" in source and _has_lone_surrogate(value):
        raise DataError("a text holds a lone surrogate (half a character, such as \\ud83d)")
    return value


def _decoder() -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def skip_space(text: str, begin: int) -> int:
    """The next place of a text that is no white space."""
    match = _SPACE.match(text, begin)
    assert match is not None
    return match.end()


def _place(err: json.JSONDecodeError, first_line: int | None) -> str:
    if first_line is None:
        return f"column {err.colno}"
    return f"line {first_line + err.lineno - 1} column {err.colno}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {quoted(twice)} stands twice in one object")
    if len(result) > MAX_COLUMNS:
        raise _Refused(f"an object has {len(result):,} keys, more than {MAX_COLUMNS:,}")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not valid JSON")


def _too_deep() -> DataError:
    return DataError(f"the JSON is nested too deeply: more than {MAX_DEPTH} lists and objects")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [x for part in parts if not isinstance(part, str) for x in part if _holds(x)]
        if not level:
            return False
    return True


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(_has_lone_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))
