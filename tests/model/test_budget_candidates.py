"""What a run is estimate to take beside a step, from how far ways of the kind were off."""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.limits import MIB
from qlora_wgpu.model import budget
from qlora_wgpu.model.budget import (
    _REMATERIALIZED,
    IN_BUFFERS,
    Candidate,
    Fit,
    Overhead,
    Search,
    offloaded_in_words,
    planned,
    streaming,
)
from qlora_wgpu.model.offload_plan import RESIDENT, OffloadPlan

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


def test_ways_are_of_one_kind_however_many_layers_they_stream():
    several = way_of(streamed_layers=3, kept_layers=2, streamed_head=True)
    assert several.kind == (OffloadPlan(streamed_head=True, kept_layers=1), "step")
    assert way_of().kind == (OffloadPlan(), "step")


@pytest.mark.parametrize(
    ("layers", "staying", "blocks", "expected"),
    [
        # Two buffers take turns, each as large as the largest of what is streamed.
        ([10, 20, 30], [100, 200, 300], [], [0, 30 - 300, 60 - 500, 60 - 600]),
        ([30, 20, 10], [1, 2, 4], [], [0, 10 - 4, 40 - 6, 60 - 7]),
        ([10, 20, 30], [1, 2, 4], [15], [0, 60 - 15 - 4, 60 - 15 - 6, 60 - 15 - 7]),
        ([10], [1], [40, 40], [0, -1]),
        ([], [], [40], [0]),
    ],
)
def test_what_streams_takes_turns_in_two_buffers(layers, staying, blocks, expected):
    assert streaming(layers, staying, blocks) == expected


# ---- sentences -----------------------------------------------------------------------------------


def fit_in(offload, checkpointing=False, layers=6, host=None, mapped=0, moved=0):
    placement = SimpleNamespace(mapped_bytes=mapped)
    layout = SimpleNamespace(offload=offload, num_layers=layers, placement=placement)
    memory, on_host = Counter(a=3, b=4), Counter(host or {})
    return Fit(layout, Options(checkpointing), memory, on_host, moved, (0, 0))


AGAIN = "recomputed in the backward pass"


@pytest.mark.parametrize(
    ("fit", "words"),
    [
        (fit_in(OffloadPlan()), "nothing is recomputed or offloaded"),
        (fit_in(OffloadPlan(), True), f"layers are {AGAIN}"),
        (fit_in(OffloadPlan(layers_per_segment=3), True), f"layers are {AGAIN}, 3 at a time"),
        (fit_in(OffloadPlan(kept_layers=2), True), f"4 of 6 layers are {AGAIN}"),
        (fit_in(OffloadPlan(kept_layers=5), True), f"1 of 6 layers is {AGAIN}"),
        (fit_in(OffloadPlan(), True, layers=1), f"layers are {AGAIN}"),
        (
            fit_in(OffloadPlan(remakes=True, in_buffers=True), True),
            f"layers are {AGAIN}, and {_REMATERIALIZED}, and {IN_BUFFERS}",
        ),
        (fit_in(OffloadPlan(remakes=True)), _REMATERIALIZED),
        (
            fit_in(OffloadPlan(host_embedding=True), host={"a": MIB, "b": 2 * MIB}, moved=10**10),
            "the input embedding is kept in host memory (3 MiB); 10 GB per step are transferred, "
            "about 2 s at 5 GB/s",
        ),
        (
            fit_in(
                OffloadPlan(host_embedding=True, streamed_layers=2, streamed_head=True), True,
                host={"a": 5 * MIB}, mapped=2 * MIB, moved=10**10,
            ),
            "the input embedding, the weights of 2 of 6 layers and lm_head are kept in host memory "
            "(5 MiB, 2 MiB on disk); 10 GB per step are transferred, about 2 s at 5 GB/s; layers "
            f"are {AGAIN}",
        ),
    ],
)  # fmt: skip
def test_a_way_in_words(fit, words):
    assert fit.in_words() == words
    assert fit.total == 7 and fit.seconds == fit.moved / 5e9


@pytest.mark.parametrize(
    ("offload", "words"),
    [
        ({}, ""),
        ({"streamed_head": True}, "lm_head is kept"),
        ({"host_moments": True}, "the optimizer's moments are kept"),
        ({"streamed_layers": 1}, "the weights of 1 of 4 layers are kept"),
        ({"offload_layer_inputs": True, "streamed_head": True}, "the layers' inputs and lm_head "
         "are kept"),
    ],
)  # fmt: skip
def test_what_waits_in_words(offload, words):
    assert offloaded_in_words(OffloadPlan(**offload), 4) == words


def test_every_measure_saves_memory_but_two():
    for name, value in {"kept_layers": 1, "dequantized": True}.items():
        assert not OffloadPlan(**{name: value}).saves_memory
    for name in ("host_embedding", "host_moments", "streamed_head", "remakes", "in_buffers"):
        assert OffloadPlan(**{name: True}).saves_memory
    assert OffloadPlan.least(9) == OffloadPlan(
        host_embedding=True, offload_layer_inputs=True, layers_per_segment=1, host_moments=True,
        streamed_layers=9, streamed_head=True, remakes=True,
    )  # fmt: skip


