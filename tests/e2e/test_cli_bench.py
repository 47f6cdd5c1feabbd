"""``bench`` from the outside: what its JSON holds, and what a mistake looks like. Never a time."""

import json
import math

import pytest
from support.commands import run_here

from e2e.test_cli import run
from e2e.tiny import CONFIG, write_model
from qlora_wgpu.bench import measure as measuring
from qlora_wgpu.bench import timing
from qlora_wgpu.bench.measure import measure
from qlora_wgpu.bench.report import to_json
from qlora_wgpu.bench.roofline import measure_ceilings
from qlora_wgpu.bench.workload import Workload, find_shape


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "broken.json").write_text("{")
    (folder / "mamba.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    (folder / "wide.json").write_text(json.dumps({**CONFIG, "vocab_size": 3_000_000_000}))
    (folder / "folder").mkdir()
    write_model(folder / "model")
    return folder


def is_positive(value):
    return isinstance(value, float) and math.isfinite(value) and value > 0


def check(figures):
    """What must hold of any run, whatever the machine."""
    for name in ("tokens_per_second", "step_seconds"):
        spread = figures[name]
        assert all(map(is_positive, spread.values()))
        assert spread["min"] <= spread["median"] <= spread["max"]
    tokens = figures["workload"]["batch"] * figures["workload"]["seq"]
    for rate, seconds in (("median", "median"), ("min", "max"), ("max", "min")):
        product = figures["tokens_per_second"][rate] * figures["step_seconds"][seconds]
        assert product == pytest.approx(tokens)
    assert figures["flops_per_step"] > 0
    assert figures["flops_per_second"] == pytest.approx(
        figures["flops_per_step"] / figures["step_seconds"]["median"]
    )
    assert 0 < figures["host_share"] <= 1
    assert 1 < figures["loss"] < 10
    seconds = figures["seconds"]
    assert all(map(is_positive, seconds.values()))
    assert seconds["to_first_step"] == pytest.approx(
        seconds["load"] + seconds["prepare"] + seconds["first_step"]
    )
    assert all(map(is_positive, figures["ceilings"].values()))
    memory = figures["memory"]
    assert sum(memory["planned"].values()) == memory["planned_total"]
    assert memory["peak"] == pytest.approx(memory["planned_total"], rel=0.05)
    if figures["timestamps"]:
        check_kernels(figures)
    else:
        assert figures["kernels"] is None and figures["kernels_seconds"] is None


def check_kernels(figures):
    kernels = figures["kernels"]
    labels = [row["label"] for row in kernels]
    assert len(set(labels)) == len(labels)
    assert any(label.startswith("gemm") for label in labels)
    assert any(label.startswith("adamw") for label in labels)
    assert sum(row["share"] for row in kernels) == pytest.approx(1)
    assert sum(row["seconds"] for row in kernels) == pytest.approx(figures["kernels_seconds"])
    assert sum(row["flops"] for row in kernels) == figures["flops_per_step"]
    assert [row["seconds"] for row in kernels] == sorted(r["seconds"] for r in kernels)[::-1]
    for row in kernels:
        assert row["launches"] >= 1 and row["bytes"] > 0
        assert row["seconds"] >= 0 and math.isfinite(row["seconds"])
        if row["seconds"]:
            assert row["flops_per_second"] == pytest.approx(row["flops"] / row["seconds"])
            assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])


