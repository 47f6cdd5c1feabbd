"""``qlora-wgpu estimate`` from the outside."""

import json

import pytest
from support.commands import run_here

from e2e.test_cli import run as run_command
from e2e.tiny import CONFIG, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.runs.estimation import largest_fitting
from qlora_wgpu.training.optimizer import Optimizer

NO_DRIVER = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}


def run(*args, cwd, env=None):
    """A process of its own only where its environment asks for one."""
    if env is None:
        return run_here("estimate", *args, cwd=cwd)
    return run_command("estimate", *args, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("estimate")
    write_model(place / "model")
    (place / "config.json").write_text(json.dumps(CONFIG))
    (place / "run.yaml").write_text(
        "model: {path: model}\ndata: {train: none.jsonl, max_seq_length: 32}\n"
        "train: {per_device_train_batch_size: 3}\nlora: {r: 4}\n"
    )
    return place


def figures(place, *args, env=None):
    done = run(*args, "--json", "out.json", cwd=place, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads((place / "out.json").read_text()), done.stdout


@pytest.mark.parametrize("scheme", ["nf4", "none"])
@pytest.mark.parametrize(("batch", "checkpointing"), [(1, False), (3, True)])
def test_it_is_what_training_takes(place, scheme, batch, checkpointing):
    flag = "--checkpointing" if checkpointing else "--no-checkpointing"
    estimate, _ = figures(
        place, "config.json", "--batch", batch, "--seq", 32, "--rank", 4, "--scheme", scheme, flag
    )
    device = Device()
    lora = LoraConfig(r=4, lora_alpha=8)
    model = QLoRAModel.from_pretrained(
        place / "model", lora, QuantConfig(scheme=scheme), device=device,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    Optimizer(model, OptimConfig(), 1)
    model.prepare(batch, 32)
    for kind in ("base", "adapter", "gradients", "optimizer", "norms"):
        assert device.memory.by_kind[kind] == estimate["bytes"][kind], kind
    # The optimizer's own small plan adds slots, and a uniform block for each of its launches.
    taken = device.memory.by_kind["activations"]
    assert 0 <= taken - estimate["bytes"]["activations"] <= 0.01 * taken
    assert abs(device.memory.total - estimate["total"]) <= 0.03 * estimate["total"] + 30_000


def test_a_run_on_a_cluster_is_told_for_workers_and_owner(place):
    half = "train.gradient_dtype=bfloat16"  # of the sum, which the owner has
    estimate, shown = figures(place, "run.yaml", "cluster.scheduler=local", half)
    kinds, there = estimate["bytes"], estimate["on_cluster"]
    alone, without = figures(place, "run.yaml")
    # A worker never updates, and gives a micro-batch's own gradient.
    assert there["worker"] == alone["total"] - alone["bytes"]["optimizer"]
    assert f"on a cluster: {there['worker'] / 2**20:,.1f} MiB on the GPU of each worker" in shown
    received = alone["bytes"]["gradients"]
    vectors = kinds["adapter"] + kinds["gradients"] + received + kinds["optimizer"]
    assert 0 < there["owner"] - vectors < 20_000  # of its two small programs
    assert "on a cluster" not in without


def test_a_run_and_its_overrides(place):
    estimate, shown = figures(place, "run.yaml")
    assert (estimate["batch"], estimate["seq"], estimate["rank"]) == (3, 32, 4)
    assert f"{estimate['total'] / 2**20:,.1f}" in shown
    assert "This is the peak of the longest training step." in shown
    less, _ = figures(place, "run.yaml", "train.per_device_train_batch_size=1")
    assert less["bytes"]["activations"] < estimate["bytes"]["activations"]
    (place / "model" / "model.safetensors").rename(place / "away")
    try:  # weights are not needed
        assert figures(place, "run.yaml")[0]["total"] == estimate["total"]
    finally:
        (place / "away").rename(place / "model" / "model.safetensors")


def test_what_fits(place):
    asked = ("config.json", "--seq", 32, "--budget", "2MiB")
    estimate, shown = figures(place, *asked)
    rows = estimate["fits"]["batch"]
    assert "fits" in shown and rows > 1
    assert figures(place, *asked, "--batch", rows)[0]["total"] <= 2 << 20
    assert figures(place, *asked, "--batch", rows + 1)[0]["total"] > 2 << 20
    estimate, shown = figures(place, "config.json", "--budget", "1KiB")
    assert estimate["fits"] == {"batch": 0, "seq": 0} and "does not fit" in shown


def test_what_no_kernel_counts_does_not_fit(place):
    """Software GPUs leave loops after 65,535 turns, which the longest rows would take."""
    estimate, _ = figures(place, "config.json", "--seq", 32, "--budget", "8GiB")
    assert estimate["fits"]["batch"] == 65_536 // 32
    assert 65_536 > estimate["fits"]["seq"] > 16_384  # by the two heads of queries of each key


def test_a_run_is_planned_as_it_trains(place):
    (place / "rows.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n' * 4)
    data = ("data.train=rows.jsonl", "data.max_seq_length=256")
    estimate, _ = figures(place, "run.yaml", *data)
    assert estimate["seq"] == 32 and estimate["gradient_checkpointing"] is True
    assert figures(place, "run.yaml", *data, "--seq", 256)[0]["seq"] == 256
    shape, _ = figures(place, "config.json")
    assert shape["gradient_checkpointing"] is True  # as a run without other settings


def test_what_does_not_fit_is_told_what_would(place, in_buffers):
    plain = ("run.yaml", "data.max_seq_length=256", "train.gradient_checkpointing=false",
             "train.gradient_accumulation_steps=4", "device.keep_dequantized=false")  # fmt: skip

    def remedied(budget):
        before, shown = figures(place, *plain, "--budget", budget)
        assert before["total"] > before["budget"] and before["remedy"] in shown
        after, _ = figures(place, *plain, *before["remedy"].split(), "--budget", budget)
        assert after["total"] <= after["budget"] and after["remedy"] is None
        return before["remedy"]

    whole = figures(place, *plain)[0]["total"]
    assert remedied(f"{whole - 1}B") == (
        "train.per_device_train_batch_size=2 train.gradient_accumulation_steps=6"
    )
    one = figures(place, *plain, "train.per_device_train_batch_size=1")[0]["total"]
    assert remedied(f"{one - 1}B").endswith("train.gradient_checkpointing=true")
    least, _ = figures(place, *plain, "--batch", 1, "--checkpointing")
    assert remedied(f"{least['total'] - 1}B").endswith("data.max_seq_length=192")
    waiting, shown = figures(place, *plain, "--batch", 1, "--budget", f"{least['total']}B")
    fitted = waiting["fitted"]
    assert fitted["total"] <= waiting["budget"] < waiting["total"]
    assert fitted["gradient_checkpointing"] and "layers are recomputed" in shown
    nothing, shown = figures(place, *plain, "--budget", "1KiB")
    assert (
        nothing["remedy"] == "" and "not fit with a smaller" in shown and nothing["fitted"] is None
    )


def test_weights_that_are_kept_dequantized_are_told(place):
    def planned(*more):
        estimate, shown = figures(place, "run.yaml", *more)
        kept = estimate["bytes"].get("dequantized weights", 0)
        assert (kept > 0) == ("dequantized weights" in shown)
        return estimate["total"], kept, estimate

    total, kept, _ = planned()
    less, without, _ = planned("device.keep_dequantized=false")
    assert kept > 0 == without and less < total
    assert planned("device.keep_dequantized=true")[:2] == (total, kept)
    assert planned("--budget", f"{total}B")[:2] == (total, kept)
    assert planned("--budget", f"{total - 1}B")[:2] == (less, 0)
    assert planned(f"device.memory={total - 1}B")[:2] == (less, 0)
    assert planned("--budget", f"{total - 1}B", "device.keep_dequantized=true")[2]["fitted"] is None


def test_no_adapter_is_needed(place):
    estimate, _ = figures(place, "config.json", env=NO_DRIVER)
    assert estimate["device"] == "a GPU"


@pytest.mark.quick
@pytest.mark.parametrize("slope", [1, 7, 1000])
@pytest.mark.parametrize("budget", [0, 5, 999, 1000, 123456])
def test_the_most_is_the_most(slope, budget):
    sizes = range(1, 301)
    best = largest_fitting(lambda n: 10 + slope * n + (n * n) // 50, budget, sizes)
    exact = max(n for n in range(301) if n == 0 or 10 + slope * n + n * n // 50 <= budget)
    assert best == exact


@pytest.mark.quick
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("nope.json",), "nope.json"),
        (("config.json", "--batch", "0"), "--batch"),
        (("config.json", "--rank", "x"), "--rank"),
        (("config.json", "--budget", "3x"), "8GiB"),
        (("config.json", "--scheme", "int8"), "nf4 or none"),
        (("config.json", "--dtype", "f16"), "bfloat16 or float32"),
        (("config.json", "lora.r=3"), "need a YAML"),
        (("run.yaml", "lora.r=0"), "lora.r"),
        (("run.yaml", "model.path=gone/model"), "gone/model"),
        (("config.json", "--seq", "4000000000"), "lower"),
        (("config.json", "--json", "gone/out.json"), "gone/out.json"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(place, args, expected):
    done = run(*args, cwd=place)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert expected in lines[0], lines[0]


def test_what_texts_take_later_is_told(place, device):
    estimate, said = figures(place, "run.yaml")
    copied = device.profile.textures
    assert (estimate["text_copies"] > 0) is copied is ("more for copies" in said)
    estimate, said = figures(place, "run.yaml", "device.memory=1GiB")
    assert estimate["text_copies"] == 0 and "more for copies" not in said
