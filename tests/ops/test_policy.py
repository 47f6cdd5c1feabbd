"""GRPO's loss and its kin over completions, and what TRL logs of them."""

import pytest
from support.harness import PROFILES, assert_checked

from qlora_wgpu.ops.policy import LOSSES, Policy, means
from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.loss import check_entropies
from qlora_wgpu.selfcheck.cases.policy import check_policy


@pytest.mark.parametrize("arguments", arguments_of(check_policy))
@pytest.mark.parametrize("profile", PROFILES)
def test_each_loss(device, profile, arguments):
    assert_checked(device, profile, "float32", check_policy, *arguments)


@pytest.mark.parametrize("profile", PROFILES)
def test_entropies_of_label_rows(device, profile):
    assert_checked(device, profile, "float32", check_entropies, 5.0)


def test_the_checks_have_every_loss():
    assert {name for name, *_ in arguments_of(check_policy)} == set(LOSSES)


SUMS = {
    "batches": 4.0, "kl": 2.0, "entropy": 8.0, "clipped": 1.0, "clipped_low": 3.0,
    "clipped_high": 0.5, "clipping": 2.0, "least_clipped_low": 0.25, "most_clipped_high": 1.5,
}  # fmt: skip
CLIPS = {
    "clip_ratio/low_mean": 0.75, "clip_ratio/high_mean": 0.125, "clip_ratio/region_mean": 0.25,
}  # fmt: skip
ENDS = {"clip_ratio/low_min": 0.125, "clip_ratio/high_max": 0.75}


@pytest.mark.parametrize(
    ("policy", "changes", "expected"),
    [
        (Policy("grpo", 0.1), {}, {"kl": 0.5, "entropy": 2.0, **CLIPS, **ENDS}),
        (Policy("grpo"), {}, {"entropy": 2.0, **CLIPS, **ENDS}),
        (Policy("rloo", 0.1), {}, {"entropy": 2.0, **CLIPS, **ENDS}),
        (Policy("grpo"), {"clipping": 0.0}, {"entropy": 2.0, **CLIPS}),
        (Policy("cispo"), {}, {"entropy": 2.0, "cispo_clip_ratio": 0.125}),
        (Policy("sapo"), {}, {"entropy": 2.0}),
        (Policy("sapo"), {"batches": 0.0}, {"entropy": 8.0}),
    ],
)
def test_metrics_are_means_over_micro_batches(policy, changes, expected):
    assert means(SUMS | changes, policy) == expected
