"""What a page needs of a device, by hand."""

from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.web.variant import Needs


def plan(slots, *launches):
    """Launches of the numbers of their buffers, below zero those of slots, and of parameters."""
    return {"slots": slots, "launches": [
        ["shader", 0, [["name", number, 0, 0] for number in numbers], parameters]
        for numbers, parameters in launches
    ]}  # fmt: skip


def test_plans_share_slots_and_buffers_and_each_has_its_own_parameters():
    needs, sizes = Needs(), [100, 1000, 10_000, 100_000]
    needs.add(plan([64, 256], ((0, -1), [1]), ((0, 1), [2]), ((1,), [])))
    assert needs.slots == [256, 64]
    assert needs.nbytes(sizes, ()) == 100 + 1000 + 256 + 64 + 2 * ALIGNMENT
    needs.add(plan([128, 6, 100], ((1, 2), [])))
    assert needs.slots == [256, 100, 6]
    with_both = 100 + 1000 + 10_000 + 256 + 100 + 16 + 3 * ALIGNMENT
    assert needs.nbytes(sizes, ()) == needs.nbytes(sizes, (1, 2)) == with_both
    assert needs.nbytes(sizes, (3,)) == with_both + 100_000
