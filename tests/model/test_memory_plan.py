"""What the machine's memory decides: weights that are kept dequantized, and copies."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.limits import MIB
from qlora_wgpu.model import derived_weights, memory_plan


@pytest.fixture
def machine(monkeypatch):
    def of(total, free):
        for module in (memory_plan, derived_weights):
            monkeypatch.setattr(module, "machine_bytes", lambda: total)
        monkeypatch.setattr(memory_plan, "available_bytes", lambda: free)

    return of


@pytest.mark.parametrize(
    ("total", "free", "room"),
    [(300, 100, True), (299, 100, False), (300, 99, False), (300, None, True), (None, 100, False)],
)
def test_a_third_of_the_machine_is_room_if_it_is_free(machine, total, free, room):
    machine(total, free)
    assert memory_plan.has_room(100) == room


@pytest.mark.cover("all")
@pytest.mark.parametrize(
    ("keep", "is_cpu", "budget", "nbytes", "kept"),
    [
        (True, False, 5, 10**9, True),
        (False, True, None, 50, False),
        ("auto", True, None, 50, True),
        ("auto", True, None, 90, True),
        ("auto", True, None, 91, False),
        ("auto", True, None, 0, False),
        ("auto", True, 10**9, 50, False),
        ("auto", False, None, 50, False),
    ],
)
def test_weights_are_kept_where_asked_or_where_there_is_room(
    machine, monkeypatch, keep, is_cpu, budget, nbytes, kept
):
    machine(300, 100)
    plan = SimpleNamespace(dequantized_bytes=nbytes)
    monkeypatch.setattr(memory_plan, "with_kept", lambda plan: "kept")
    made = memory_plan.laid_out_for(plan, keep, is_cpu=is_cpu, budget=budget, more=10)
    assert made == ("kept" if kept else plan)


def plan_of(nbytes, made=0, *, textures=True, fits=True):
    sizes = SimpleNamespace(nbytes=nbytes, fits=fits)
    return SimpleNamespace(
        profile=SimpleNamespace(textures=textures), packed_sizes=sizes,
        packed_weights=SimpleNamespace(nbytes=made),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "budget", "copied"),
    [
        (plan_of(3 * MIB), None, True),
        (plan_of(5 * MIB, 2 * MIB), None, True),  # some are there already
        (plan_of(3 * MIB), 10**12, False),
        (plan_of(3 * MIB, textures=False), None, False),
        (plan_of(3 * MIB, fits=False), None, False),
        (plan_of(0), None, False),
    ],
)
def test_copies_are_made_where_they_may_be(machine, plan, budget, copied):
    machine(10**9, 3 * MIB)
    assert memory_plan.are_copied(plan, budget) == copied
    assert memory_plan.copied_bytes(plan, budget) == copied * plan.packed_sizes.nbytes
    machine(10**9, None)
    assert memory_plan.are_copied(plan, budget) == copied


def test_copies_that_do_not_fit_are_a_sentence(machine):
    machine(10**9, 3 * MIB - 1)
    with pytest.raises(OutOfMemoryError, match=r"needs 3 MiB of memory .* only 3 MiB are free"):
        memory_plan.are_copied(plan_of(4 * MIB, MIB), None)


@pytest.mark.parametrize(
    ("total", "head", "weights", "expected"),
    [
        (3 * 2100, 100, 1000, (True, 2100, True)),
        (3 * 2100 - 1, 100, 1000, (False, 725, True)),
        (3 * 725, 100, 1000, (False, 725, True)),
        (3 * 724, 100, 1000, (False, 725, False)),
        (None, 0, 1000, (False, 625, False)),
        (10**12, 0, 2 << 30, (True, 4 << 30, True)),
        (10**12, 0, (2 << 30) + 8, (False, 5 * ((2 << 30) + 8) // 8, True)),
    ],
)
def test_copies_are_dequantized_where_a_third_of_the_machine_holds_them(
    machine, total, head, weights, expected
):
    machine(total, None)
    made = derived_weights.packed_sizes(head, weights, 2)
    assert (made.dense, made.nbytes, made.fits) == expected
