"""Where a shader reads its ``params``: all at once, for software GPUs."""

from __future__ import annotations

import re

_DECLARATION = "var<uniform> params: Params;"
_MAIN = re.compile(r"\bfn\s+main\s*\([^{]*\{")


def read_at_once(code: str) -> str:
    """Lets ``main`` begin with reading all of ``params``, of which it then has a copy of its own.

    Mesa's software GPU reads a uniform once for all invocations only as long as none of them can
    have left or waits for others: before the first return, branch and loop. Anywhere else each
    invocation reads by itself, some thirty instructions a word. Lines keep their numbers.
    Compilers that prove uniform control flow refuse such copies (``Backend.proves_uniformity``).
    """
    if _DECLARATION not in code:
        return code
    copied = "var<uniform> given_params: Params; var<private> params: Params;"
    code = code.replace(_DECLARATION, copied)
    return _MAIN.sub(lambda main: f"{main[0]} params = given_params;", code, count=1)
