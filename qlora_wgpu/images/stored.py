"""The images of a prepared data set: which files they are, and the contents of the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlora_wgpu.files import exists, file_text
from qlora_wgpu.images.sources import Content, FileContent, ImageSource, StoredContent
from qlora_wgpu.limits import OWN_JSON_BYTES

_TABLE, _CONTENTS = "images.json", "images.bin"


def write_images(folder: Path, images: Sequence[ImageSource]) -> None:
    """Writes the table of images into a folder, with the contents of those that have no file."""
    if not images:
        return
    entries: list[dict[str, Any]] = []
    with (folder / _CONTENTS).open("wb") as contents:
        for image in images:
            entry: dict[str, Any] = {
                "name": image.name, "key": image.key, "height": image.height, "width": image.width,
            }  # fmt: skip
            if isinstance(image.content, FileContent):
                entry |= {"path": str(image.content.path.absolute()), "state": image.content.state}
            else:
                begin = contents.tell()
                contents.write(image.content.read())
                entry |= {"begin": begin, "end": contents.tell()}
            entries.append(entry)
    (folder / _TABLE).write_text(json.dumps(entries), encoding="utf-8")


def read_images(folder: Path) -> list[ImageSource] | None:
    """The images of a folder's table; None if a file has changed since it was written.

    Damaged tables raise a ValueError, KeyError or TypeError, missing files an OSError.
    """
    if not exists(folder / _TABLE):
        return []
    images = []
    for entry in json.loads(file_text(folder / _TABLE, OWN_JSON_BYTES)):
        content: Content = StoredContent(folder / _CONTENTS, 0, 0)
        if "path" in entry:
            content = FileContent(Path(entry["path"]))
            if content.state != entry["state"]:
                return None
        else:
            content = StoredContent(folder / _CONTENTS, int(entry["begin"]), int(entry["end"]))
        sizes = int(entry["height"]), int(entry["width"])
        images.append(ImageSource(str(entry["name"]), content, str(entry["key"]), *sizes))
    return images
