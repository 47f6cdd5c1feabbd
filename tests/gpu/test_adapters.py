"""Which adapter and which WebGPU implementation are taken; no driver is asked."""

import sys
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu import adapters, dawn
from qlora_wgpu.gpu.backend import CHECKS_VARIABLE, Backend, checks_everything
from qlora_wgpu.gpu.dawn import Dawn
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.gpu.wgpu_native import WgpuNative


def card(name, kind="DiscreteGPU", api="Vulkan", matrix=False, number=0):
    info = {"device": name, "adapter_type": kind, "backend_type": api}
    info |= {"vendor_id": 0x10DE, "device_id": number}
    return SimpleNamespace(info=info, features={"shader-f16"}, matrix=matrix)


class Fake(Backend):
    features = {"shader-f16": ("shader-f16",), "subgroups": ("a", "b")}  # noqa: RUF012

    def __init__(self, name, cards=(), error=None):
        self.name, self.package, self._cards, self._error = name, "numpy", cards, error
        self.install = Dawn.install

    def load(self):
        if self._error:
            raise self._error
        gpu = SimpleNamespace(enumerate_adapters_sync=lambda: self._cards)
        return SimpleNamespace(gpu=gpu)

    def matrix_shapes(self, adapter):
        return (MatrixShape(16, 16, 16, 32),) if adapter.matrix else ()


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr(adapters.sys, "platform", "linux")
    monkeypatch.delenv(adapters.BACKEND_VARIABLE, raising=False)


def use(monkeypatch, wgpu=(), dawn=(), **errors):
    backends = {
        "wgpu": Fake("wgpu", wgpu, errors.get("wgpu_error")),
        "dawn": Fake("dawn", dawn, errors.get("dawn_error")),
    }
    monkeypatch.setattr(adapters, "BACKENDS", backends)


def chosen(*args):
    gpu = adapters.choose_adapter(*args)
    return gpu.name, gpu.backend.name


def test_the_fastest_kind_comes_first(monkeypatch):
    kinds = [("soft", "CPU"), ("small", "IntegratedGPU"), ("card", "DiscreteGPU")]
    cards = [card("twice", api="OpenGL"), *(card(*pair) for pair in kinds)]
    use(monkeypatch, wgpu=cards)
    assert [a.name for a in adapters.list_adapters()] == ["card", "small", "soft"]
    assert chosen() == ("card", "wgpu") and chosen("1") == ("small", "wgpu")
    assert chosen("SOF") == ("soft", "wgpu")
    with pytest.raises(DeviceError, match=r"'radeon' \(available: 0: card, 1: small, 2: soft\)"):
        adapters.choose_adapter("radeon")


def test_on_windows_each_card_is_listed_once(monkeypatch):
    monkeypatch.setattr(adapters.sys, "platform", "win32")
    direct3d = [
        card("twin", api="D3D12", number=7), card("twin", api="D3D12", number=7),
        card("Basic Render Driver", "CPU", api="D3D12", number=140),
        card("other name", api="D3D12", number=9), card("no Vulkan", api="D3D12", number=8),
    ]  # fmt: skip
    vulkan = [card("twin", number=7), card("twin", number=7), card("one name", number=9)]
    for listed in (direct3d + vulkan, vulkan + direct3d):
        use(monkeypatch, wgpu=listed)
        found = [(a.name, a.raw.info["backend_type"]) for a in adapters.list_adapters()]
        assert found == [
            ("twin", "Vulkan"), ("twin", "Vulkan"), ("one name", "Vulkan"),
            ("no Vulkan", "D3D12"), ("Basic Render Driver", "D3D12"),
        ]  # fmt: skip
    assert adapters.cards() == ["0", "1", "2", "3"]


LAVAPIPE, SWIFTSHADER = "llvmpipe (LLVM 15.0.6, 256 bits)", "SwiftShader Device (Subzero)"


def test_the_api_that_is_wanted_is_the_only_one(monkeypatch):
    monkeypatch.setattr(adapters.sys, "platform", "win32")
    monkeypatch.setenv(adapters.API_VARIABLE, "D3D12")
    use(monkeypatch, wgpu=[card("twin", number=7), card("twin", api="D3D12", number=7)])
    assert [a.raw.info["backend_type"] for a in adapters.list_adapters("wgpu")] == ["D3D12"]
    monkeypatch.setenv(adapters.API_VARIABLE, "Metal")
    with pytest.raises(DeviceError, match="must be Vulkan or D3D12 here, got 'Metal'"):
        adapters.list_adapters("wgpu")


def test_lavapipe_comes_before_other_software(monkeypatch):
    soft = [card(SWIFTSHADER, "CPU"), card(LAVAPIPE, "CPU")]
    for listed in (soft, soft[::-1]):
        use(monkeypatch, wgpu=listed)
        assert [a.name for a in adapters.list_adapters()] == [LAVAPIPE, SWIFTSHADER]
        assert chosen("swift") == (SWIFTSHADER, "wgpu")


