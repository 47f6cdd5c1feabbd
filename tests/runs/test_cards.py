"""``estimate --cards``: what has room on cards of several sizes."""

from dataclasses import replace

import pytest
from references.sized import traced_configs, with_head_dim

from qlora_wgpu import runs
from qlora_wgpu.cli.estimate import _plan_in_json, cards_table
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import Search, fit_to_budget
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs import estimation as planned
from qlora_wgpu.runs.estimation import LENGTHS, OffloadedRows
from qlora_wgpu.runs.workload import DeviceSpec, totals


@pytest.fixture(scope="module")
def workload():
    return runs.estimate("S", seq=256).workload


@pytest.mark.full
def test_each_card_is_used_to_its_last_row(workload, monkeypatch):
    monkeypatch.setattr(planned, "GIB", MIB)
    monkeypatch.setattr(planned, "room_of", lambda nbytes: nbytes)
    monkeypatch.setattr(planned, "SIZES", (2, 13, 16, 20, 30))
    plans = tuple(planned.plans_for_cards(workload))
    layout = workload.layout(DeviceSpec())
    row = replace(workload.step, batch=1, checkpointing=True)
    total = totals(layout, row)

    def fits(seq, room):
        try:
            return fit_to_budget(layout, replace(row, seq=seq), room).total <= room
        except OutOfMemoryError:
            return False

    assert [plan.gib for plan in plans] == [2, 13, 16, 20]  # which has room for everything
    assert plans[0].fitted is None and plans[0].longest_seq == 0
    assert _plan_in_json(plans[0])["fits"] is False
    for plan in plans[1:]:
        assert plan.fitted is not None and plan.fitted.total <= plan.room
        assert plan.longest_seq >= plan.resident_seq
    some = plans[1]
    assert fits(some.longest_seq, some.room) and not fits(2 * some.longest_seq, some.room)
    some = plans[2]
    longer = next(length for length in LENGTHS if length > some.resident_seq)
    assert (total(seq=some.resident_seq) or 0) <= some.room
    assert (total(seq=longer) or 0) > some.room
    downs = [plan.slow_down for plan in plans[1:]]
    assert downs == sorted(downs, reverse=True) and downs[0] > 1 and downs[-1] == 1
    shown = [str(cell) for column in cards_table(plans, 1, 256).columns for cell in column.cells]
    assert {"does not fit", "nothing", "same as the last", "1.00x"} <= set(shown)
    assert any("offloaded" in cell for cell in shown)


@pytest.mark.slow
@pytest.mark.cover(family=["qwen3_moe"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"num_hidden_layers": 9, "vocab_size": 20_000}),
        ("gemma3_text", {"vocab_size": 50_000}),
        ("qwen3_moe", {"intermediate_size": 1000, "num_hidden_layers": 2}),
    ],
)
def test_the_longest_row_is_the_one_that_has_room_in_some_way(family, sizes, monkeypatch):
    """Told as if all lengths were tried in all ways, whatever was tried before."""
    lengths = (64, 320, 768)
    monkeypatch.setattr(planned, "LENGTHS", lengths)
    config = with_head_dim(traced_configs()[family], 24) | sizes | {"max_position_embeddings": 4096}
    base = runs.estimate("S", seq=64).workload
    layout = replace(base, pretrained=Pretrained.from_config(config)).layout(DeviceSpec())
    row = replace(base.step, batch=1, checkpointing=True)
    offloaded = OffloadedRows(layout, row)
    least = [Search(layout, replace(row, seq=n)).least().total for n in lengths]
    assert least == sorted(least)  # so the shorter ones have room, too
    for room in (least[2], least[2] - 1, (least[0] + least[1]) // 2, least[0] - 1, least[1]):
        fitting = [n for n, total in zip(lengths, least, strict=True) if total <= room]
        assert offloaded.longest(room, 0) == max(fitting, default=0)


@pytest.mark.slow
def test_cards_are_planned_where_they_are_asked_for():
    assert runs.estimate("S", seq=256).cards == ()
    (plan,) = runs.estimate("S", seq=256, cards=True).cards
    assert plan.gib == 4 and plan.slow_down == 1 and not plan.fitted.moved
