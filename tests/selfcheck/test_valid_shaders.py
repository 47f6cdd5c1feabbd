"""The compiler of WGSL accepts every kernel of every kind of device, whatever this one is."""

from contextlib import suppress

import pytest
from selfcheck.test_coverage import PROFILES

from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.runner import Tracer, TracingDone

MATRIX_UNITS = [name for name in PROFILES if name.startswith("matrix units")]


def shaders(device, profile, dtype):
    """By label, what all checks launch."""
    found = {}
    for case in cases_for(profile):
        run = Tracer(device, profile, dtype, in_textures=case.in_textures)
        with suppress(TracingDone):
            case.function(run, *case.arguments)
        found |= {launch.shader.label: launch.shader for launch in run.launches}
    return found


@pytest.mark.slow
@pytest.mark.cover(name=["4 lanes"], dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in PROFILES if name not in MATRIX_UNITS])
def test_every_shader_is_valid(device, name, dtype):
    for shader in shaders(device, PROFILES[name] or device.profile, dtype).values():
        code = device.backend.dialect(shader.code, 0)
        device.backend.compile(device.raw, code, shader.label)  # raises
