"""What is wrong with a YAML text in words of those who write one, and where."""

from __future__ import annotations

import yaml

_BRACKETS = {"mapping": "{", "sequence": "["}
# PyYAML points behind what was begun and has no end; its context is where that begins.
_BEGUN = ("expected ',' or", "unexpected end of stream", "expected ':'")


def place_of(err: yaml.MarkedYAMLError) -> str:
    """`` (line 3, column 1)``, or nothing where it is not known."""
    problem = str(err.problem)
    mark = err.problem_mark or err.context_mark
    if err.context_mark and any(begun in problem for begun in _BEGUN):
        mark = err.context_mark
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""


def explain(err: yaml.MarkedYAMLError) -> str:
    """The reason, and what to do."""
    problem, context = str(err.problem or "it cannot be read"), str(err.context or "")
    if "'\\t'" in problem:
        return "a tab stands where spaces are needed: indent with spaces"
    if "escape" in problem:  # "C:\Users": eight digits are missing
        return (
            "in double quotes a backslash begins a sign such as \\n: write a path in single "
            "quotes, or with /"
        )
    if "mapping values are not allowed" in problem:
        return "a ': ' stands where a value was expected (check the indentation, or use quotes)"
    if "expected <block end>" in problem:
        return _misplaced(problem.rpartition("found ")[2])
    if "expected ',' or" in problem:
        bracket = _BRACKETS.get(context.rpartition(" ")[2], "bracket")
        return f"the {bracket} is not closed, or there is no comma between two values in it"
    if "unexpected end of stream" in problem:
        return "the quote is not closed"
    if "could not find expected ':'" in problem:
        return "a key has no ': ' behind it"
    if "cannot start any token" in problem:
        return f"a value that begins with {problem.split()[2]} needs quotes"
    if "alias" in context or "anchor" in context:
        return "a value that begins with * or & needs quotes"
    return f"{context}, {problem}" if context else problem


def _misplaced(token: str) -> str:
    if token == "'<block mapping start>'":
        return "its indentation is none of the lines above: keys of a section begin in one column"
    if token == "'-'":
        return "an entry of a list stands among keys: a list needs a key of its own above it"
    if token == "'<scalar>'":
        return "text goes on behind a closing quote: put the whole value in quotes of another kind"
    return f"a {token} stands where a key was expected"
