"""What is placed where, and what is refused, told from sizes alone."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.limits import MIB
from qlora_wgpu.runs import placement
from qlora_wgpu.runs.placement import (
    Placement,
    beyond_a_binding,
    beyond_a_texture,
    check_binding_limits,
    check_host_memory,
    kept_dequantized,
    limit_of,
    of_other_lengths,
)
from qlora_wgpu.runs.workload import RolloutShape, TrainingWorkload


def test_a_budget_counts_before_what_the_driver_reports(monkeypatch):
    monkeypatch.setattr(placement, "room", lambda device: 7)
    assert limit_of(SimpleNamespace(budget=None)) == 7
    assert limit_of(SimpleNamespace(budget=0)) == 0


def test_programs_of_other_lengths_have_inputs_of_their_own():
    memory = Counter(uniforms=1, inputs=10, tables=100, base=1000)
    assert of_other_lengths(memory) == 8 * 111


# ---- completions at once -------------------------------------------------------------------------


class Training(TrainingWorkload):
    """A workload of completions whose cache is that of one."""

    def __new__(cls, rollouts):
        return object.__new__(cls)

    def __init__(self, rollouts):
        self.__dict__["rollouts"] = rollouts

    def layout(self, device):
        return "layout"

    def rollout_plans(self, layout):
        assert self.rollouts.count == 1
        return "plans"


@pytest.mark.parametrize(
    ("limit", "count", "fitting"),
    [(None, 64, 64), (4000, 40, 40), (3999, 40, 20), (3600, 64, 32), (900, 9, 9), (899, 9, 5),
     (100, 64, 1), (1, 1, 1)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_caches_of_completions_take_a_quarter_of_the_memory(monkeypatch, limit, count, fitting):
    monkeypatch.setattr(placement, "limit_of", lambda device: limit)
    monkeypatch.setattr(placement, "reading_memory", lambda plans: {"kv cache": 25})
    monkeypatch.setattr(placement, "replace", replaced)
    workload = Training(RolloutShape((9,), 32, count, 1))
    assert placement.with_fitting_rollouts(workload, None).rollouts.count == fitting
    none = Training(None)
    assert placement.with_fitting_rollouts(none, None) is none


def replaced(given, **changes):
    if isinstance(given, Training):
        return Training(changes["rollouts"])
    return dataclasses.replace(given, **changes)


# ---- dequantized weights -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "taken", "limit", "is_cpu", "streamed", "room", "kept"),
    [
        (False, 10, None, False, 0, True, False),
        (True, 10, None, False, 0, False, True),
        (True, 10, 10, False, 0, True, True),
        (True, 11, 10, False, 0, True, "refused"),
        (True, None, None, False, 0, True, "refused"),
        (True, 10, 10, False, 3, True, "refused"),
        ("auto", 10, 10, False, 0, False, True),
        ("auto", 11, 10, False, 0, True, False),
        ("auto", 10, None, True, 0, True, True),
        ("auto", 10, None, True, 0, False, False),
        ("auto", None, None, False, 0, True, False),
        ("auto", 10, None, False, 3, True, False),
    ],
)
@pytest.mark.cover("all")
def test_dequantized_weights_are_kept_where_all_fits(
    monkeypatch, keep, taken, limit, is_cpu, streamed, room, kept
):
    def layout_of(dequantized, nbytes=5):
        offload = SimpleNamespace(dequantized=dequantized, streamed_layers=streamed)
        return SimpleNamespace(offload=offload, dequantized_bytes=nbytes)

    asked = []
    monkeypatch.setattr(placement, "with_kept", lambda layout, kept=True: layout_of(kept))
    monkeypatch.setattr(placement, "has_room", lambda total: asked.append(total) or room)
    for before in (False, True):
        how = {"limit": limit, "is_cpu": is_cpu}
        if kept == "refused":
            with pytest.raises(OutOfMemoryError, match="keep_dequantized does not fit"):
                kept_dequantized(layout_of(before), keep, lambda layout: taken, **how)
            continue
        found = kept_dequantized(layout_of(before), keep, lambda layout: taken, **how)
        assert found.offload.dequantized == (before if keep is False else kept)
    assert set(asked) <= {10}
    plain = layout_of(False, 0)
    assert kept_dequantized(plain, "auto", None, limit=limit, is_cpu=is_cpu) is plain


# ---- host memory ---------------------------------------------------------------------------------


def placed_of(*, workload=None, on_host=(), problem="", keep=True, mapped=0, device=0):
    layout = SimpleNamespace(
        placement=SimpleNamespace(mapped_bytes=mapped, problem=problem), keep=keep
    )
    return Placement(layout, workload, (), Counter(base=device), Counter(dict(on_host)), "")


@pytest.mark.parametrize(
    ("limit", "taken", "available", "free"),
    [(None, 5, 9, 9), (12, None, 9, 9), (12, 5, 9, 7), (20, 5, 9, 9), (3, 5, 9, 0),
     (12, 5, None, 7), (None, None, None, None)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_free_memory_is_within_the_groups_limit(monkeypatch, limit, taken, available, free):
    monkeypatch.setattr(placement, "container_limit", lambda: limit)
    monkeypatch.setattr(placement, "process_bytes", lambda: taken)
    monkeypatch.setattr(placement, "available_bytes", lambda: available)
    assert placement._free_bytes() == free


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "lower data.max_seq_length or lora.r, or end"),
        ({"on_host": {"rows": 1}}, "raise device.memory, lower"),
        ({"problem": "no disk"}, "no disk"),
        ({"on_host": {"streamed weights": 1}, "keep": False}, "set model.cache to true"),
        ({"on_host": {"streamed weights": 1}}, "raise device.memory, lower"),
        ({"on_host": {"streamed weights": 1}, "problem": "no disk"}, "no disk"),
        ({"keep": False}, "lower data.max_seq_length or lora.r, or end"),
    ],
)
def test_who_has_too_little_is_told_what_helps(given, told):
    assert placement._remedy(placed_of(**given)).startswith(told)


@pytest.mark.parametrize(
    ("is_cpu", "free", "few"),
    [(False, 30, None), (False, 29, 1), (True, 40, None), (True, 39, 1), (True, None, None)],
)
@pytest.mark.cover("all")
def test_host_memory_is_refused_where_it_is_not_there(monkeypatch, is_cpu, free, few):
    needed = Counter(process=100 * MIB, kernels=20 * MIB, work=10 * MIB)
    monkeypatch.setattr(placement, "host_memory", lambda placed: needed)
    monkeypatch.setattr(placement, "_free_bytes", lambda: free and free * MIB)
    told = []
    observer = SimpleNamespace(planned_on_host=lambda *what: told.append(what))
    device = SimpleNamespace(is_cpu=is_cpu, name="card")
    placed = placed_of(device=10 * MIB)
    if few is None:
        check_host_memory(placed, device, observer)
    else:
        included = r" \(10 MiB of them for card\)" if is_cpu else ""
        words = f"of host memory{included}, but only {free} MiB are free, {few} MiB too few"
        with pytest.raises(OutOfMemoryError, match=words):
            check_host_memory(placed, device, observer)
    assert not told


def test_host_memory_is_told_where_it_matters(monkeypatch):
    monkeypatch.setattr(placement, "host_memory", lambda placed: Counter(process=1))
    monkeypatch.setattr(placement, "_free_bytes", lambda: None)
    device, told = SimpleNamespace(is_cpu=False, name="card"), []
    observer = SimpleNamespace(planned_on_host=lambda *what: told.append(what[1]))
    for placed in (
        placed_of(), placed_of(workload=Training(None)), placed_of(on_host={"rows": 1}),
        placed_of(mapped=7),
    ):  # fmt: skip
        check_host_memory(placed, device, observer)
    assert told == [0, 0, 7]


@pytest.mark.parametrize(
    ("changes_base", "rows", "nbytes"),
    [(False, 0, 0 + 10 + 40), (False, 2, 32 + 10 + 40), (True, 2, 20 + 40)],
)
def test_an_adapter_is_in_memory_more_than_once(changes_base, rows, nbytes):
    class Adapter(dict):
        parameters, moments = SimpleNamespace(nbytes=10), SimpleNamespace(nbytes=30)
        config = SimpleNamespace(changes_base=changes_base)
        trained_rows, trained_whole = ["embed"][:rows], ["head"][: rows - 1]

        def __missing__(self, name):
            return SimpleNamespace(size=4)

    assert placement._adapter_bytes(Adapter()) == nbytes
    Adapter.moments = SimpleNamespace(nbytes=0)
    most = 20 + 30 if changes_base else nbytes - 20
    assert placement._adapter_bytes(Adapter()) == most


# ---- bindings and textures -----------------------------------------------------------------------


def storage(nbytes, kind="base", **more):
    made = SimpleNamespace(
        nbytes=nbytes, kind=kind, label=f"{kind} {nbytes}", texture=False, group=None, on_host=None,
    )  # fmt: skip
    made.__dict__.update(more)
    made.whole = made
    return made


def tensor(nbytes, *, texture):
    return SimpleNamespace(nbytes=nbytes, texture=texture, name="hidden", rows=1234)


class Slots(list):
    """Tensors, which may be the same, as a plan has them."""


def plan(storages=(), tensors=()):
    return SimpleNamespace(storages=storages, slot_of=Slots(tensors))


def test_the_largest_buffer_must_fit_into_a_binding():
    plans = [plan([storage(5), storage(9)]), plan([storage(7, "kv cache")])]
    assert beyond_a_binding(plans, 9) is None and beyond_a_binding([], 0) is None
    name, nbytes, advice = beyond_a_binding(plans, 8)
    assert (name, nbytes) == ("base 9", 9) and "a smaller model" in advice
    assert "shorter sequences" in beyond_a_binding(plans[1:], 6)[2]
    apart = [storage(99, texture=True), storage(99, group=1), storage(99, on_host="rows")]
    assert beyond_a_binding([plan(apart)], 8) is None


def test_the_largest_intermediate_must_fit_where_it_is():
    plans = [plan((), [tensor(9, texture=False), tensor(20, texture=True)])]
    assert beyond_a_binding(plans, 9) is None and beyond_a_texture(plans, 20) is None
    assert beyond_a_binding(plans, 8)[:2] == ("hidden of 1,234 rows", 9)
    name, nbytes, advice = beyond_a_texture(plans, 19)
    assert (name, nbytes) == ("hidden of 1,234 rows", 20) and "batch size" in advice


@pytest.mark.parametrize(
    ("adapter", "buffer", "texture", "told"),
    [
        (None, 8, 19, None),
        (("q_proj", 11), 9, 20, "the adapter of q_proj with r 4 needs 11 bytes .*allows 8: lower"),
        (None, 9, 20, "base 9 needs 9 bytes in one piece, but card allows 8"),
        (None, 8, 20, "hidden of 1,234 rows needs 20 bytes in one piece, but card allows 19"),
    ],
)
def test_what_fits_into_no_binding_is_refused(adapter, buffer, texture, told):
    asked = SimpleNamespace(beyond_a_binding=lambda limit: adapter, config=SimpleNamespace(r=4))
    device = SimpleNamespace(max_binding=8, max_texture=19, name="card")
    plans = [plan([storage(buffer)], [tensor(texture, texture=True)])]
    layout = SimpleNamespace(adapter=asked)
    if told is None:
        check_binding_limits(layout, plans, device)
    else:
        with pytest.raises(OutOfMemoryError, match=told):
            check_binding_limits(layout, plans, device)
