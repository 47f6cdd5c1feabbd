"""No kernel counts on workgroup memory that is zero: Dawn is told not to clear it."""

import pytest
from support.workgroup_memory import poisoned

from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.selfcheck import results
from qlora_wgpu.selfcheck.runner import Runner

# All checks are a campaign (campaigns/poisoned_memory.py).
CHECKS = ("rms_norm", "few_rows", "cross_entropy", "only_use")


@pytest.fixture
def filled(device, monkeypatch):
    """A device whose shaders fill their memory; for each that it compiles, whether it has any."""
    dialect, seen = device.backend.dialect, []

    def with_poison(code, subgroup_size=0):
        changed = poisoned(code)
        seen.append(changed != code)
        return dialect(changed, subgroup_size)

    monkeypatch.setattr(device.backend, "dialect", with_poison)
    monkeypatch.setattr(device, "_pipelines", {})
    return device, seen


def test_all_memory_is_filled():
    code = (
        "var<workgroup> a: array<array<vec4<f32>, 4>, N * 2u>;\nvar<workgroup> b: array<u32, 3>;\n"
        "@compute @workgroup_size(W, 2)\nfn main(@builtin(workgroup_id) g: vec3<u32>) {\n  x();\n}"
    )
    line = poisoned(code).splitlines()[3]
    assert len(poisoned(code).splitlines()) == len(code.splitlines())
    assert "a[poison_0][poison_1] = vec4<f32>(poison)" in line and "b[poison_0] = u32(" in line
    assert "poison_0 = poison_index; poison_0 <  N * 2u; poison_0 += u32(W) * u32(2)" in line
    plain = "@compute @workgroup_size(8)\nfn main() {}"
    assert poisoned(plain) == plain


def excess(device, check):
    case = next(c for c in results.cases_of(device, GPU_PROFILE, "bfloat16") if c.check == check)
    run = Runner(device, GPU_PROFILE, "bfloat16")
    case.function(run, *case.arguments)
    return run.excess


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_of_gpus_begin_with_nan_in_it(filled, check):
    device, seen = filled
    assert excess(device, check) <= 1.0 and any(seen)


def test_what_is_not_written_shows(filled, monkeypatch):
    read = wgsl.shader_source
    line = "    partial[thread] = value;\n"

    def forgets(path):
        code = read(path)
        return (
            code.replace(line, f"    if (thread > 0u) {{ {line} }}\n") if "reduce" in path else code
        )

    assert line in read("common/row_reduce.wgsl")
    monkeypatch.setattr(wgsl, "shader_source", forgets)
    wgsl.load_shader.cache_clear()
    try:
        assert not excess(filled[0], "rms_norm") <= 1.0
    finally:
        wgsl.load_shader.cache_clear()
