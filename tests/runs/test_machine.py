"""What doctor says a device means."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from e2e.tiny import CONFIG

from qlora_wgpu.bench import measure
from qlora_wgpu.cli.doctor import _describe as describe
from qlora_wgpu.cli.doctor import _report_failures as judge
from qlora_wgpu.cli.doctor import doctor
from qlora_wgpu.errors import ConfigError, DeviceError
from qlora_wgpu.gpu import memory as sizes
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.runs import estimation
from qlora_wgpu.runs.workload import DeviceSpec
from qlora_wgpu.selfcheck.results import Result


def card(name="A card", kind="DiscreteGPU"):
    gpu = SimpleNamespace(info={"adapter_type": kind})
    return SimpleNamespace(
        name=name, is_cpu=kind == "CPU", gpu=gpu, max_binding=2**31 - 1, profile=GPU_PROFILE
    )


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "largest"), [(0.1, None), (0.9, "135M"), (4, "1B")])
def test_what_fits(monkeypatch, gib, largest):
    small = {name: estimation._SIZES[name] for name in ("1B", "0.5B", "135M")}
    monkeypatch.setattr(estimation, "_SIZES", small)
    assert estimation.largest_model(DeviceSpec(), int(gib * 2**30)) == largest


def test_a_gpu_is_told_with_its_memory(monkeypatch):
    monkeypatch.setattr(sizes, "_own_memory", lambda name: 3 << 30)
    monkeypatch.setattr(estimation, "largest_model", lambda target, room: f"{room / 2**30:.1f}B")
    assert "A card with 3 GiB: QLoRA" in estimation.training_summary(card())
    assert "fits for models of up to 2.7B parameters" in estimation.training_summary(card())
    monkeypatch.setattr(sizes, "_own_memory", lambda name: None)
    assert "does not report its memory" in estimation.training_summary(card())
    # One that has no memory of its own shares the machine's.
    assert estimation.memory_size(card(kind="IntegratedGPU")) > 2**29


def test_the_processor_is_told_with_a_time(monkeypatch):
    monkeypatch.setattr(estimation, "training_speed", lambda config, device: 123.4)
    text = estimation.training_summary(card(kind="CPU"))
    assert "You have no GPU" in text and "about 120 tokens/s" in text and "27 minutes" in text


def test_the_memory_of_a_device_is_known():
    device = Device()
    assert 2**29 < sizes.memory_size(device) < 2**45
    assert sizes._own_memory(device.name) is None or sizes._own_memory(device.name) >= 2**28
    assert sizes._own_memory("none such") is None


def test_a_model_is_its_layers_and_its_head(monkeypatch):
    seconds = {1: 1.0, 3: 2.0}  # half a second a layer, and another for the head
    monkeypatch.setattr(
        measure, "_step_seconds", lambda config, device: seconds[config["num_hidden_layers"]]
    )
    whole = {"num_hidden_layers": 30, "vocab_size": 3 * 4096}
    assert measure.training_speed(whole, None) == 256 / (30 * 0.5 + 3 * 0.5)


@pytest.mark.slow
def test_a_part_can_be_timed():
    assert measure._step_seconds({**CONFIG, "num_hidden_layers": 1}, Device()) > 0


def test_a_quick_doctor_measures_nothing_and_says_so(monkeypatch):
    def measured(device):
        raise AssertionError("it takes a while")

    monkeypatch.setattr("qlora_wgpu.cli.doctor.training_summary", measured)
    done = CliRunner().invoke(doctor, ["--quick"])
    assert done.exit_code == 0, done.output
    assert "skipped by --quick: " in done.output and "You have" not in done.output


def test_a_quick_doctor_is_not_asked_for_all_checks():
    done = CliRunner().invoke(doctor, ["--quick", "--check"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == "--check and --quick are mutually exclusive"


def test_the_largest_model_is_the_first_that_fits(monkeypatch):
    totals = {3: None, 2: 500, 1: 100}
    sizes = {f"{n}B": {"n": n} for n in totals}
    monkeypatch.setattr(estimation, "_SIZES", sizes)
    monkeypatch.setattr(estimation.Pretrained, "from_config", lambda config: config["n"])

    def made(base, step):
        layout = SimpleNamespace(total=lambda step: totals[base])
        return SimpleNamespace(layout=lambda target: layout)

    monkeypatch.setattr(estimation, "TrainingWorkload", made)
    found = [estimation.largest_model(DeviceSpec(), room) for room in (99, 100, 499, 500, 10**9)]
    assert found == [None, "1B", "1B", "2B", "2B"]


def test_a_device_is_described_in_a_table():
    """Unknown values are reported as unknown."""
    limits = {
        "max-buffer-size": 3 << 30, "max-storage-buffer-binding-size": 1 << 27,
        "max-compute-invocations-per-workgroup": 256, "max-compute-workgroup-storage-size": 49_152,
        "max-storage-buffers-per-shader-stage": 16,
    }  # fmt: skip
    info = {"adapter_type": "DiscreteGPU", "backend_type": "Vulkan", "description": "driver 7"}
    backend = SimpleNamespace(
        name="wgpu", features_of=lambda raw: {"subgroups"}, matrix_shapes=lambda raw: ()
    )

    def told(**changes):
        raw = SimpleNamespace(info=info | changes, limits=limits)
        gpu = SimpleNamespace(name="card", raw=raw, backend=backend)
        table = describe(3, gpu, chosen=True)
        cells = [list(column.cells) for column in table.columns]
        return table.title, dict(zip(*cells, strict=True))

    title, rows = told()
    assert title == "3: card, device.backend: wgpu (auto)"
    assert rows["type"] == "DiscreteGPU via Vulkan" and rows["driver"] == "driver 7"
    assert rows["largest buffer"] == "3,072 MiB" and rows["largest binding"] == "128 MiB"
    assert rows["workgroup"] == "256 invocations, 48 KiB shared"
    assert rows["storage buffers"] == "16 per shader" and "matrix units" not in rows
    assert "subgroups yes" in rows["features"] and " no" in rows["features"]
    assert told(description="")[1]["driver"] == "unknown"
    backend.matrix_shapes = lambda raw: ("16x16x16", "8x8x8")
    assert told()[1]["matrix units"] == "16x16x16, 8x8x8"


@pytest.mark.parametrize(("wrong", "said"), [
    ([], "all 4 checks passed"),
    ([("as on GPUs", "float32")], "the kernels that this GPU uses passed"),
    ([("own", "bfloat16")], None),
])  # fmt: skip
def test_wrong_checks_are_named_and_only_the_devices_own_count(wrong, said):
    console, lines = SimpleNamespace(print=lambda text, **_: lines.append(text)), []
    results = {("rope", variant): {
        dtype: Result("rope", variant, dtype, 0.0, 9.0 if (variant, dtype) in wrong else 0.5)
        for dtype in ("float32", "bfloat16")
    } for variant in ("own", "as on GPUs")}  # fmt: skip
    if said is None:
        with pytest.raises(DeviceError, match="A card miscomputes: update the driver"):
            judge(console, card(), results)
    else:
        judge(console, card(), results)
        assert lines.pop() == said
    assert lines == [f"failed: rope, {variant}, {dtype}" for variant, dtype in wrong]
