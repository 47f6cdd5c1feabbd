"""A hint at Dawn is given where training would be faster with it, and nowhere else."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.config.sections.run import DeviceConfig
from qlora_wgpu.gpu.adapters import BACKEND_VARIABLE, BACKENDS
from qlora_wgpu.runs import opening
from qlora_wgpu.runs.opening import faster_through_dawn

CARD = {"device": "NVIDIA GeForce RTX 4070", "vendor": "NVIDIA", "description": "580.1"}
LAVAPIPE = {"device": "llvmpipe (LLVM 19.1.7, 256 bits)", "vendor": "llvmpipe"}


@pytest.fixture(autouse=True)
def _without_dawn(monkeypatch):
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(opening, "installed_backends", lambda: [BACKENDS["wgpu"]])


def opened(info, *, is_cpu=False):
    gpu = SimpleNamespace(info={"description": "", **info})
    return SimpleNamespace(name=info["device"], is_cpu=is_cpu, gpu=gpu, notes=("another",))


@pytest.mark.parametrize(
    "info",
    [
        CARD,
        {"device": "AMD Radeon RX 7900 XTX (RADV NAVI31)", "vendor": "radv", "vendor_id": 0x1002},
        {"device": "Radeon 780M", "vendor": "", "vendor_id": 0x1002},
        {"device": "Intel(R) Arc(tm) A770", "vendor": "Intel open-source Mesa driver"},
        {"device": "Apple M2 Pro", "vendor": ""},
    ],
    ids=lambda info: info["device"],
)
def test_cards_that_may_have_matrix_units(info):
    text = faster_through_dawn(opened(info), "auto")
    assert text.startswith(f"{info['device']} may have matrix units")
    assert 'pip install "wgpudawn>=' in text


def test_other_cards_are_told_nothing():
    assert not faster_through_dawn(opened({"device": "Turnip Adreno 630", "vendor": ""}), "auto")


@pytest.mark.parametrize(
    ("description", "told"),
    [
        ("Mesa 22.3.6 (LLVM 15.0.6)", False),
        ("Mesa 24.2.8 (LLVM 19.1.1)", False),
        ("Mesa 25.0.7-2 (LLVM 19.1.7)", True),
        ("Mesa 26.2.6", True),
        ("", False),
        ("SwiftShader 5.0.0", False),
    ],
)
def test_software_gpus_of_mesa(description, told):
    device = opened({**LAVAPIPE, "description": description}, is_cpu=True)
    assert ("half as long through Dawn" in faster_through_dawn(device, "auto")) == told


def test_whoever_has_dawn_or_asked_for_wgpu_is_told_nothing(monkeypatch):
    assert not faster_through_dawn(opened(CARD), "wgpu")
    assert not faster_through_dawn(opened(CARD), "dawn")
    monkeypatch.setenv(BACKEND_VARIABLE, "wgpu")
    assert not faster_through_dawn(opened(CARD), "auto")
    monkeypatch.setenv(BACKEND_VARIABLE, "auto")
    assert faster_through_dawn(opened(CARD), "auto")
    monkeypatch.setattr(opening, "installed_backends", lambda: [*BACKENDS.values()])
    assert not faster_through_dawn(opened(CARD), "auto")


@pytest.mark.parametrize(("backend", "told"), [("auto", 2), ("wgpu", 1)])
def test_a_run_says_so_with_its_other_notes(monkeypatch, backend, told):
    notes = []
    observer = SimpleNamespace(activity=lambda text: None, note=notes.append)
    monkeypatch.setattr(opening, "device_of", lambda settings: opened(CARD))
    opening.open_device(DeviceConfig(backend=backend), observer)
    assert len(notes) == told and notes[0] == "another"
