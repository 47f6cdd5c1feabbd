"""Reward functions: those that a name stands for, and how any is called.

All have TRL's signature: keyword arguments ``prompts``, ``completions``, ``completion_ids`` and
each column of the rows, lists of one length. They return a list of numbers, or None for no reward.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qlora_wgpu.errors import ConfigError, RewardError, brief, require_extra
from qlora_wgpu.grpo.advantages import Array
from qlora_wgpu.grpo.reward_failures import RewardTimeoutError, described

RewardFunction = Callable[..., Sequence[float | None]]

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?%?")
_MOST_TRIED = 256  # completions of a batch on which a function has failed
_MOST_SECONDS = 30.0  # for trying them
_LONGEST = 100_000  # characters of a completion that patterns are tried on


def text_of(completion: Any) -> str:
    """The text of a completion, which is a string or a list of one message."""
    if isinstance(completion, str):
        return completion
    return str(completion[0]["content"])


def _texts(completions: Sequence[Any]) -> list[str]:
    return [text_of(completion)[:_LONGEST] for completion in completions]


# ---- built-in functions --------------------------------------------------------------------------


def exact_match(column: str = "answer") -> RewardFunction:
    """1 where the completion is the row's answer, but for white space around it; else 0."""

    def reward(completions: Sequence[Any], **columns: Any) -> list[float]:
        answers = _column(columns, column, "exact_match")
        return [
            float(text.strip() == str(answer).strip())
            for text, answer in zip(_texts(completions), answers, strict=True)
        ]

    return reward


def contains(column: str = "answer") -> RewardFunction:
    """1 where the row's answer, which is not empty, occurs in the completion; else 0."""

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        answers = _column(columns, column, "contains")
        return [
            float(str(answer).strip() in text) if str(answer).strip() else None
            for text, answer in zip(_texts(completions), answers, strict=True)
        ]

    return reward


def regex(pattern: str) -> RewardFunction:
    """1 where the pattern matches somewhere in the completion; else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as err:
        raise ConfigError(f"grpo.reward_funcs: regex has an invalid pattern: {err}") from None

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(compiled.search(text) is not None) for text in _texts(completions)]

    return reward


def numeric(column: str = "answer", tolerance: float = 1e-6) -> RewardFunction:
    """1 where the last number of the completion is the row's, within a relative tolerance.

    Thousands may be separated by commas. No reward where the row's answer holds no number.
    """

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        answers = _column(columns, column, "numeric")
        made: list[float | None] = []
        for text, answer in zip(_texts(completions), answers, strict=True):
            expected, got = last_number(str(answer)), last_number(text)
            if expected is None:
                made.append(None)
            else:
                is_near = got is not None and math.isclose(
                    got, expected, rel_tol=tolerance, abs_tol=tolerance
                )
                made.append(float(is_near))
        return made

    return reward


def last_number(text: str) -> float | None:
    """The last number of a text, without commas, currency and per cent signs."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    return float(found[-1].replace(",", "").replace("$", "").rstrip("%"))


def length(target: int) -> RewardFunction:
    """1 for a completion of ``target`` tokens, falling to 0 at none and at twice as many."""
    if type(target) is not int or target < 1:
        raise ConfigError(
            f"grpo.reward_funcs: length needs a target of 1 token or more, got {brief(target)}"
        )

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [max(0.0, 1 - abs(len(ids) - target) / target) for ids in completion_ids]

    return reward


def format_tags(tags: Sequence[str] = ("think",)) -> RewardFunction:
    """1 where the completion begins with these sections, ``<tag>…</tag>``, in order; else 0."""
    if isinstance(tags, str) or not all(re.fullmatch(r"[\w-]+", str(tag)) for tag in tags):
        raise ConfigError(
            f"grpo.reward_funcs: format needs a list of tags such as [think, answer], "
            f"got {brief(tags)}"
        )
    sections = r"\s*".join(rf"<{tag}>(?:(?!</?{tag}>).)*</{tag}>" for tag in tags)
    pattern = re.compile(rf"\s*{sections}", re.DOTALL)

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(pattern.match(text) is not None) for text in _texts(completions)]

    return reward


