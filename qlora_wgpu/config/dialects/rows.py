"""What other trainers say of the rows of their data, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_wgpu.config.dialects.draft import Draft
from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, is_inline_template


def set_rows(draft: Draft, row_format: str, columns: Mapping[str, Any], origin: str) -> None:
    """The rows' format, and their columns where these are called otherwise."""
    draft.set("data.format", row_format, origin)
    if renamed := {key: str(name) for key, name in columns.items() if name and name != key}:
        draft.set("data.columns", renamed, origin)


def hub_place(draft: Draft, path: str, subset: Any = None, split: Any = None) -> str:
    """A file, a folder or a data set of the hub, of which a part may be named."""
    place = draft.place(path)
    split = str(split or "")
    if "[" in split or "+" in split:
        draft.notes.append(f"the split {split!r} of {path} is read whole: slices are not done")
        split = split.partition("[")[0].partition("+")[0]
    if subset:
        return f"{place}:{subset}/{split or 'train'}"
    return f"{place}:{split}" if split and split != "train" else place


def is_file(draft: Draft, path: str) -> bool:
    """Whether a place of theirs is one file, which has no splits."""
    return Path(draft.place(path)).is_file()


def set_template(draft: Draft, template: Any, origin: str, default: str = "") -> None:
    """The chat template, where it is one that is known here.

    Args:
        draft: The draft.
        template: Theirs.
        origin: The key that names it.
        default: Their name for the tokenizer's own.
    """
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
