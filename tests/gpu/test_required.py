"""GPUs of other limits than the one that is there: WebGPU holds devices to those."""

from contextlib import suppress

import pytest
from support.limited import Offered, limited_device

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu.limits import MOST_STORAGE_TEXTURES, require_limits
from qlora_wgpu.gpu.matrix import Limits
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.kernels.common import row_constants
from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.runner import Tracer, TracingDone

PROMISED = {
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-storage-size": 16_384,
    "max-compute-workgroups-per-dimension": 65_535,
    "min-storage-buffer-offset-alignment": 256,
    "min-uniform-buffer-offset-alignment": 256,
}


def test_as_much_as_webgpu_promises_is_enough():
    require_limits("old", PROMISED)
    device = limited_device(Offered(PROMISED, kind="DiscreteGPU"))
    assert device.limits == Limits(256, 16_384)


@pytest.mark.parametrize("limit", PROMISED)
def test_a_gpu_that_allows_less_is_refused(limit):
    other = PROMISED[limit] * 2 if limit.startswith("min") else PROMISED[limit] // 2
    with pytest.raises(DeviceError, match=rf"^old .*{other:,}.*\({limit}\).*device\.gpu") as told:
        require_limits("old", {**PROMISED, limit: other})
    assert "\n" not in str(told.value)


def test_such_a_gpu_is_not_opened():
    with pytest.raises(DeviceError, match=r"supports only 4 storage buffers of a shader"):
        limited_device(Offered({"max-storage-buffers-per-shader-stage": 4}))


def test_rows_of_many_threads_keep_to_the_first_dimension():
    """More invocations may be allowed than along it, where all threads of a row lie."""
    limits = {"max-compute-workgroup-size-x": 256, "max-compute-invocations-per-workgroup": 1024}
    device = limited_device(Offered(limits, kind="DiscreteGPU"))
    assert device.limits.invocations == 256
    graph = Graph("float32", device.profile)
    assert row_constants(graph, 1 << 14)["THREADS"] == 256


def test_textures_are_left_where_shaders_may_bind_few():
    """WebGPU promises four, and some kernels bind six."""
    few = limited_device(Offered({"max-storage-textures-per-shader-stage": 4}))
    enough = limited_device(Offered({"max-storage-textures-per-shader-stage": 8}))
    assert enough.profile.textures and not few.profile.textures
    assert "4 storage textures" in few.notes[0] and "\n" not in few.notes[0]


@pytest.mark.slow
def test_no_kernel_binds_more_textures(device):
    if not device.profile.textures:
        return  # only software GPUs have them
    for case in cases_for(device.profile):
        run = Tracer(device, device.profile, "bfloat16", in_textures=case.in_textures)
        with suppress(TracingDone):
            case.function(run, *case.arguments)
        for launch in run.launches:
            textures = [t for t in launch.tensors.values() if t.texture]
            assert len(textures) <= MOST_STORAGE_TEXTURES, launch.path


def test_what_may_lie_in_a_texture_is_no_larger():
    """A binding may be larger than the largest texture."""
    limits = {"max-texture-dimension-2d": 4096}
    assert limited_device(Offered(limits)).max_binding == 64 << 20
    assert limited_device(Offered(limits, kind="DiscreteGPU")).max_binding == 128 << 20
