"""How long is waited for workers, and what is said meanwhile, with a clock that is set by hand."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.cluster.workers import _SLOW, Watchdog
from qlora_wgpu.errors import ClusterError


def waiting(waited, *, seconds=60.0, ready=(), opening=(), reason=""):
    """A patience that waited so long, and what it says."""
    told = []
    named = [[SimpleNamespace(name=name) for name in names] for names in (ready, opening)]
    members = SimpleNamespace(
        ready=named[0], opening=named[1], last_reason=reason,
        is_empty=not ready and not opening,
    )  # fmt: skip
    progress = SimpleNamespace(seconds_without=waited)
    return Watchdog(seconds, progress, members, told.append), told, progress


def test_who_is_missing_is_told_once_and_not_at_once():
    patience, told, progress = waiting(2.9)
    patience.check("nothing")
    assert not told
    progress.seconds_without = 3.1
    patience.check("nothing")
    patience.check("nothing")
    text = "no worker is connected: waiting for one for at most 60 seconds (cluster.patience)"
    assert told == [text]


@pytest.mark.parametrize(("ready", "opening", "count", "told"), [
    ("a", "", 2, "1 of 2 workers are ready"), ("a", "b", 2, ""), ("ab", "", 2, ""),
    ("", "b", 2, ""),
])  # fmt: skip
def test_who_opens_the_model_is_not_missing(ready, opening, count, told):
    patience, said, _ = waiting(9.0, ready=ready, opening=opening)
    patience.check("nothing", count=count)
    assert told in "".join(said) and bool(said) == bool(told)


@pytest.mark.parametrize(("opening", "seconds", "most"), [
    ("", 60.0, 60.0), ("", 5000.0, 5000.0), ("b", 60.0, _SLOW), ("b", 5000.0, 5000.0),
])  # fmt: skip
def test_the_end_comes_later_where_a_model_is_being_opened(opening, seconds, most):
    how = {"seconds": seconds, "ready": "a", "opening": opening, "reason": "c was refused"}
    waiting(most, **how)[0].check("no result")
    with pytest.raises(ClusterError) as told:
        waiting(most + 1, **how)[0].check("no result")
    text = f"no result for {most + 1:.0f} seconds (cluster.patience); c was refused"
    assert str(told.value) == text + "; still opening the model: b" * bool(opening)


@pytest.mark.parametrize(("ready", "most"), [("a", _SLOW), ("", 60.0)])
def test_workers_that_sample_completions_have_more_time(ready, most):
    waiting(most, ready=ready)[0].check("nothing", is_slow=True)
    with pytest.raises(ClusterError, match=f"nothing for {most + 1:.0f} seconds"):
        waiting(most + 1, ready=ready)[0].check("nothing", is_slow=True)