def test_a_config_alone(place):
    done = run_here(
        "bench", "tiny.json", "--batch", 2, "--seq", 48, "--rank", 4, "--steps", 2,
        "--dtype", "float32", "--checkpointing", "--json", "out.json", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads((place / "out.json").read_text())
    check(figures)
    workload = figures["workload"]
    assert workload.pop("adapter_parameters") > 0
    assert workload == {
        "shape": "tiny.json", "weights": "random", "batch": 2, "seq": 48, "rank": 4,
        "compute_dtype": "float32", "gradient_checkpointing": True, "steps": 2,
    }  # fmt: skip
    name = figures["device"]["name"]
    for text in ("tokens/s", "ceilings", "host", "first step", "planned", "out.json", name):
        assert text in done.stdout, text
    if figures["timestamps"]:
        for row in figures["kernels"]:
            assert row["label"] in done.stdout, row["label"]
    else:
        assert "does not support timestamp queries" in done.stdout


def test_a_folder_with_weights(place):
    done = run_here("bench", "model", "--seq", 32, "--steps", 1, "--json", "model.out", cwd=place)
    assert done.returncode == 0, done.stderr
    figures = json.loads((place / "model.out").read_text())
    check(figures)
    assert figures["workload"]["weights"] == "model"


@pytest.mark.full
def test_without_timestamps_the_host_times_what_it_can(place, device, monkeypatch):
    for module in (measuring, timing):
        monkeypatch.setattr(module, "has_timestamps", lambda device: False)
    workload = Workload(find_shape(str(place / "tiny.json")), seq=16, steps=1)
    figures = to_json(measure(workload, device))
    assert figures["timestamps"] is False and figures["kernels"] is None
    assert all(map(is_positive, figures["ceilings"].values()))


def test_ceilings_leave_no_memory_behind(settled_device):
    device = settled_device
    before = device.memory.total
    ceilings = measure_ceilings(device)
    assert is_positive(ceilings.flops_per_second) and is_positive(ceilings.bytes_per_second)
    assert device.memory.total == before and "ceilings" not in device.memory.by_kind


NOTHING = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
MISTAKES = {
    "unknown shape": (("llama-3.2-1",), None, "did you mean 'llama-3.2-1b'"),
    "no such path": (("gone/config.json",), None, "gone/config.json"),
    "empty folder": (("folder",), None, "no config.json"),
    "broken config": (("broken.json",), None, "line 1"),
    "model type": (("mamba.json",), None, "mamba"),
    "no batch": (("S", "--batch", 0), None, "--batch"),
    "batch is no number": (("S", "--batch", "two"), None, "--batch must be an integer"),
    "half a token": (("S", "--seq", "1.5"), None, "--seq must be an integer"),
    "one token": (("S", "--seq", 1), None, "--seq"),
    "negative rank": (("S", "--rank=-1",), None, "--rank"),
    "no steps": (("S", "--steps", 0), None, "--steps"),
    "dtype": (("S", "--dtype", "float16"), None, "bfloat16 or float32"),
    "sequence too long": (("S", "--seq", 4097), None, "4096 positions"),
    "rank beyond memory": (("tiny.json", "--rank", 1_000_000_000), None, "--rank"),
    "out of memory": (("tiny.json", "--batch", 100_000_000), None, "--batch"),
    "too large a model": (("wide.json",), None, "MiB"),
    "no such device": (("tiny.json", "--gpu", "radeon9"), None, "radeon9"),
    "no such device, by an old name": (("tiny.json", "--adapter", "radeon9"), None, "radeon9"),
    "no such device, by another": (("tiny.json", "--device", "radeon9"), None, "radeon9"),
    "no driver": (("tiny.json", "--seq", 32), NOTHING, "mesa-vulkan-drivers"),
    "no folder for the JSON": (("S", "--json", "gone/x.json"), None, "gone does not exist"),
    "JSON is a folder": (("S", "--json", "folder"), None, "must be a file name"),
}  # fmt: skip


@pytest.mark.cover(
    mistake=[
        "unknown shape",
        "broken config",
        "no batch",
        "out of memory",
        "no driver",
        "JSON is a folder",
    ]
)
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_sentence_and_exit_code_2(place, mistake):
    args, env, expected = MISTAKES[mistake]
    if env:
        done = run("bench", *args, cwd=place, env=env)
    else:
        done = run_here("bench", *args, cwd=place)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert "Traceback" not in done.stdout + done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert expected in lines[0], lines[0]
