"""The images of rows: in parts of messages, in a column of the row, or at ``<image>`` in text.

All forms become messages whose images are parts ``{"type": "image"}``, as chat templates read them,
and a list of the images in their order. Paths are relative to the data file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.data.messages import IMAGE_PARTS, from_json
from qlora_wgpu.errors import DataError
from qlora_wgpu.images.placeholders import counted
from qlora_wgpu.images.sources import ImageSource, home_expanded, image_source, is_remote
from qlora_wgpu.limits import IMAGES_OF_A_ROW

MARK = "<image>"
"""What LLaVA and LLaMA-Factory write for an image in text."""

COLUMNS = ("images", "image")
_MESSAGES = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
_PATHS = ("path", "url", "image", "image_url")  # keys of an object that may refer to a file
_SOURCES = (*_PATHS, "bytes", "base64")

# ---- paths relative to the data file -------------------------------------------------------------


def located(row: dict[str, Any], folder: Path, columns: Sequence[str]) -> dict[str, Any]:
    """A row of a file in a folder, with the paths of images in its columns and parts completed."""
    found = dict(row)
    for key in columns:
        if found.get(key) is not None:
            found[key] = _located(_parsed(found[key]), folder)
    for key in _MESSAGES:
        messages = _parsed(found.get(key))
        if isinstance(messages, list):
            found[key] = [_with_paths(message, folder) for message in messages]
    return found


def _parsed(value: Any) -> Any:
    try:
        return from_json(value)
    except DataError:  # reported, or a text, where it is read
        return value


def _with_paths(message: Any, folder: Path) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part_with_paths(part, folder) for part in content]}


def _part_with_paths(part: Any, folder: Path) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
        return part
    paths = {key: _located(part[key], folder) for key in _PATHS if part.get(key) is not None}
    return {**part, **paths}


def _located(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_located(each, folder) for each in value]
    if isinstance(value, Mapping):
        paths = {key: _located(value[key], folder) for key in _PATHS if value.get(key) is not None}
        return {**value, **paths}
    if not isinstance(value, str) or not value or is_remote(value):
        return value
    return str(folder / home_expanded(value))


# ---- images of a row -----------------------------------------------------------------------------


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column of images with something in it."""
    return any(row.get(key) not in (None, "", []) for key in COLUMNS)


def images_of_row(row: Mapping[str, Any]) -> list[Any]:
    """What the row's column of images contains, in order."""
    filled = [key for key in COLUMNS if row.get(key) not in (None, "", [])]
    if len(filled) > 1:
        raise DataError("a row must have either 'images' or 'image', not both")
    if not filled:
        return []
    value = from_json(row[filled[0]])
    values = list(value) if isinstance(value, list | tuple) else [value]
    if len(values) > IMAGES_OF_A_ROW:
        raise DataError(f"it has {len(values):,} images, more than {IMAGES_OF_A_ROW}")
    return values


def with_image_parts(
    messages: Sequence[Mapping[str, Any]], own: Sequence[Any]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages with their images as parts, and the images' values in their order.

    ``own`` are those of the row's column. Without any placeholder they come before the text of the
    first message of a user, as in TRL.

    Raises:
        DataError: If there are not as many placeholders as images.
    """
    parted = [_parted(message) if own else dict(message) for message in messages]
    places = [part for message in parted for part in _image_parts(message)]
    free = sum(_source_of(part) is None for part in places)
    if own and not free:
        _put_first(parted, len(own))
        free = len(own)
    if free != len(own):
        where = "'images'" if own else "the row's columns"
        placeholders = "1 image placeholder" if free == 1 else f"{free} image placeholders"
        raise DataError(
            f"its messages have {placeholders}, but {counted(len(own))} in {where}: each "
            "placeholder must have one image"
        )
    left, values = iter(own), []
    for message in parted:
        if not _image_parts(message):
            continue
        for part in _image_parts(message):
            source = _source_of(part)
            values.append(next(left) if source is None else source)
        message["content"] = [
            {"type": "image"} if part.get("type") in IMAGE_PARTS else part
            for part in message["content"]
        ]
    if len(values) > IMAGES_OF_A_ROW:
        raise DataError(f"it has {len(values):,} images, more than {IMAGES_OF_A_ROW}")
    return parted, values


def _image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if part.get("type") in IMAGE_PARTS]


def _source_of(part: Mapping[str, Any]) -> Any:
    """An image part's own image; None for a placeholder."""
    return next((part if key in ("bytes", "base64") else part[key]
                 for key in _SOURCES if part.get(key) is not None), None)  # fmt: skip


def _parted(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text is divided at ``<image>``.

    A line break between an image at the edge and the text is the template's business.
    """
    content = message.get("content")
    if not isinstance(content, str) or MARK not in content:
        return dict(message)
    texts = content.split(MARK)
    if not texts[0].strip() and len(texts) > 1:
        texts[1] = texts[1].removeprefix("\n")
    if not texts[-1].strip() and len(texts) > 1:
        texts[-2] = texts[-2].removesuffix("\n")
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text.strip() or 0 < number < len(texts) else []
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _put_first(messages: list[dict[str, Any]], count: int) -> None:
    for message in messages:
        if message["role"] == "user":
            content = message.get("content")
            texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            message["content"] = [{"type": "image"}] * count + texts
            return
    raise DataError("it has images, but no message of a user to put them into")


def check_marks(text: str, images: int) -> None:
    """Refuses the text of a row without messages that has not one ``<image>`` for each image."""
    if (count := text.count(MARK)) != images:
        raise DataError(
            f"its text has {MARK} {count} times, but the row has {counted(images)}: write {MARK} "
            "where each image belongs"
        )


def measured_images(values: Sequence[Any], folder: Path | None) -> list[ImageSource]:
    """The images that values refer to, with their sizes."""
    return [
        image_source(value, folder, f"image {number}").measured()
        for number, value in enumerate(values, start=1)
    ]