def test_a_step_transfers_what_waits_in_each_micro_batch_and_moments_once():
    step = SimpleNamespace(
        plan=SimpleNamespace(host_transfer_bytes=100, flops=7, memory_traffic=8),
        batch=SimpleNamespace(embedded_bytes=10),
    )
    layout = SimpleNamespace(
        offload=OffloadPlan(host_moments=True),
        adapter=SimpleNamespace(moments=SimpleNamespace(nbytes=1000)),
        memory=lambda options, plan: Counter(a=1),
        host_memory=lambda options, plan: Counter(b=2),
        step=lambda options: step,
    )
    found = planned(layout, Options(False), 3)
    assert found.moved == 3 * 110 + 2 * 1000 and found.work == (7, 8)
    assert (found.memory, found.host_memory) == (Counter(a=1), Counter(b=2))
    layout.offload = OffloadPlan()
    assert planned(layout, Options(False), 1, step).moved == 110


# ---- searching -----------------------------------------------------------------------------------

LAYERS = 4


@dataclass(frozen=True)
class Layout:
    """A model of layers of 256 bytes, an embedding, a head and an adapter, which is not built."""

    offload: OffloadPlan = RESIDENT
    tied: bool = False
    remakes: bool = False
    in_textures: bool = False
    embedding_bytes: int = 1024
    updates: bool = True

    num_layers, embedded_row_bytes, moments_passing = LAYERS, 1, 16
    head_options = (False, True)

    @property
    def profile(self):
        return SimpleNamespace(in_textures=self.in_textures, remakes=self.remakes)

    @property
    def adapter(self):
        forms = SimpleNamespace(updates=self.updates)
        return SimpleNamespace(moments=SimpleNamespace(nbytes=512), forms=forms)

    @property
    def placement(self):
        return SimpleNamespace(
            group_bytes=[256] * LAYERS, layer_bytes=[256] * LAYERS, head_block_bytes=[128, 128]
        )

    def changed(self, offload):
        return replace(self, offload=offload)

    def sized(self, options):
        return None


@dataclass(frozen=True)
class Step:
    checkpointing: bool = False
    batch: int = 2
    seq: int = 16


def search_in(monkeypatch, layout=None, options=None, **memory):
    """A search whose steps take what a formula says, as near as estimates are."""
    made = []

    def fit(layout, options, accumulation, step):
        offload = layout.offload
        total = 10_000 + 256 * LAYERS
        if options.checkpointing:
            total -= 2000 - 400 * max(offload.kept_layers - 1, 0) + 10 * offload.layers_per_segment
        total -= 300 * offload.remakes + 500 * offload.offload_layer_inputs
        total -= 900 * offload.streamed_head
        if offload.host_embedding:
            total -= 1024 - 32 - 128
        if offload.host_moments:
            total -= 512 - 16
        count = offload.streamed_layers
        total += streaming(
            [256] * LAYERS, [256] * LAYERS, [128, 128] if offload.streamed_head else []
        )[count]
        moved = accumulation * (
            32 * offload.host_embedding + 512 * count + 4000 * offload.streamed_head
            + 300 * offload.offload_layer_inputs
        ) + 1024 * offload.host_moments  # fmt: skip
        again = (LAYERS - offload.kept_layers) / LAYERS if options.checkpointing else 0
        work = 10**10 * (1 + again) + offload.remakes, 10**9
        made.append((offload, options))
        return Fit(layout, options, Counter(all=total), Counter(), moved, work)

    monkeypatch.setattr(budget, "planned", fit)
    return Search(layout or Layout(), options or Step(), 2), made


def test_bases_recompute_more_and_more(monkeypatch):
    search, _ = search_in(monkeypatch)
    kinds = [
        (base.offload_layer_inputs, options.checkpointing, base.layers_per_segment, base.remakes)
        for base, options in search._bases(streamed=False)
    ]
    again = [(1, False), (1, True), (2, True), (3, True), (4, True)]
    assert kinds == [
        (False, False, 1, False), (False, False, 1, True),
        *((False, True, *each) for each in again), *((True, True, *each) for each in again),
    ]  # fmt: skip
    assert {base.host_embedding for base, _ in search._bases(streamed=True)} == {False}


def test_gpus_make_cheap_outputs_again_by_themselves(monkeypatch):
    search, _ = search_in(monkeypatch, Layout(remakes=True, tied=True, in_textures=True))
    bases = [base for base, options in search._bases(streamed=True) if not options.checkpointing]
    assert bases == [OffloadPlan(True, streamed_head=True, in_buffers=True)]
    search, _ = search_in(monkeypatch, options=Step(checkpointing=True))
    assert len(list(search._bases(streamed=False))) == 10