def valid_json() -> RewardFunction:
    """1 where the completion, or its first block of code, is JSON; else 0."""

    def reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(bool(_json_values(text))) for text in _texts(completions)]

    return reward


def json_schema(schema: Mapping[str, Any] | None = None, column: str = "schema") -> RewardFunction:
    """1 where the JSON of the completion conforms to the schema, or to that of the row; else 0.

    No reward where the row has no schema. References to other documents are not followed.
    """
    require_extra("jsonschema")
    if schema is not None:
        try:
            fixed = _validator(schema)
        except ValueError as err:
            raise ConfigError(f"grpo.reward_funcs: json_schema has an invalid {err}") from None

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        texts = _texts(completions)
        if schema is not None:
            return [_conforms(text, fixed) for text in texts]
        given = _column(columns, column, "json_schema")
        return [
            None if own is None else _conforms(text, _validator_of_row(own, column))
            for text, own in zip(texts, given, strict=True)
        ]

    return reward


def _validator_of_row(given: Any, column: str) -> Any:
    try:
        return _validator(json.loads(given) if isinstance(given, str) else given)
    except ValueError as err:
        raise RewardError(
            f"reward function json_schema: column {brief(column)} has an invalid {err}"
        ) from None


def _validator(schema: Any) -> Any:
    """The package's validator of a schema, which is checked and reads no other documents."""
    jsonschema = importlib.import_module("jsonschema")
    registry = importlib.import_module("referencing").Registry()
    made = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        made.check_schema(schema)
    except jsonschema.SchemaError as err:
        raise ValueError(f"schema {brief(schema)}: {brief(err.message)}") from None
    return made(schema, registry=registry)


def _conforms(text: str, validator: Any) -> float:
    try:
        return float(any(validator.is_valid(value) for value in _json_values(text)))
    except RecursionError:
        return 0.0


def _json_values(text: str) -> list[Any]:
    """The value of a text, or of its first block of code, if it is JSON; else nothing."""
    block = re.search(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    try:
        return [json.loads(block[1] if block else text)]
    except (ValueError, RecursionError):
        return []


def math_verify(column: str = "answer") -> RewardFunction:
    r"""1 where the formula of the completion equals that of the row's answer; else 0.

    As TRL's ``accuracy_reward``: the completion's answer must be LaTeX, ``\boxed{}`` first, and
    there is no reward where the row's answer cannot be parsed.
    """
    require_extra("math")
    library = importlib.import_module("math_verify")
    normalization = importlib.import_module("latex2sympy2_extended").NormalizationConfig
    found_in = library.LatexExtractionConfig(
        normalization_config=normalization(units=True), boxed_match_priority=0,
        try_extract_without_anchor=False,
    )  # fmt: skip

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        answers = _column(columns, column, "math_verify")
        # The library limits its time by signals, which only the main thread may handle
        is_main = threading.current_thread() is threading.main_thread()
        parsing, comparing = (10, 5) if is_main else (None, None)
        made: list[float | None] = []
        for text, answer in zip(_texts(completions), answers, strict=True):
            expected = library.parse(str(answer), parsing_timeout=parsing)
            if not expected:
                made.append(None)
                continue
            got = library.parse(
                text, [found_in], extraction_mode="first_match", parsing_timeout=parsing
            )
            made.append(float(library.verify(expected, got, timeout_seconds=comparing)))
        return made

    return reward


BUILT_IN: Mapping[str, Callable[..., RewardFunction]] = {
    "exact_match": exact_match,
    "contains": contains,
    "regex": regex,
    "numeric": numeric,
    "length": length,
    "format": format_tags,
    "json": valid_json,
    "json_schema": json_schema,
    "math_verify": math_verify,
}


def built_in(
    name: str,
    options: Mapping[str, Any],
    known_functions: Mapping[str, Callable[..., RewardFunction]] = BUILT_IN,
) -> RewardFunction:
    """The function of a name with its options.

    Raises:
        ConfigError: If there is none of this name, or it has no such option.
    """
    make = known_functions.get(name)
    if make is None:
        raise ConfigError(
            f"grpo.reward_funcs: unknown function {brief(name)} "
            f"(known: {', '.join(known_functions)}; "
            "your own is named FILE.py:FUNCTION)"
        )
    known = make.__code__.co_varnames[: make.__code__.co_argcount]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"grpo.reward_funcs: {name} has no option {brief(option)} "
                f"(known: {', '.join(known) or 'none'})"
            )
    required = known[: len(known) - len(make.__defaults__ or ())]
    if lacking := [option for option in required if option not in options]:
        raise ConfigError(f"grpo.reward_funcs: {name} needs {lacking[0]}")
    try:
        return make(**options)
    except TypeError as err:
        raise ConfigError(f"grpo.reward_funcs: {name} has an invalid option: {err}") from None


