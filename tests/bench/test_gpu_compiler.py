"""Compilers' figures of kernels, as `python benchmarks/gpu_compiler.py` tells them.

No card is needed, but Mesa's driver of AMD's cards is: where it is missing, that is a failure.
Other drivers want a library that pretends a card, which an ordinary machine has not: of those, what
is read off their answers is tested.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Mesa's compilers are Linux's")


def run_script(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_compiler.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def driver(monkeypatch):
    """The module beside the script."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compilers.driver as module

    return module


@pytest.fixture
def drivers(driver):
    """All drivers by their vendors."""
    from compilers.drivers import DRIVERS

    return DRIVERS


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All kernels of a GPU's defaults, for heads of 64 and of 128 elements: 1B and 8B."""
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    process = run_script("--layers", 2, "--products", "default", "--json", file)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, json.loads(file.read_text())


@pytest.mark.full
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
        "stablelm-2-12b", "gemma-2-2b", "gemma-3n-e2b", "phi-3-mini",
    ),
    "with experts or states": (
        "qwen3.5-4b", "qwen3-next-80b-a3b", "lfm2-1.2b", "gpt-oss-20b", "deepseek-v2-lite",
        "moonlight-16b-a3b",
    ),
}  # fmt: skip


@pytest.mark.full
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


# No default of a GPU launches them: other products, matrix units, streamed weights, subgroups,
# weights whose blocks are not those of neighbours, and the copies that software GPUs read.
ELSEWHERE = (
    "attention/delta_sizes.wgsl", "attention/dkdv.wgsl", "attention/dq.wgsl",
    "attention/forward.wgsl", "experts/factors.wgsl",
    "few_rows/narrow.wgsl", "few_rows/narrow_rows.wgsl",
    "few_rows/strip_copy.wgsl", "few_rows/strip_scales.wgsl", "few_rows/strips.wgsl",
    "few_rows/strips_glu.wgsl", "few_rows/strips_rotated.wgsl", "few_rows/subgroup.wgsl",
    "gemm/factors.wgsl", "gemm/sizes.wgsl", "tensor/add_rounded.wgsl",
    "tensor/copy.wgsl", "tensor/scale.wgsl",
    "trained_rows/overwrite_looked_up.wgsl",
    # Of images, of reward models and classifiers, and of prompts that several requests share
    "image_features/add.wgsl", "image_features/replace.wgsl", "image_features/text_rows.wgsl",
    "rows/mean.wgsl", "score/forward.wgsl", "score/hidden_gradient.wgsl", "score/labels.wgsl",
    "score/pairs.wgsl", "score/weight_gradient.wgsl",
    "kv_cache/read_sequence.wgsl", "kv_cache/write_sequence.wgsl",
    # Of software GPUs, of GRPO with top_entropy_quantile, and of Gemma 4's tower
    "kv_cache/attend_subgroup.wgsl", "mamba_scan/tokens.wgsl", "policy/threshold.wgsl",
    "rows/standardize.wgsl", "tensor/clamp.wgsl",
)  # fmt: skip


