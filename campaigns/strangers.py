"""What strangers' files are made of, and how they are tried.

A file is read, or refused in one short sentence, soon and in little memory.
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import currently_in_test_context, event
from hypothesis import strategies as st

from campaigns.watched import HARD, MEMORY, SECONDS, computed, memory_of, peak_of_children
from qlora_wgpu.errors import QLoRAError

T = TypeVar("T")


class Content(bytes):
    """A file's bytes, of which a failure shows the first alone."""

    def __repr__(self) -> str:
        return repr(self[:300]) + f" ({len(self):,} bytes)" * (len(self) > 300)


def attempt(body: Callable[[], T], longest: int = 1000) -> T | QLoRAError:
    """What a trial gives, or the error with which it is refused.

    Args:
        body: The trial.
        longest: Characters that a refusal may have.

    Raises:
        AssertionError: If it takes too long or too much memory, or the refusal is too long.
        Exception: Whatever else the trial raises.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    held, size, begin = (*(memory_of("self", key) for key in ("VmRSS", "VmSize")), computed())
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + HARD, hard))
    result: T | QLoRAError
    try:
        result = body()
    except QLoRAError as err:
        assert len(str(err)) < longest and "\n" not in str(err).strip(), str(err)[:5000]
        result = err
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if currently_in_test_context():
        is_refused = isinstance(result, QLoRAError)
        event(f"refused: {type(result).__name__}" if is_refused else "read")
    seconds = computed() - begin
    taken = memory_of("self", "VmHWM") - held + peak_of_children()
    assert seconds < SECONDS, f"{seconds:.1f} s"
    assert taken < MEMORY, f"{taken >> 20} MiB"
    return result


@st.composite
def damaged(
    draw: st.DrawFn, content: bytes, pieces: Sequence[bytes] = (), end: int | None = None
) -> Content:
    """A file with one to three places cut out, put in, doubled or written over.

    Args:
        draw: Hypothesis's.
        content: The sound file.
        pieces: What is put in, beside bytes of any kind.
        end: Where the part that is changed ends; at the file's end if None.
    """
    raw = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(len(raw), end or len(raw))))
        kind = draw(st.sampled_from(("bit", "piece", "bytes", "twice", "cut")))
        if kind == "bit" and at < len(raw):
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "piece" and pieces:
            piece = draw(st.sampled_from(pieces))
            raw[at : at + draw(st.sampled_from((0, 1, len(piece))))] = piece
        elif kind == "bytes":
            raw[at : at + draw(st.sampled_from((0, 1, 4, 8, 100)))] = draw(st.binary(max_size=40))
        elif kind == "twice":
            raw[at:at] = raw[at : at + draw(st.integers(1, 64))]
        elif draw(st.booleans()):
            del raw[at:]
    return Content(raw)


@st.composite
def changed(
    draw: st.DrawFn, value: Any, values: st.SearchStrategy[Any], keys: Sequence[str] = ("x",)
) -> Any:
    """JSON with one to four values gone or replaced by others, or keys added to its object."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 4)))):
        everywhere, new = _places(value), copy.deepcopy(draw(values))
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add")))
        if kind == "add" or not everywhere:
            value[draw(st.sampled_from(keys))] = new
            continue
        container, key = everywhere[draw(st.integers(0, len(everywhere) - 1))]
        if kind == "remove":
            del container[key]
        else:
            container[key] = new
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in it with a key or an index, of long ones the first few."""
    if isinstance(value, dict):
        own = [(value, key) for key in value]
    elif isinstance(value, list):
        own = [(value, i) for i in range(min(len(value), 40))]
    else:
        return []
    return own + [place for container, key in own for place in _places(container[key])]
