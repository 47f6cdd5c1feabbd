"""Words that users meet and the field does not use, with the ones that it does.

Looked for in messages, help, settings' descriptions, docstrings and documents:

usage: python -m tools.words [FOLDER ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
SOURCES = ("qlora_wgpu", "examples")

INSTEAD = {
    r"learnt": "trained on, learned",
    r"beside": "next to, besides, in addition to",
    r"anew|once more": "again",
    r"(is|are|was|were|be|been|not) told": "reported, passed, unknown",
    r"most (tokens|rows|samples|answers|steps|bytes|requests) (of|that|to|in)": "maximum number of",
    r"(?<!at )(?<!at the )least(?! recently)": "minimum, smallest, lowest",
    r"figures?": "metric, value, measurement",
    r"reckon(s|ed|ing)?": "estimate",
    r"rightly": "correctly",
    r"what waits|(layer|weight|group|activation)s? (that )?waits?": "offloaded",
    r"(ways?|how) (of cutting|kernels are cut)|kernels? (is|are) cut": "tiling",
    r"grow(s|n|ing)? together": "batched",
    r"likeliest": "most likely, greedy",
    r"(the )?same bits|with other bits": "bit-exact, bit-identical",
    r"(go|goes|going|went|gone) on": "continue, resume",
    r"(is|are) not done( here)?|nothing computes|(is|are) not computed": "not supported",
    r"in the mean": "on average",
    r"likewise": "the same for",
    r"whole numbers?": "integer",
    r"wants?": "expects, requires",
    r"(is|are) to (be|hold|have|say)": "must",
    r"cannot be had": "is not available",
    r"exclude each other": "are mutually exclusive",
    r"by then": "until that step",
    r"in vain": "without effect",
    r"(good|bad) answers?": "chosen, rejected",
    r"do(es)? without|go(es)? without": "does not need, skips",
    r"(is|was|were) begun (with|in|by)": "was started",
    r"otherwise than": "differently from",
    r"thought to be": "assumed",
    r"heed(s|ed)?|insists?": "respect, require",
}
_OLD = re.compile(rf"(?<![\w</.-])({'|'.join(INSTEAD)})(?![\w-])", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


class Found(NamedTuple):
    """An old word, where it is, and what to write in its place."""

    path: Path
    line: int
    word: str
    instead: str


def _search(path: Path, line: int, text: str) -> Iterator[Found]:
    for match in _OLD.finditer(" ".join(text.split())):
        word = match[0]
        instead = next(new for old, new in INSTEAD.items() if re.fullmatch(old, word, re.I))
        yield Found(path, line, word, instead)


def in_python(path: Path) -> Iterator[Found]:
    """Old words in the strings and docstrings of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from _search(path, node.lineno, _CODE.sub(" ", node.value))


def in_document(path: Path) -> Iterator[Found]:
    """Old words in a document's prose: fenced and quoted code is left out."""
    text = path.read_text(encoding="utf-8")
    prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        yield from _search(path, number, line)


def in_project(folders: Sequence[str] = ()) -> list[Found]:
    """Old words in everything that users read, or in some folders and files of it."""
    found: list[Found] = []
    for name in folders or (*DOCUMENTS, *SOURCES):
        top = ROOT / name
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for path in files:
            if path.suffix == ".py":
                found += in_python(path)
            elif path.suffix == ".md":
                found += in_document(path)
    return found


if __name__ == "__main__":
    for old in in_project(sys.argv[1:]):
        print(f"{old.path.relative_to(ROOT)}:{old.line}: {old.word!r}: {old.instead}")
