"""Files of prompts, to be completed row by row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.data import PromptFormat
from qlora_wgpu.data.messages import with_system
from qlora_wgpu.data.sources import check_file, read_rows
from qlora_wgpu.errors import DataError
from qlora_wgpu.generation.generate import Prompt

_FORMS = (
    "a row is {'prompt': TEXT or MESSAGES}, {'messages': MESSAGES} or {'text': TEXT}, where "
    "MESSAGES are such as [{'role': 'user', 'content': '...'}]"
)


def read_prompts(path: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a file of prompts, each with its place for messages."""
    check_file(Path(path))
    rows = list(read_rows(Path(path)))
    if not rows:
        raise DataError(f"{path}: there is no prompt in it")
    return rows


def prompts_of(
    rows: Sequence[tuple[str, Mapping[str, Any]]], written: PromptFormat, *, answered: bool
) -> list[Prompt]:
    """What is completed of each row; an answer at the end of messages is left out."""
    return [_prompt(where, row, written, answered=answered) for where, row in rows]


def _prompt(where: str, row: Mapping[str, Any], written: PromptFormat, *, answered: bool) -> Prompt:
    value = next((row[key] for key in ("messages", "prompt", "text") if key in row), None)
    if isinstance(value, str) and (not answered or "text" in row):
        plain = PromptFormat.text(written.tokenizer)
        ids = _ids(where, plain, [{"role": "user", "content": value}])
        return Prompt(ids, plain.stop_ids, is_text=True)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    is_chat = isinstance(messages, list) and all(
        isinstance(each, Mapping) and "role" in each and "content" in each for each in messages
    )
    if not is_chat or not messages:
        raise DataError(f"{where}: {_FORMS}")
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{where}: there is nothing to answer")
    if isinstance(value, list):
        messages = with_system(messages, row)
    ids = _ids(where, written, messages)
    return Prompt(ids, written.stop_ids, (written.stop_text,))


def _ids(where: str, written: PromptFormat, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    try:
        return written.ids(messages)
    except DataError as err:
        raise DataError(f"{where}: {err}") from err
