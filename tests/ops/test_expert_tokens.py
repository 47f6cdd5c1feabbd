"""New tokens meet their experts alone, with the same bits beside any others."""

import pytest
from support.harness import PROFILES, VARIANTS, Bench

from qlora_wgpu.selfcheck.cases.common import arguments_of
from qlora_wgpu.selfcheck.cases.experts import check_experts_of_new_tokens


@pytest.mark.parametrize("arguments", arguments_of(check_experts_of_new_tokens))
@pytest.mark.parametrize(("profile", "dtype"), VARIANTS)
def test_as_the_reference(device, profile, dtype, arguments):
    bench = Bench(device, dtype, PROFILES[profile])
    check_experts_of_new_tokens(bench, *arguments)
    assert bench.excess <= 1.0
    assert not any(shader.startswith("dequantize") for shader in bench.shaders)