def test_every_shader_is_in_the_plans(monkeypatch):
    """A kernel that comes anew is compiled by RADV, too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from compilers.plans import trace
    from compilers.published import STEPS

    launched = {
        shader.path
        for name, step in STEPS.items()
        for shader in trace(name, step, "default", GPU_PROFILE, 1024, 2).shaders.values()
    }
    folder = wgsl.shader_folder()
    every = {path.relative_to(folder).as_posix() for path in folder.rglob("*.wgsl")}
    own = ("common/", "probe/", "bench/")
    other = ("_texture.wgsl", "_matrix.wgsl", "attention/factors.wgsl")
    every = {path for path in every if not path.startswith(own) and not path.endswith(other)}
    assert every - launched == set(ELSEWHERE)


def test_tiles_of_matrix_units_are_deep_where_that_is_asked_for(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from compilers.driver import UNITS
    from compilers.plans import profiles

    from qlora_wgpu.gpu.kernel_config import GPU_PROFILE

    every = profiles(GPU_PROFILE, [], UNITS)
    asked = profiles(GPU_PROFILE, ["matrix", "deep"], UNITS)
    assert list(every) == ["tiled (the default)", "register", "matrix"]
    assert {kind: profile.matrix_deep for kind, profile in asked.items()} == {
        "matrix": False,
        "deep": True,
    }
    assert asked["deep"].gemm_kind == "matrix" == every["matrix"].gemm_kind


@pytest.mark.full
def test_every_kernel_has_figures_and_a_line(done):
    text, report = done
    assert "Mesa" in report["mesa"] and "NAVI21" in report["device"]
    for row in report["kernels"]:
        assert row["kernel"] in text and not row["failure"]
        assert 0 < row["registers"] <= 256 and row["waves"] > 0 and row["latency"] > 0, row
    kernels = {row["kernel"].partition("(")[0]: row for row in report["kernels"]}
    forward, norm = kernels["glu/forward.wgsl"], kernels["rms_norm/forward.wgsl"]
    assert (forward["barriers"], forward["lds"]) == (0, 0) < (norm["barriers"], norm["lds"])
    # Twice a layer in a training step, and once for the next token of one text and of three.
    assert list(forward["launches"].values()) == [8, 8]
    assert "adamw/clip.wgsl" in kernels
    for plan in report["plans"].values():
        assert plan["kernels"] > 20 and plan["failed"] == 0


def test_a_kernel_that_kills_the_compiler_is_told(driver, drivers, tmp_path):
    module = tmp_path / "broken.spv"
    module.write_bytes(b"\x03\x02\x23\x07" + bytes(16))
    (outcome,) = driver.Compiler(drivers["amd"]).compile([module])
    assert outcome.figures is None
    assert "RADV died of signal" in outcome.failure and "Mesa" in outcome.driver


def test_a_missing_driver_is_a_sentence(driver, drivers, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_FOLDERS", (str(tmp_path),))
    with pytest.raises(driver.DeviceError, match="apt-get install mesa-vulkan-drivers"):
        driver.Compiler(drivers["amd"])


@pytest.mark.full
def test_any_model_and_adapter_is_compiled(tmp_path):
    """A config.json by its path, with an adapter and operands that no step of ours has."""
    config = {
        "model_type": "llama", "hidden_size": 288, "intermediate_size": 520,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 72, "vocab_size": 1000,
    }  # fmt: skip
    file, figures = tmp_path / "config.json", tmp_path / "figures.json"
    file.write_text(json.dumps(config))
    done = run_script(
        "--model", file, "--products", "default", "--json", figures, "--rank", 3, "--dropout", 0.1,
        "--dora", "--targets", "q_proj", "down_proj", "--checkpointing", "--compute-dtype",
        "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["kernel"]: row for row in json.loads(figures.read_text())["kernels"]}
    assert not [kernel for kernel, row in rows.items() if row["spilled"] or row["scratch"]]
    attention = [kernel for kernel in rows if kernel.startswith("attention/")]
    assert any("HEAD_UNITS=18" in kernel for kernel in attention)  # 72 elements in fours
    assert any(kernel.startswith("dora/") for kernel in rows)
    assert any(kernel.startswith("dropout/") for kernel in rows)
    assert not any("bfloat16" in kernel for kernel in rows)


@pytest.mark.cover(said=["unknown layer 'nothing'"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama-9"), "there is no model 'llama-9': give one of llama-3.2-1b, "),
        (("--rank", 0), "r in LoraConfig must be at least 1, got 0"),
        (("--targets", "nothing"), "unknown layer 'nothing'"),
    ],
)
def test_what_cannot_be_traced_is_a_sentence(arguments, said):
    done = run_script(*arguments, "--layers", 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.startswith("error: ")


@pytest.mark.full
def test_kernels_that_are_not_there_are_a_sentence():
    done = run_script("--layers", 1, "--only", "nonsense/")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no kernel of these plans begins with nonsense/" in done.stderr


# What each driver of Mesa 26.2.6 told of a kernel, as far as it is read, and what is made of it.
TOLD = {
    "intel": (
        {"Instructions": 6105, "Cycles": 1059720, "Spills": 377, "Fills": 411, "Loops": 3,
         "Scratch Memory Size": 4096, "Max live registers": 203, "Workgroup Memory Size": 16384,
         "SENDs": 900, "Source hash": 12046027341238272650},
        {"spilled": 377, "filled": 411, "scratch": 4096, "live_registers": 203, "lds": 16384,
         "instructions": 6105, "cycles": 1059720, "sends": 900},
    ),
    "apple": (
        {"Instructions": 2671, "ALU": 1, "GPRs": 255, "Uniforms": 48, "Scratch": 64, "Spills": 16,
         "Fills": 17, "Threads": 384, "Code size": 9000},
        {"registers": 255, "uniforms": 48, "scratch": 64, "spilled": 16, "filled": 17,
         "threads": 384, "instructions": 2671},
    ),
    "nvidia": (
        {"Instruction count": 1909, "Static cycle count": 32004, "Max warps/SM": 16,
         "Spills to memory": 2, "Fills from memory": 3, "Spills to reg": 9, "Number of GPRs": 128,
         "SLM size": 16},
        {"registers": 128, "spilled": 2, "filled": 3, "scratch": 16, "waves": 16,
         "instructions": 1909, "cycles": 32004},
    ),
    "qualcomm": (
        {"Max Waves Per Core": 4, "Instruction Count": 3399, "Registers used": 48,
         "Half-registers used": 1, "STP Count": 115, "LDP Count": 114},
        {"registers": 48, "spilled": 115, "filled": 114, "waves": 4, "instructions": 3399},
    ),
}  # fmt: skip


@pytest.mark.parametrize("vendor", TOLD)
def test_other_drivers_figures_get_our_names(driver, drivers, monkeypatch, tmp_path, vendor):
    """The worst kernel comes first, and columns are those that the driver has figures for."""
    from compilers.report import show, to_json
    from compilers.spirv import empty_module

    shim, module = tmp_path / "shim.so", tmp_path / "module.spv"
    shim.touch()
    module.write_bytes(empty_module(b"main"))
    monkeypatch.setattr(driver, "driver_file", lambda name: tmp_path / f"{name}_icd.json")
    monkeypatch.setattr(driver, "_SCRIPT", tmp_path / "answers.py")
    told, wanted = TOLD[vendor]
    answers = [
        {"failure": "", "driver": "Mesa 26.2.6", "device": "a card", "figures": figures}
        for figures in (
            {"subgroup_size": 32, "statistics": dict.fromkeys(told, 0)},
            {"subgroup_size": 8, "statistics": told},
        )
    ]
    # Only with the library before it does the driver see a card.
    (tmp_path / "answers.py").write_text(
        "import os, json\n"
        f"assert os.environ['LD_PRELOAD'].split()[0] == {str(shim)!r}\n"
        f"for answer in {answers!r}: print(json.dumps(answer))\n"
    )
    compiler = driver.Compiler(drivers[vendor], shim=shim)
    mild, bad = compiler.compile([module, module])
    assert bad.figures == {**wanted, "subgroup_size": 8, "barriers": 0}
    report = to_json("a driver", compiler.family, [], {"mild": mild, "bad": bad})
    assert [row["kernel"] for row in report["kernels"]] == ["bad", "mild"]
    head, first = show(report).splitlines()[2:4]
    assert head.split()[:1] == ["subgroup"] and first.split()[0] == "8"
    assert ("live" in head) == (vendor == "intel") and "latency" not in head
    assert str(wanted["spilled"]) in first.split()


@pytest.mark.parametrize("vendor", ["intel", "apple", "nvidia", "qualcomm"])
def test_a_missing_library_is_a_sentence(driver, drivers, monkeypatch, tmp_path, vendor):
    monkeypatch.setattr(driver, "driver_file", lambda name: tmp_path / f"{name}_icd.json")
    monkeypatch.setattr(driver, "_LIBRARIES", ("nowhere",))
    own = drivers[vendor]
    missing = f"{own.name} compiles nothing without {own.shim}"
    with pytest.raises(driver.DeviceError, match=missing):
        driver.Compiler(own)
    with pytest.raises(driver.DeviceError, match=r"gone\.so is not there: --shim names the file"):
        driver.Compiler(own, shim=tmp_path / "gone.so")


def test_chips_have_names(drivers):
    forced = drivers["nvidia"].forced
    assert forced("ga102") == forced("172") == {"NOUVEAU_CHIPSET": "172"}
    assert drivers["intel"].forced("bmg") == {"INTEL_STUB_GPU_PLATFORM": "bmg"}
