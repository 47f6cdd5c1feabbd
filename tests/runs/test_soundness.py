"""Kernels that a driver refuses or miscomputes are replaced, and training continues correctly."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from e2e.biased_model import close, opened, sample
from e2e.tiny import write_model

from qlora_wgpu import LoraConfig, QuantConfig
from qlora_wgpu.config import Config
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.runs import opening
from qlora_wgpu.runs.opening import load_training, open_device, verified_layout
from qlora_wgpu.runs.workload import TrainingWorkload
from qlora_wgpu.selfcheck import avoid_what_is_wrong, results
from qlora_wgpu.training import Observer

LORA = LoraConfig(r=5, lora_alpha=10)
LARGE = Limits(1024, 49_152)
MATRIX = gpu_profile(MatrixShape(16, 16, 16, 24), LARGE)  # no driver has such subgroups
TILED = replace(GPU_PROFILE, gemm_kind="tiled")


@pytest.fixture(autouse=True)
def _verified(monkeypatch):
    monkeypatch.delenv(opening.VERIFY_VARIABLE, raising=False)


class Notes(Observer):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "model", num_hidden_layers=1)


@pytest.fixture
def own(device, monkeypatch, tmp_path):
    """The device, whose profile and notes are put back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile, notes = device.profile, device.notes
    yield device
    device.profile, device.notes = profile, notes


@pytest.fixture(autouse=True)
def _few_checks(monkeypatch):
    """One check of products: the others say nothing of them, and take their time."""
    whole = results.cases_for

    def few(profile):
        return [case for case in whole(profile) if case.check == "linear"][:1]

    monkeypatch.setattr(results, "cases_for", few)


@pytest.fixture
def broken(monkeypatch):
    """Breaks the tiles in workgroup memory."""

    def breaking(before, after):
        original = wgsl.shader_source
        monkeypatch.setattr(
            wgsl, "shader_source", lambda path: original(path).replace(before, after)
        )
        wgsl.load_shader.cache_clear()

    yield breaking
    monkeypatch.undo()
    wgsl.load_shader.cache_clear()


def settled(device, folder, profile):
    """The layout of a run that starts with a profile, and its notes."""
    device.profile, notes = profile, Notes()
    settings = Config.model_validate({"model": {"path": str(folder)}, "lora": LORA.model_dump()})
    base = Pretrained.open(folder)
    layout = device_layout(base, LORA, QuantConfig(scheme="none"), "bfloat16", device)

    def another():
        device = Device()
        device.profile = profile
        return device

    launches = TrainingWorkload.of(settings, base, 24).launches
    return verified_layout(device, another, launches, layout, notes), notes.texts


def assert_trains_rightly(device, folder):
    kind = {"quant": QuantConfig(scheme="none"), "compute_dtype": "bfloat16"}
    gradients = opened(folder, device, **kind).loss_and_grads(*sample())[1]
    device.profile = replace(GPU_PROFILE, gemm_kind="register", attention_kind="register")
    close(gradients, opened(folder, device, **kind).loss_and_grads(*sample())[1], 0.03)


@pytest.mark.full
def test_what_cannot_be_compiled_gives_way_once(own, folder):
    layout, texts = settled(own, folder, MATRIX)
    assert layout.profile == own.profile and own.profile.gemm_kind == "tiled"
    assert len(texts) == 2 and "attention uses workgroup memory instead" in texts[0]
    assert "products use workgroup memory instead" in texts[1]
    # The next run begins with what is right, and says why.
    own.profile = MATRIX
    avoid_what_is_wrong(own)
    assert own.profile.gemm_kind == "tiled" and "gave wrong results before" in own.notes[-1]
    assert_trains_rightly(own, folder)


def test_what_ended_the_process_is_not_checked_again(own, monkeypatch):
    own.profile = MATRIX
    monkeypatch.setattr(
        results, "has_crashed", lambda what: "'matrix' attention" in what and what[:6] == "checks"
    )
    avoid_what_is_wrong(own)
    assert (own.profile.gemm_kind, own.profile.attention_kind) == ("matrix", "tiled")
    assert "crashed before" in own.notes[-1]


def test_what_is_wrong_gives_way_until_something_is_right(own, folder, monkeypatch):
    def problem(device, open_device, graph, *rest):
        return "it is wrong" if graph.profile.gemm_kind != "register" else ""

    monkeypatch.setattr(opening, "problem_of", problem)
    layout, texts = settled(own, folder, MATRIX)
    assert layout.profile.gemm_kind == own.profile.gemm_kind == "register"
    assert len(texts) == 3 and "without workgroup memory" in texts[2]


@pytest.mark.slow
def test_where_nothing_plainer_is_left_it_is_an_error(own, folder, broken):
    broken("v += load_residual(at);", "")
    with pytest.raises(DeviceError, match=r"gives wrong results.*update the driver"):
        settled(own, folder, TILED)


@pytest.mark.slow
def test_what_is_too_large_is_not_chosen(own, folder):
    small = replace(MATRIX, limits=Limits(64, 4_096))
    layout, texts = settled(own, folder, small)
    kinds = {launch.path for launch in layout.step(layout_options()).plan.launches}
    assert not any(p.startswith("gemm/") and "tiled" in p for p in kinds) and not texts


def layout_options():
    from qlora_wgpu.model.steps import TrainingOptions

    return TrainingOptions().step("train", 1, 24)


def test_what_is_said_of_a_device_is_told_as_a_run_begins(own, folder, monkeypatch):
    results.keep_wrong(results._wrong_kind(own))
    notes = Notes()
    monkeypatch.setattr("qlora_wgpu.runs.opening.Device", lambda *given, **named: own)
    own.notes = ("the matrix units are not used",)
    settings = Config.model_validate({"model": {"path": str(folder)}})
    open_device(settings.device, notes)
    assert notes.texts[0] == "the matrix units are not used"
    assert np.all([isinstance(text, str) for text in notes.texts])


def test_checks_know_no_budget(monkeypatch):
    """They are over before a run takes anything; a plan that fits is not refused for theirs."""

    class Seen(Exception):
        pass

    def seen(device, open_device, *_):
        raise Seen(open_device().budget)

    monkeypatch.setattr("qlora_wgpu.runs.opening.verified_layout", seen)
    settings = Config.model_validate({"model": {"path": "m"}, "device": {"memory": "1MiB"}})
    base = SimpleNamespace(folder=SimpleNamespace(start_fingerprint=lambda: None))
    placed = SimpleNamespace(workload=TrainingWorkload.of(settings, base, 24), layout=None)
    with pytest.raises(Seen, match="None"):
        load_training(settings, placed, None, Observer(), Observer())
