"""What is known of a GPU by its vendor: how many registers its invocations have."""

import pytest
from support.chosen_profiles import opened

from qlora_wgpu.gpu.kernel_config import (
    GPU_PROFILE,
    gpu_profile,
    has_few_registers,
    hoists_loads,
    may_have_matrix_units,
    takes_deep_tiles,
)

INTEL = (
    {"vendor": "Intel open-source Mesa driver", "device": "Intel(R) Arc(tm) A770M Graphics (DG2)",
     "vendor_id": 0x8086},
    {"vendor": "intel", "device": "", "vendor_id": 0x8086},
    {"vendor": "", "device": "Intel Iris Pro Graphics", "vendor_id": 0},
)  # fmt: skip
APPLE = (
    {"vendor": "apple", "device": "Apple M2 Pro", "vendor_id": 0x106B},
    {"vendor": "", "device": "Apple M1", "vendor_id": 0},  # Metal tells of no vendor
    {"vendor": "Honeykrisp", "device": "Apple M1 (G13G A0)", "vendor_id": 0x10005},
)
QUALCOMM = (
    {"vendor": "turnip Mesa driver", "device": "Turnip Adreno (TM) 630", "vendor_id": 0x5143},
    {"vendor": "qualcomm", "device": ""},
    {"vendor": "", "device": "Qualcomm(R) Adreno(TM) X1-85 GPU", "vendor_id": 0x4D4F4351},
)
OTHERS = (
    {"vendor": "NVIDIA", "device": "NVIDIA GeForce RTX 3060", "vendor_id": 0x10DE},
    {"vendor": "radv", "device": "AMD Radeon RX 7900 XTX (RADV NAVI31)", "vendor_id": 0x1002},
    {"vendor": "llvmpipe", "device": "llvmpipe (LLVM 15.0.6, 512 bits)", "vendor_id": 65541},
    {"device": "card"},
)


@pytest.mark.parametrize(
    "info", [*INTEL, *APPLE, *QUALCOMM, *OTHERS], ids=lambda info: info["device"]
)
def test_vendors_of_few_registers(info):
    assert has_few_registers(info) == (info in (*INTEL, *APPLE))
    assert hoists_loads(info) == (info in QUALCOMM)
    assert takes_deep_tiles(info) == (info == OTHERS[0])
    assert may_have_matrix_units(info) == (info in (*INTEL, *APPLE, *OTHERS[:2]))


@pytest.mark.parametrize(
    "name", ["Intel(R) UHD Graphics 770 (ADL-S GT1)", "NVIDIA H200", "Qualcomm(R) Adreno"]
)
def test_a_device_gets_the_kernels_of_its_registers(monkeypatch, name):
    profile, _ = opened(monkeypatch, is_cpu=False, name=name)
    few = name.startswith("Intel")
    assert profile.gemm_few_registers == profile.attention_few_registers == few
    assert profile.unit_by_unit == (4 if few else int(name.startswith("Qualcomm")))


def test_kernels_of_few_registers_are_not_the_default():
    assert not (GPU_PROFILE.gemm_few_registers or GPU_PROFILE.attention_few_registers)
    assert gpu_profile(None) == GPU_PROFILE != gpu_profile(None, few_registers=True)
