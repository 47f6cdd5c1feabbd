"""Suggestions for keys that do not exist."""

from __future__ import annotations

import difflib

from qlora_wgpu.config.schema import Config
from qlora_wgpu.config.synonyms import KEY_OF, REFUSED


def sections() -> dict[str, list[str]]:
    """The leaf names of every section."""
    result = {}
    for name, field in Config.model_fields.items():
        assert field.annotation is not None
        result[name] = list(field.annotation.model_fields)
    return result


def suggest_key(loc: tuple[str, ...]) -> str:
    """The end of the sentence about an unknown key: empty, or like ``": did you mean 'lora.r'?"``.

    Args:
        loc: The key, as ``("lora", "rank")``; one part where it stands at the top level.
    """
    keys = sections()
    if len(loc) > 2:
        return ""
    leaf = loc[-1].lower().replace("-", "_")
    if len(loc) == 1 and "." in leaf:
        section, _, rest = leaf.partition(".")
        if rest in keys.get(section, ()):
            return f": write '{rest}' under the section '{section}'"
    if len(loc) == 1:
        return _suggest_at_top(leaf, keys)
    if leaf in REFUSED:
        return f": {REFUSED[leaf]}"
    section = loc[0]
    if leaf in keys[section]:  # only its spelling differs
        return _did_you_mean(section, leaf)
    for other, leaves in keys.items():
        if leaf in leaves:
            return f": it belongs in section '{other}'"
    if leaf in KEY_OF and (KEY_OF[leaf][0] == section or not _near(leaf, keys[section])):
        return _did_you_mean(*KEY_OF[leaf])
    if near := _near(leaf, keys[section]):
        return _did_you_mean(section, near)
    everywhere = {name: section for section, leaves in keys.items() for name in leaves}
    if near := _near(leaf, list(everywhere)):
        return _did_you_mean(everywhere[near], near)
    return f": the keys of '{section}' are {', '.join(keys[section])}"


def _suggest_at_top(name: str, keys: dict[str, list[str]]) -> str:
    for section, leaves in keys.items():
        if name in leaves:
            return f": it belongs in section '{section}'"
    if near := _near(name, list(keys)):
        return f": did you mean the section '{near}'?"
    if name in KEY_OF:
        return _did_you_mean(*KEY_OF[name])
    everywhere = {leaf: section for section, leaves in keys.items() for leaf in leaves}
    if near := _near(name, list(everywhere)):
        return _did_you_mean(everywhere[near], near)
    return f": the sections are {', '.join(keys)}"


def _near(word: str, words: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.7)), None)


def _did_you_mean(section: str, leaf: str) -> str:
    return f": did you mean '{section}.{leaf}'?"