def _column(columns: Mapping[str, Any], name: str, function: str) -> Sequence[Any]:
    if name not in columns:
        known = sorted(key for key in columns if key not in ("prompts", "completion_ids"))
        raise RewardError(
            f"reward function {function}: the rows have no column {brief(name)} "
            f"(columns: {', '.join(known) or 'none'})"
        )
    values: Sequence[Any] = columns[name]
    return values


# ---- calling them --------------------------------------------------------------------------------


def _on_which(function: RewardFunction, batch: Mapping[str, Sequence[Any]]) -> str:
    """The first completion that a function fails on by itself, in words; may be empty."""
    end = time.monotonic() + _MOST_SECONDS
    for number, completion in enumerate(batch["completions"][:_MOST_TRIED]):
        try:
            function(**{key: [values[number]] for key, values in batch.items()})
        except RewardTimeoutError:
            return ""
        except Exception:
            return f" (on the completion {brief(text_of(completion))})"
        if time.monotonic() > end:
            break
    return ""


def rewards_of(
    functions: Mapping[str, RewardFunction], batch: Mapping[str, Sequence[Any]]
) -> Array:
    """What each function gives each completion, (completions, functions); NaN for None.

    Args:
        functions: By their names.
        batch: Their keyword arguments: prompts, completions, completion_ids and columns.

    Raises:
        RewardError: If a function raises, or returns anything but a finite number or None for each
            completion; it names the function and the completion.
    """
    count = len(batch["completions"])
    rewards = np.full((count, len(functions)), np.nan)
    for place, (name, function) in enumerate(functions.items()):
        shown = getattr(function, "where", name)
        try:
            made = list(itertools.islice(function(**batch), count + 1))
        except RewardTimeoutError:
            raise
        except Exception as err:
            what = f"reward function {shown} failed: {described(err)}"
            if isinstance(err, RewardError):
                what = str(err)
            raise RewardError(f"{what}{_on_which(function, batch)}") from err
        if len(made) != count:
            returned = f"more than {count}" if len(made) > count else str(len(made))
            raise RewardError(
                f"reward function {shown} returned {returned} rewards for {count} completions"
            )
        for number, reward in enumerate(made):
            if reward is None:
                continue
            if (value := _finite(reward)) is None:
                text = brief(text_of(batch["completions"][number]))
                raise RewardError(
                    f"reward function {shown} returned {brief(reward)}, not a finite number or "
                    f"None, for the completion {text}"
                )
            rewards[number, place] = value
    return rewards


def _finite(reward: Any) -> float | None:
    """The value of a finite number; None of anything else."""
    if not isinstance(reward, int | float | np.number):
        return None
    try:
        value = float(reward)
    except (OverflowError, TypeError):  # an integer that is too large, a complex number
        return None
    return value if math.isfinite(value) else None
