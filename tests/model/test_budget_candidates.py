"""What a run is estimate to take beside a step, from how far ways of the kind were off."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from qlora_wgpu.model.budget import Candidate, Overhead, Search
from qlora_wgpu.model.offload_plan import OffloadPlan

PLAIN = SimpleNamespace(layout="plain", offload="plain", options="step", total=1000)


class Options(NamedTuple):
    checkpointing: bool


def fit_of(total):
    return SimpleNamespace(layout="layout", offload=OffloadPlan(), options="step", total=total)


def way_of(total=0, seconds=0.0, **offload):
    return Candidate(OffloadPlan(**offload), "step", seconds, total)


@pytest.mark.parametrize(("noted", "alike", "other"), [
    ({"kept_layers": 3}, {"kept_layers": 5}, {"kept_layers": 0}),
    ({"kept_layers": 0}, {"streamed_layers": 4}, {"kept_layers": 1}),
    ({"kept_layers": 1}, {"kept_layers": 2, "streamed_layers": 1}, {"streamed_head": True}),
])  # fmt: skip
def test_what_is_known_of_a_way_is_known_of_its_kind(noted, alike, other):
    """Ways that keep layers are of one kind, however many; those that keep none are not."""
    more = Overhead(lambda layout, options: 7 if layout == "plain" else 40, PLAIN)
    more.note(way_of(2000, **noted), fit_of(2100))
    assert more.estimate(way_of(500, **alike)) == 640 and more.estimate(way_of(500, **other)) == 507


def test_the_most_that_ways_of_a_kind_were_off_counts():
    more = Overhead(None, PLAIN)
    for off in (5, 30, 20):
        more.note(way_of(2000), fit_of(2000 + off))
    assert more.estimate(way_of(500)) == 530 and more.taken(PLAIN) == 1000


def test_cheaper_ways_come_first_and_of_equals_the_smaller():
    ways = [way_of(9, 1.0), way_of(5, 2.0), way_of(8, 1.0)]
    assert min(ways, key=lambda way: way.cost) is ways[2]


@pytest.fixture
def search(monkeypatch):
    """Of six layers, which take 100 bytes if they are recomputed, and 150 if they are kept."""
    found = Search.__new__(Search)
    found._layout = SimpleNamespace(num_layers=6)
    found._options, again = Options(checkpointing=False), Options(checkpointing=True)

    def traced(offload, options):
        kept = options is found._options
        return Candidate(offload, options, 4.0 if kept else 10.0, 150 if kept else 100)

    monkeypatch.setattr(found, "_traced", traced)
    return found, again


@pytest.mark.parametrize(("budget", "beside", "kept"), [
    (99, 0, 0), (100, 0, 1), (109, 0, 1), (110, 0, 2), (125, 0, 3), (140, 0, 5), (10**6, 0, 5),
    (125, 7, 2), (106, 7, 0),
])  # fmt: skip
def test_as_many_layers_are_estimated_to_be_kept_as_have_room(search, budget, beside, kept):
    """The first takes nothing, each further one a fifth of what all of them take more."""
    found, again = search
    more, way = Overhead(lambda *given: beside, PLAIN), Candidate(OffloadPlan(), again, 10.0, 100)
    got = found._keeping(way, (OffloadPlan(), again), budget, more)
    assert got.offload.kept_layers == kept
    assert got.total == 100 + 10 * max(kept - 1, 0) and got.seconds == 10.0 - kept


@pytest.mark.parametrize(
    "offload", [OffloadPlan(layers_per_segment=2), OffloadPlan(offload_layer_inputs=True)]
)
def test_layers_are_kept_where_they_would_be_recomputed_one_by_one(search, offload):
    found, again = search
    way = Candidate(offload, again, 10.0, 100)
    assert found._keeping(way, (offload, again), 10**6, Overhead(None, PLAIN)) is way
    kept = Candidate(OffloadPlan(), found._options, 4.0, 150)
    assert (
        found._keeping(kept, (OffloadPlan(), found._options), 10**6, Overhead(None, PLAIN)) is kept
    )