def test_a_way_costs_its_transfers_and_what_is_computed_again(monkeypatch):
    search, _ = search_in(monkeypatch)
    again = search._traced(OffloadPlan(offload_layer_inputs=True), Step(checkpointing=True))
    assert again.seconds == pytest.approx(600 / 5e9 + 2 * 1e10 / 1e13)
    assert search._traced(OffloadPlan(), Step()).seconds == 0
    assert search._least_seconds(OffloadPlan(), Step()) == 0
    # Inputs that wait only add to it.
    plain = search._traced(OffloadPlan(), Step(checkpointing=True))
    waiting = OffloadPlan(offload_layer_inputs=True)
    assert search._least_seconds(waiting, Step(checkpointing=True)) == plain.seconds
    head = OffloadPlan(streamed_head=True, remakes=True)
    assert search._least_seconds(head, Step(checkpointing=True)) == 2 * 4000 / 5e9


def test_weights_wait_in_all_ways_together(monkeypatch):
    search, _ = search_in(monkeypatch)
    base = Candidate(OffloadPlan(), Step(), 1.0, 10_000)
    ways = list(search._with_weights(base))
    assert [(w[0].offload.host_embedding, w[0].offload.host_moments) for w in ways] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    for several in ways:
        assert [way.offload.streamed_layers for way in several] == list(range(LAYERS + 1))
        first = several[0]
        saved = (1024 - 32 - 128) * first.offload.host_embedding
        saved += (512 - 16) * first.offload.host_moments
        moved = 2 * 32 * first.offload.host_embedding + 1024 * first.offload.host_moments
        changes = streaming([256] * LAYERS, [256] * LAYERS, [])
        for count, way in enumerate(several):
            assert way.total == 10_000 - saved + changes[count]
            assert way.seconds == pytest.approx(1.0 + (moved + 4 * 256 * count) / 5e9, rel=1e-12)
    layout = Layout(embedding_bytes=0, updates=False)
    assert len(list(search_in(monkeypatch, layout)[0]._with_weights(base))) == 1
    head = replace(base, offload=OffloadPlan(host_embedding=True, streamed_head=True))
    (first, *_), *_ = search._with_weights(head)
    assert first.offload.host_embedding


def test_what_fits_or_has_no_limit_is_left_as_it_is(monkeypatch):
    search, made = search_in(monkeypatch)
    assert search.within(None) is search.within(11_024) is search._plain
    assert made == [(OffloadPlan(), Step())]
    assert search.within(11_023) is not search._plain


@pytest.mark.parametrize("beside", [0, 100])
@pytest.mark.parametrize("room", range(6600, 11_000, 1100))
def test_what_is_found_fits_and_costs_as_little_as_any_way(monkeypatch, room, beside):
    search, _ = search_in(monkeypatch)
    besides = (lambda layout, options: beside) if beside else None
    found = search.within(room, besides)
    assert found.total + beside <= room
    for streamed in (False, True):
        for base in search._bases(streamed=streamed):
            for several in search._with_weights(search._traced(*base)):
                for way in several:
                    if way.total + beside <= room:
                        own = search._traced(found.offload, found.options)
                        assert own.seconds <= way.seconds * (1 + 1e-9)


def test_the_least_is_what_a_mistake_names(monkeypatch):
    search, _ = search_in(monkeypatch)
    least = search.least()
    assert least.total == min(
        way.total
        for streamed in (False, True)
        for base in search._bases(streamed=streamed)
        for several in search._with_weights(search._traced(*base))
        for way in several
    )
    assert search.within(least.total).total == least.total
    message = "at least 1 MiB of device memory, 1 MiB more than the 0 MiB available"
    with pytest.raises(OutOfMemoryError, match=message):
        search.within(0)


def test_layers_are_kept_while_there_is_room(monkeypatch):
    search, _ = search_in(monkeypatch)
    again, more = Step(checkpointing=True), Overhead(None, search._plain)
    first = search._planned(OffloadPlan(kept_layers=1), again)
    for room, kept in ((0, 1), (399, 1), (400, 2), (799, 2), (800, 3), (10**6, LAYERS - 1)):
        assert search._grown(first, first.total + room, more).offload.kept_layers == kept
    two = search._planned(OffloadPlan(layers_per_segment=2), again)
    assert search._grown(two, 10**6, more) is two


def test_uniforms_of_what_runs_once_do_not_stay(monkeypatch):
    def plan_of(uniform_bytes):
        return SimpleNamespace(storages=(), streams=(), uniform_bytes=uniform_bytes)

    monkeypatch.setattr(budget, "pool_bytes", lambda plans: 100 * len(plans))
    layout = SimpleNamespace(dequantize_plan=plan_of(7))
    found = budget.reading_memory([plan_of(5), plan_of(3)], layout)
    assert found == {"activations": 300, "uniforms": 8}
