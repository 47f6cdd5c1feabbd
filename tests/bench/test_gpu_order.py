"""What the order of attention's workgroups is estimated to bring."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_order

    monkeypatch.setattr(gpu_order, "SPREAD", 0.0)
    return gpu_order


def test_cores_with_equal_workgroups_are_always_at_work(order: ModuleType) -> None:
    assert order.busy_share([5] * 24, cores=4, resident=2) == pytest.approx(1.0)
    assert order.busy_share([5] * 24, cores=4, resident=1) == pytest.approx(1.0)


def test_what_begins_last_is_waited_for(order: ModuleType) -> None:
    # Two cores: 1, 1, 4 leaves one idle for the last three turns; 4, 1, 1 none for the first two.
    assert order.busy_share([1, 1, 4], cores=2, resident=1) == pytest.approx(6 / 10)
    assert order.busy_share([4, 1, 1], cores=2, resident=1) == pytest.approx(6 / 8)


def test_a_core_divides_itself_between_its_workgroups(order: ModuleType) -> None:
    # One core with two of them: 1 ends after 2, then 3 has it alone.
    assert order._time([1.0, 3.0], 1, 2) == pytest.approx(4.0)
    assert order._time([1.0, 3.0, 1.0], 1, 2) == pytest.approx(5.0)


def test_both_orders_have_the_same_walks(order: ModuleType) -> None:
    for kernel in order.KERNELS:
        for each_head in (False, True):
            before, now = (
                order.walks(kernel, 1000, each_head=each_head, in_order=in_order)
                for in_order in (False, True)
            )
            assert sorted(before) == sorted(now)
            assert now == sorted(now, reverse=True)
            assert sum(now) == order.HEADS * 16 * 17 // 2
    # Heads that share keys are walked by one workgroup.
    assert len(order.walks("dkdv", 1000, each_head=False, in_order=True)) == order.KV_HEADS * 16


def test_the_model_explains_what_the_card_gave(
    order: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "SPREAD", 0.02)
    compiled = json.loads((order.RESULTS / "ptxas-sm90.json").read_text("utf-8"))["kernels"]
    timed = json.loads((order.RESULTS / "nvidia-h100-before.json").read_text("utf-8"))
    rows = {row["key"].split(":")[0]: row for row in timed["attention"]["attention-dawn"]
            if "attention_kind tiled" in row["key"]}  # fmt: skip
    for head_dim in (64, 128):
        full = [
            [figures[2] for figures in order.expected(rows[f"head_dim {head_dim}, seq {seq}"],
                                                      compiled, 132)]
            for seq in (2048, 8192)
        ]  # fmt: skip
        assert full[0] == pytest.approx(full[1], rel=0.04)
    monkeypatch.setattr(sys, "argv", ["gpu_order.py"])
    assert order.main() == 0
    assert "128   8192  dkdv" in capsys.readouterr().out


def test_what_was_not_compiled_is_an_error(order: ModuleType) -> None:
    with pytest.raises(LookupError, match="heads of 96"):
        order.resident_workgroups("dq", 96, [])