@pytest.mark.parametrize(
    ("wgpu", "dawn", "taken"),
    [
        ((LAVAPIPE, "CPU"), (SWIFTSHADER, "CPU"), (LAVAPIPE, "wgpu")),
        (("old card", "IntegratedGPU"), (LAVAPIPE, "CPU"), ("old card", "wgpu")),
        ((SWIFTSHADER, "CPU"), (LAVAPIPE, "CPU"), (LAVAPIPE, "dawn")),
        ((SWIFTSHADER, "CPU"), (SWIFTSHADER, "CPU"), (SWIFTSHADER, "dawn")),
    ],
)
def test_software_of_dawn_stands_in_no_faster_gpus_way(monkeypatch, wgpu, dawn, taken):
    use(monkeypatch, wgpu=[card(*wgpu)], dawn=[card(*dawn)])
    assert chosen() == taken


@pytest.mark.parametrize(
    ("dawn", "taken"),
    [
        ([card("card", matrix=True)], "dawn"),  # matrix units
        ([card("card")], "wgpu"),
        ([card("card", "CPU")], "dawn"),
        ([], "wgpu"),
    ],
)
def test_dawn_is_taken_where_it_is_the_faster(monkeypatch, dawn, taken):
    kind = dawn[0].info["adapter_type"] if dawn else "DiscreteGPU"
    use(monkeypatch, wgpu=[card("card", kind)], dawn=dawn)
    assert chosen()[1] == taken
    assert chosen("auto", "wgpu")[1] == "wgpu"
    monkeypatch.setenv(adapters.BACKEND_VARIABLE, "wgpu")
    assert chosen()[1] == "wgpu"
    if dawn:
        monkeypatch.setenv(adapters.BACKEND_VARIABLE, "dawn")
        assert chosen()[1] == "dawn" and chosen("auto", "wgpu")[1] == "wgpu"


def test_what_is_not_there_is_told(monkeypatch):
    use(monkeypatch, wgpu=[card("card")], dawn_error=ImportError("no such file"))
    assert chosen()[1] == "wgpu"  # a broken extra does not stand in the way
    told = r'numpy cannot be loaded \(no such file\): pip install "wgpudawn>='
    with pytest.raises(DeviceError, match=told):
        adapters.choose_adapter("auto", "dawn")
    told = r"unknown backend 'cuda': set device\.backend to auto, wgpu or dawn"
    with pytest.raises(DeviceError, match=told):
        adapters.choose_adapter("auto", "cuda")
    use(monkeypatch)
    with pytest.raises(DeviceError, match=r"^no GPU was found: install your"):
        adapters.choose_adapter()
    with pytest.raises(DeviceError, match=r"Dawn lists no GPU.*device.backend: wgpu"):
        adapters.choose_adapter("auto", "dawn")


def test_a_gpu_of_another_api_is_named(monkeypatch):
    use(monkeypatch, wgpu=[card("old", "IntegratedGPU", api="OpenGL")])
    with pytest.raises(
        DeviceError, match=r"^no GPU was found: old only supports OpenGL.*Vulkan driver"
    ) as told:
        adapters.choose_adapter()
    assert "\n" not in str(told.value)


def test_features_need_all_their_parts():
    adapter = SimpleNamespace(features={"shader-f16", "a"})
    assert Fake("x").features_of(adapter) == {"shader-f16": ("shader-f16",)}
    adapter.features.add("b")
    assert set(Fake("x").features_of(adapter)) == {"shader-f16", "subgroups"}


def test_dialects():
    assert Dawn().dialect("// a\nsubgroupAdd(x)").splitlines() == [
        "enable subgroups; // a",
        "subgroupAdd(x)",
    ]
    assert Dawn().dialect("x") == "x" and WgpuNative().dialect("subgroupAdd") == "subgroupAdd"


def test_dawn_asks_for_a_subgroup_size():
    code = "@compute @workgroup_size(64)\nfn main() { subgroupAdd(x); }"
    assert Dawn().dialect(code, 16).splitlines()[0] == (
        "enable subgroups; enable subgroup_size_control; @compute @subgroup_size(16) "
        "@workgroup_size(64)"
    )
    assert Dawn().dialect("@compute fn main() {}", 16) == "@compute fn main() {}"


