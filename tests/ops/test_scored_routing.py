import numpy as np
import pytest
from support.harness import PROFILES, Bench, assert_formula

from qlora_wgpu.ops.routing import MOST_GROUPS, Scoring, route, route_by_scores
from qlora_wgpu.reference import experts as reference
from qlora_wgpu.selfcheck.cases import experts as cases
from qlora_wgpu.selfcheck.cases.common import Exact


def test_a_sum_at_its_least_does_not_grow():
    """In rows of the check whose chosen experts' shares are below the least, not in others."""
    logits = cases._logits_scores()
    scores = reference.scores_of(logits, sigmoids=False)
    below = np.sort(scores, axis=1)[:, -3:].sum(1) < 0.7
    assert 5 < below.sum() < len(logits) - 5


@pytest.mark.quick("values")
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("scale", [0.0, 0.22])
def test_weights_of_logits_are_scaled(device, normalized, scale):
    def op(g, logits):
        return route(g, logits, 3, normalized=normalized, scale=scale).weights

    def formula(logits):
        return scale * reference.route(logits, 3, normalized=normalized)[1]

    bench = Bench(device, "float32", PROFILES["cpu"])
    assert_formula(bench, op, formula, [Exact(cases._logits_scores())], exact=True)


@pytest.mark.parametrize("profile", PROFILES)
def test_experts_that_tie_in_a_closed_group(device, profile):
    """A closed group's experts are not chosen, however low those of open ones are."""
    scoring = Scoring(True, True, pairs=True, groups=2, top_groups=1)
    logits = np.array([[5.0, -9.0, -9.5, 1.0, 1.0, 1.0]])
    bias = np.array([0.0, -3.0, -4.0, -5.0, -5.0, -5.0])
    bench = Bench(device, "float32", PROFILES[profile])
    routing = route_by_scores(bench.graph, bench.given(logits), bench.given(bias), 3, scoring)
    (slots,) = bench.run(routing.slots)
    assert list(slots.ravel()) == [0, 64, 128]


@pytest.mark.parametrize(
    ("groups", "experts", "top_k", "fits"),
    [
        ({}, 8, 8, True),
        ({}, 8, 9, False),
        ({}, 8, 0, False),
        ({"pairs": True}, 1, 1, True),  # one group needs no ranks
        ({"pairs": True, "groups": 4}, 4, 1, False),  # a group has no two experts
        ({"pairs": True, "groups": 4}, 8, 2, True),
        ({"groups": 4}, 4, 1, True),
        ({"groups": 4}, 6, 1, False),
        ({"groups": 4, "top_groups": 2}, 8, 4, True),
        ({"groups": 4, "top_groups": 2}, 8, 5, False),
        ({"groups": 4, "top_groups": 4}, 8, 8, True),
        ({"groups": 4, "top_groups": 5}, 8, 1, False),
        ({"groups": 4, "top_groups": 0}, 8, 1, False),
        ({"groups": MOST_GROUPS}, MOST_GROUPS, 1, True),
        ({"groups": 2 * MOST_GROUPS}, 2 * MOST_GROUPS, 1, False),
    ],
)
def test_groups_that_experts_can_be_chosen_from(groups, experts, top_k, fits):
    assert Scoring(True, True, **groups).fits(experts, top_k) == fits
