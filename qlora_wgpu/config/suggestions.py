"""Suggestions for keys that do not exist."""

from __future__ import annotations

import difflib

from qlora_wgpu.config.dialects.conversion import key_for
from qlora_wgpu.config.dialects.reasons import reason_for
from qlora_wgpu.config.schema import SourceConfig, sections
from qlora_wgpu.config.synonyms import KEY_OF

_OPPOSITES = (("train", "eval"), ("min", "max"), ("beta1", "beta2"), ("steps", "epochs"))


def suggest_key(loc: tuple[str, ...]) -> str:
    """The end of the sentence about an unknown key: empty, or like ``": did you mean 'lora.r'?"``.

    Args:
        loc: The key, as ``("lora", "rank")``; one part where it stands at the top level.
    """
    keys = sections()
    if loc[:2] == ("data", "sources"):
        near = _near(loc[-1], list(SourceConfig.model_fields))
        keys_of = ", ".join(SourceConfig.model_fields)
        return f": did you mean {near!r}?" if near else f": the keys of a source are {keys_of}"
    if len(loc) > 2:
        return ""
    leaf = loc[-1].lower().replace("-", "_")
    if len(loc) == 1 and "." in leaf:
        section, _, rest = leaf.partition(".")
        if rest in keys.get(section, ()):
            return f": write '{rest}' under the section '{section}'"
    if len(loc) == 1:
        return _suggest_at_top(leaf, keys)
    section = loc[0]
    if leaf in keys[section]:  # only its spelling differs
        return _did_you_mean(section, leaf)
    meant = KEY_OF.get(leaf) or key_for(leaf)
    if meant and meant[0] == section:  # such as optim.scheduler, which cluster has, too
        return _did_you_mean(*meant)
    for other, leaves in keys.items():
        if leaf in leaves:
            return f": it belongs in section '{other}'"
    if reason := reason_for(leaf):
        return f": {reason}"
    if meant and not _near(leaf, keys[section]):
        return _did_you_mean(*meant)
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
    if meant := KEY_OF.get(name) or key_for(name):
        return _did_you_mean(*meant)
    if reason := reason_for(name):
        return f": {reason}"
    if near := _near(name, list(keys)):
        return f": did you mean the section '{near}'?"
    everywhere = {leaf: section for section, leaves in keys.items() for leaf in leaves}
    if near := _near(name, list(everywhere)):
        return _did_you_mean(everywhere[near], near)
    return f": the sections are {', '.join(keys)}"


def _near(word: str, words: list[str]) -> str | None:
    alike = [other for other in words if not _opposite(word, other)]
    return next(iter(difflib.get_close_matches(word, alike, n=1, cutoff=0.7)), None)


def _opposite(word: str, other: str) -> bool:
    """Whether two names differ in the very word that tells them apart."""
    ours, theirs = set(word.split("_")), set(other.split("_"))
    return any((a in ours and b in theirs) or (b in ours and a in theirs) for a, b in _OPPOSITES)


def _did_you_mean(section: str, leaf: str) -> str:
    return f": did you mean '{section}.{leaf}'?"