def listed(m, n, k, least, most, element="f16", result="f32"):
    return {
        "m": m, "n": n, "k": k, "min_subgroup_size": least, "max_subgroup_size": most,
        "component_type": element, "result_component_type": result,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cards", "entries", "sized", "best"),
    [
        ("NVIDIA", [listed(16, 16, 16, 32, 32), listed(16, 8, 8, 32, 32)], False, (16, 32, "f16")),
        ("AMD", [listed(16, 16, 16, 32, 64)], True, (16, 32, "f16")),
        ("AMD, size left open", [listed(16, 16, 16, 32, 64)], False, None),
        ("Intel", [listed(8, 16, 16, 16, 16)], True, (8, 16, "f16")),
        ("Apple", [listed(8, 8, 8, 32, 32, "f32"), listed(8, 8, 8, 32, 32, "f16", "f16")], True,
         (8, 32, "f32")),
        ("both", [listed(8, 8, 8, 32, 32, "f32"), listed(8, 8, 8, 32, 32)], True, (8, 32, "f16")),
        ("odd", [listed(4, 4, 4, 32, 32), listed(24, 16, 16, 32, 32), listed(16, 16, 64, 32, 32),
                  listed(16, 16, 32, 32, 32, "i8", "i32")], True, None),
    ],
)  # fmt: skip
def test_shapes_whose_subgroups_have_a_certain_size(cards, entries, sized, best):
    shapes = [shape for entry in entries for shape in dawn._shapes(entry, any_size=sized)]
    first = min(shapes, key=dawn._rank, default=None)
    assert best == (first and (first.m, first.threads, first.element)), cards


@pytest.mark.parametrize(
    ("cards", "vendor", "entry", "threads"),
    [
        ("Alchemist", "intel", listed(8, 8, 16, 8, 32), 8),
        ("Battlemage", "intel", listed(8, 16, 16, 16, 32), 16),
        ("RDNA3", "amd", listed(16, 16, 16, 32, 64), 32),
    ],
)
def test_wide_subgroups_do_not_share_a_narrow_one_s_registers(
    monkeypatch, cards, vendor, entry, threads
):
    own = {"subgroup_matrix_configs": (entry,)}
    extras = SimpleNamespace(get_adapter_properties=lambda adapter: own)
    for name in ("wgpudawn", "wgpudawn.backends", "wgpudawn.backends.dawn"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(extras=extras))
    adapter = SimpleNamespace(
        features={dawn._MATRIX, dawn._SIZE_CONTROL, "shader-f16"},
        info={"vendor": vendor, "adapter_type": "DiscreteGPU", "device": cards},
    )
    shapes = Dawn().matrix_shapes(adapter)
    assert (shapes[0].m, shapes[0].n, shapes[0].k) == (entry["m"], entry["n"], entry["k"])
    assert shapes[0].threads == threads and len(shapes) > 1


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("0", False), ("", False)])
def test_shaders_are_trusted_unless_all_is_to_be_checked(monkeypatch, value, checks):
    monkeypatch.setenv(CHECKS_VARIABLE, value)
    assert checks_everything() == checks
    toggles = SimpleNamespace(all_toggles=lambda: {"disable_robustness": {}})
    assert dawn._known(toggles, dawn._GUARDS) == ("disable_robustness",)


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("let s = subgroupAdd (x);", True),
        ("fn f(@builtin( subgroup_invocation_id ) lane: u32) {}", True),
        ("fn f(@builtin(num_subgroups) n: u32) {}", True),
        ("var a: subgroup_matrix_left<f16, 8, 8>;", True),
        ("let s = quadSwapX(x);", True),
        ("/* a /* b */ subgroupAdd(x) */ x", False),
        ("x // each subgroup: subgroupAdd(x)", False),
        ("/* // */ subgroupAdd(x)", True),
        ("// /*\nsubgroupAdd(x) // */", True),
        ("let rows_of_subgroup = 1u; const SUBGROUP = false;", False),
        ("let subgroup = index / 32u;", False),
    ],
)
def test_dawn_enables_subgroups_where_code_uses_them(code, asks):
    assert Dawn().dialect(code) == ("enable subgroups; " if asks else "") + code


class Pass:
    def __init__(self):
        self.calls = []

    def set_pipeline(self, pipeline):
        self.calls.append(("pipeline", pipeline))

    def set_bind_group(self, index, group):
        self.calls.append(("group", index, group))

    def dispatch_workgroups(self, *counts):
        self.calls.append(("dispatch", *counts))


def test_without_private_names_the_public_ones_record(monkeypatch):
    recorder, backend = Pass(), WgpuNative()
    vars(backend)["module"] = SimpleNamespace(backends=SimpleNamespace())  # without loading it
    backend.record(recorder, [("p", "g", (1, 2, 3)), ("p", "h", (4, 1, 1)), ("q", "g", (5, 1, 1))])
    assert recorder.calls == [
        ("pipeline", "p"), ("group", 0, "g"), ("dispatch", 1, 2, 3),
        ("group", 0, "h"), ("dispatch", 4, 1, 1),
        ("pipeline", "q"), ("group", 0, "g"), ("dispatch", 5, 1, 1),
    ]  # fmt: skip


def test_trusted_shaders_compute_and_refuse_as_others(device, monkeypatch):
    monkeypatch.setenv(CHECKS_VARIABLE, "0")
    trusted = Device()
    assert trusted.profile == device.profile  # its probes have run
    code = "@compute @workgroup_size(1) fn main() { let smooth = 1; }"
    with pytest.raises(DeviceError, match="smooth"), trusted.driver_call("compiling"):
        trusted.backend.compile(trusted.raw, code, "wrong")
