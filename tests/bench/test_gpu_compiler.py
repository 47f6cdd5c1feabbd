"""RADV's figures of kernels, as `python benchmarks/gpu_compiler.py` tells them.

No card is needed, but Mesa's driver of AMD's cards is: where it is missing, that is a failure.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.profile import GPU_PROFILE

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Mesa's compilers are Linux's")


def run_script(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_compiler.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def driver(monkeypatch):
    """The module beside the script."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import radv.driver

    return radv.driver


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All kernels of a GPU's defaults, for heads of 64 and of 128 elements: 1B and 8B."""
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    process = run_script("--layers", 2, "--products", "default", "--json", file)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, json.loads(file.read_text())


def test_nothing_spills_and_attention_leaves_room(done):
    rows = done[1]["kernels"]
    assert not {row["kernel"]: row["spilled"] for row in rows if row["spilled"] or row["scratch"]}
    attention = {r["kernel"]: r["registers"] for r in rows if r["kernel"].startswith("attention/")}
    assert len(attention) >= 6
    assert max(attention.values()) <= 128, attention


OTHERS = {
    "dense": (
        "llama-3.2-1b-dpo", "llama-3.2-1b-orpo", "llama-3.2-1b-kto", "llama-3.2-1b-bent",
        "llama-3.1-8b-head", "llama-3.1-8b-whole", "apertus-8b", "starcoder2-3b",
        "stablelm-2-12b", "gemma-2-2b", "phi-3-mini",
    ),
    "with experts or states": (
        "qwen3.5-4b", "qwen3-next-80b-a3b", "lfm2-1.2b", "gpt-oss-20b", "deepseek-v2-lite",
        "moonlight-16b-a3b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("names", OTHERS.values(), ids=OTHERS)
def test_nothing_of_other_steps_spills(names, tmp_path):
    file = tmp_path / "figures.json"
    process = run_script("--layers", 2, "--products", "default", "--json", file, "--model", *names)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = json.loads(file.read_text())["kernels"]
    assert not {row["kernel"]: row["spilled"] for row in rows if row["spilled"] or row["scratch"]}
    for row in rows:
        most = 128 if row["kernel"].startswith("attention/") else 136
        wide = "HEAD_UNITS=64" in row["kernel"]  # heads of 256 elements
        assert row["registers"] <= (144 if wide else most), row["kernel"]


# No default of a GPU launches them: other products, matrix units, streamed weights, subgroups, and
# the copies of weights that software GPUs read.
ELSEWHERE = (
    "attention/delta_sizes.wgsl", "attention/dkdv.wgsl", "attention/dq.wgsl",
    "attention/forward.wgsl", "experts/factors.wgsl", "few_rows/narrow.wgsl",
    "few_rows/strip_copy.wgsl", "few_rows/strip_scales.wgsl", "few_rows/strips.wgsl",
    "few_rows/strips_glu.wgsl",
    "few_rows/subgroup.wgsl", "gemm/sizes.wgsl", "rms_norm/again.wgsl", "tensor/add_rounded.wgsl",
    "tensor/copy.wgsl", "tensor/scale.wgsl", "tensor/weighted_sum.wgsl",
    "trained_rows/overwrite_looked_up.wgsl",
)  # fmt: skip


def test_every_shader_is_in_the_plans(monkeypatch):
    """A kernel that comes anew is compiled by RADV, too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from radv.plans import trace
    from radv.published import STEPS

    launched = {
        shader.path
        for name in STEPS
        for shader in trace(name, "default", GPU_PROFILE, 1024, 2).shaders.values()
    }
    folder = wgsl.shader_folder()
    every = {path.relative_to(folder).as_posix() for path in folder.rglob("*.wgsl")}
    own = ("common/", "probe/", "bench/")
    other = ("_texture.wgsl", "_matrix.wgsl")
    every = {path for path in every if not path.startswith(own) and not path.endswith(other)}
    assert every - launched == set(ELSEWHERE)


def test_every_kernel_has_figures_and_a_line(done):
    text, report = done
    assert "Mesa" in report["mesa"] and "NAVI21" in report["device"]
    for row in report["kernels"]:
        assert row["kernel"] in text and not row["failure"]
        assert 0 < row["registers"] <= 256 and row["waves"] > 0 and row["latency"] > 0, row
    kernels = {row["kernel"].partition("(")[0]: row for row in report["kernels"]}
    forward, norm = kernels["glu/forward.wgsl"], kernels["rms_norm/forward.wgsl"]
    assert (forward["barriers"], forward["lds"]) == (0, 0) < (norm["barriers"], norm["lds"])
    # Once a layer in a training step, and once for the next token of one text and of three.
    assert list(forward["launches"].values()) == [6, 6]
    assert "adamw/clip.wgsl" in kernels
    for plan in report["plans"].values():
        assert plan["kernels"] > 20 and plan["failed"] == 0


def test_a_kernel_that_kills_the_compiler_is_told(driver, tmp_path):
    module = tmp_path / "broken.spv"
    module.write_bytes(b"\x03\x02\x23\x07" + bytes(16))
    (outcome,) = driver.Radv("navi21").compile([module])
    assert outcome.figures is None
    assert "died of signal" in outcome.failure and "Mesa" in outcome.driver


def test_a_missing_driver_is_a_sentence(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_FOLDERS", (str(tmp_path),))
    with pytest.raises(driver.DeviceError, match="apt-get install mesa-vulkan-drivers"):
        driver.Radv("navi21")


def test_kernels_that_are_not_there_are_a_sentence():
    done = run_script("--layers", 1, "--only", "nonsense/")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no kernel of these plans begins with nonsense/" in done.stderr
