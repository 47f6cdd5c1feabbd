"""GRPO's loss and its kin over completions, and what TRL logs of them."""

import pytest
from support.harness import PROFILES, assert_checked

from qlora_wgpu.ops.policy import LOSSES
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
