"""How many prompts the completions of GRPO may have at once, which is what is planned for."""

import pytest

from qlora_wgpu.runs.workload import RolloutShape


@pytest.mark.parametrize(
    ("count", "generations", "prompts"),
    [(1, 1, 1), (2, 1, 2), (8, 1, 8), (8, 8, 2), (10, 4, 4), (11, 4, 4), (64, 3, 22)],
)
def test_a_batch_begins_and_ends_within_a_prompt(count, generations, prompts):
    """Completions of one prompt follow one another; the first and last prompt may be cut."""
    assert RolloutShape((9,), 32, count, generations).prompts_at_once == prompts
    order = [i // generations for i in range(count * generations + count)]
    most = max(len({*order[i : i + count]}) for i in range(count * generations))
    assert prompts == most
