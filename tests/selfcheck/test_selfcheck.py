"""The check of a driver finds what is wrong, and says so once."""

import json
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from ops.test_formulas import COUNTS  # which are held to more there

from qlora_wgpu.errors import DeviceError
from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.kernels import kernels
from qlora_wgpu.kernels.attention import MatrixTiles
from qlora_wgpu.kernels.common import Kernel
from qlora_wgpu.kernels.gemm import matrix_units
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw
from qlora_wgpu.ops.rope import rope
from qlora_wgpu.selfcheck import (
    check_device,
    checks,
    ensure_sound,
    num_checks,
    results,
    runner,
    variants,
)
from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.coverage import covering
from qlora_wgpu.selfcheck.runner import Runner, Tracer, TracingDone

# Launched by tools that do not compute a model.
NO_KERNELS = {"common", "probe", "bench"}


# Whose kernels no test of tests/ops computes.
ONLY_HERE = (
    "added_features", "altup_correct", "altup_predict", "class_scores", "gated_group_norm",
    "image_features", "label_scores", "mamba_step", "mamba_steps", "reward_pairs",
    "stacked",
)  # fmt: skip


# Whose kernels take long to compile, and are computed by tests of tests/ops in the same ways.
ELSEWHERE = {
    "dora", "experts_of_new_tokens", "few_rows", "few_rows_of_a_group", "glu_of_packed_weights",
}  # fmt: skip


@pytest.mark.cover(
    index=[0], dtype=["bfloat16"], check=sorted(checks().keys() - COUNTS.keys() - ELSEWHERE)
)
@pytest.mark.quick("values", check=ONLY_HERE)
@pytest.mark.parametrize("check", checks())
@pytest.mark.parametrize("dtype", results.DTYPES)
@pytest.mark.parametrize("index", range(4))
def test_this_driver_is_sound(device, index, dtype, check, pytestconfig):
    """All cases of a check in full; else one, or as many as have each statement once."""
    for name, profile in list(variants(device).items())[index : index + 1]:
        cases = [case for case in cases_for(profile) if case.check == check]
        if pytestconfig.getoption("tier") != "full" and check in ONLY_HERE:
            traced = results._traced(device, profile, dtype, cases)
            every = frozenset().union(*(own.statements for own in traced.values()))
            cases = covering(every, traced)[0] or cases
        elif pytestconfig.getoption("tier") != "full":
            cases = cases[:1]
        outcome = results._result(device, cases, name, profile, dtype)
        assert outcome.good, outcome


@pytest.mark.full
def test_doctor_goes_through_all_checks_of_all_variants_in_both_types(
    device, traced_once, monkeypatch
):
    def noted(device, cases, variant, profile, dtype):
        assert profile == variants(device)[variant] and len({case.check for case in cases}) == 1
        return variant, dtype, cases[0].check

    monkeypatch.setattr(results, "_result", noted)
    every = set(product(variants(device), ("float32", "bfloat16"), checks()))
    assert set(check_device(device)) == every and len(every) == num_checks(device)


@pytest.mark.slow
def test_everything_is_checked(device, traced_once, monkeypatch):
    launch, chosen, launched = Kernel.launch, set(), set()

    def noted(kernel, g, problem):
        chosen.add(next(v for v in kernel.variants if v.fits(problem, g.profile)))
        launch(kernel, g, problem)

    monkeypatch.setattr(Kernel, "launch", noted)
    for profile in variants(device).values():
        for case in results.cases_of(device, profile, "bfloat16"):
            run = Tracer(device, profile, "bfloat16", in_textures=case.in_textures)
            with suppress(TracingDone):
                case.function(run, *case.arguments)
            launched |= run.shaders
    if not device.is_cpu:
        return  # only software adapters run the kernels of GPUs and their own
    # Matrix units are no variant of theirs.
    every = {v for kernel in kernels() for v in kernel.variants}
    on_units = {v for v in every if v.launch is matrix_units or of_tiles(v.launch)}
    assert len(on_units) == 2 and chosen | on_units == every
    folder = wgsl.shader_folder()
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*.wgsl")}
    kernel_paths = {path for path in paths if path.split("/")[0] not in NO_KERNELS}
    assert launched == {path for path in kernel_paths if not path.endswith("_matrix.wgsl")}


def of_tiles(launch):
    return isinstance(getattr(launch, "__self__", None), MatrixTiles)


@pytest.mark.full
def test_finding_out_what_checks_launch_runs_nothing(device, monkeypatch):
    """What a run does not need may be what its driver refuses, or crashes of."""
    programs = []
    monkeypatch.setattr(runner, "Program", lambda *given: programs.append(given))
    assert results._traced(device, device.profile, "bfloat16")
    assert not programs


@pytest.fixture
def broken(monkeypatch):
    """Breaks one shader's text; undone afterwards."""

    def breaking(path, before, after):
        original = wgsl.shader_source

        def read(file):
            code = original(file)
            assert file != path or before in code
            return code.replace(before, after) if file == path else code

        monkeypatch.setattr(wgsl, "shader_source", read)
        wgsl.load_shader.cache_clear()

    yield breaking
    monkeypatch.undo()
    wgsl.load_shader.cache_clear()


@pytest.fixture
def sound(device, monkeypatch, tmp_path):
    """Checks a run of AdamW and a rotation, what was passed kept in a folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def checking(progress=lambda text: None, shape=(3, 48), dtype="bfloat16", rotates=True):
        run = Runner(device, device.profile, dtype)
        batch = run.batch(np.ones((1, shape[0]), np.int64))
        table = run.graph.constant("table", np.zeros((shape[0], 12, 2), np.float32))
        (y,) = rope(
            run.graph, [run.operand(np.zeros(shape))], table, batch, 24, 24, interleaved=True
        )
        flat = [vector("flat", 8, "float32", Storage("", "check", 32)) for _ in range(6)]
        adamw(run.graph, OptimizerState(*flat[:2], flat[2:4], *flat[4:]), OptimizerConfig())
        launches = compile_plan(run.graph, (y,) if rotates else ()).launches
        ensure_sound(device, Device, run.graph, launches, progress)

    return checking


@pytest.mark.slow
def test_wrong_results_are_refused_and_not_remembered(sound, broken):
    broken("adamw/update.wgsl", "sqrt(new_v)", "new_v")
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"gives wrong results: optimizer failed: .* of \d+"):
            sound()
    assert not results.cache_file().exists()


@pytest.mark.slow
def test_a_driver_that_refuses_a_shader(sound, broken):
    broken("rope/rotate.wgsl", "fn rotated", "fn other")
    with pytest.raises(DeviceError, match="rope failed: "):
        sound()


@pytest.mark.slow
@pytest.mark.parametrize("beyond", ["row >= 1024u", "column >= 2048u"])
def test_products_that_are_wrong_when_large_are_found(broken, beyond):
    before = "    var v = value;\n"
    broken("common/gemm_results.wgsl", before, f"{before}    if ({beyond}) {{ v *= 1.1; }}\n")
    device = Device()
    cases = [case for case in cases_for(GPU_PROFILE) if case.check == "linear"]
    found = (
        results._result(device, [case], "as on GPUs", GPU_PROFILE, "bfloat16")
        for case in reversed(cases)
    )
    assert any(not result.good for result in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "before", "after", "check"),
    [
        ("cross_entropy/total.wgsl", "stats[0] += total", "stats[0] = total", "cross_entropy"),
        ("rms_norm/backward.wgsl", "(r * mean)", "(r + mean)", "rms_norm"),
        ("sampling/choose.wgsl", "x[$e] > best", "x[$e] >= best", "choice"),
    ],
)
def test_one_other_operator_is_found(broken, path, before, after, check):
    broken(path, before, after)
    device = Device()  # which has compiled nothing yet
    cases = [case for case in cases_for(device.profile) if case.check == check]
    found = (results._result(device, [case], "own", device.profile, "bfloat16") for case in cases)
    assert any(not result.good for result in found)


@pytest.mark.slow
def test_what_a_run_does_not_launch_is_not_checked(sound, broken):
    broken("glu/forward.wgsl", "fn each", "fn other")
    sound()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (  # naga
            "GPU cannot compile a: Validation Error\n\nCaused by:\n  In create, label = 'a'\n\n"
            "Shader 'a' parsing error: name `smooth` is reserved\n 34 │ let smooth\n   ^^^^^^\n",
            "Shader 'a' parsing error: name `smooth` is reserved",
        ),
        ("Validation Error\n\nCaused by:\n  In bind, label = 'a'\n    7 for 6", "7 for 6"),
        (  # Tint
            "GPU cannot compile a: Error while parsing WGSL: :3:4 error: 'smooth' is reserved\n"
            "let smooth\n    ^^^^^^\n\n - While calling [Device].CreateShaderModule([a]).\n",
            "GPU cannot compile a: Error while parsing WGSL: :3:4 error: 'smooth' is reserved",
        ),
        ("index 2 not present\nlayout: []\n - While calling [Device].Bind", "index 2 not present"),
        ("", "ValueError"),
    ],
)
def test_a_refusal_is_the_line_that_says_what_is_wrong(message, reason):
    assert results._reason(ValueError(message)) == reason


@pytest.mark.slow
def test_a_sound_driver_is_remembered_for_what_was_checked(settled_device, sound, traced_once):
    messages, device = [], settled_device
    before = device.memory.total
    sound(messages.append)
    assert device.memory.total == before  # nothing of it stays
    assert begun(messages) == 1 and len(known()) == 1
    sound(messages.append)
    sound(messages.append, shape=(5, 72))  # sizes are no reason
    assert begun(messages) == 1
    sound(messages.append, dtype="float32")
    assert begun(messages) == 2 and len(known()) == 2


@pytest.mark.slow
def test_the_checks_of_a_first_run_are_counted(sound, traced_once):
    messages = []
    sound(messages.append)
    first, *counted = messages
    assert first == "Verifying the GPU driver (first run only)" and counted
    assert counted == [f"{first} {i}/{len(counted)}" for i in range(1, len(counted) + 1)]


def begun(messages):
    """How often checks were told to begin."""
    return messages.count("Verifying the GPU driver (first run only)")


def known():
    return json.loads(results.cache_file().read_text())["sound"]


@pytest.mark.slow
def test_only_what_is_new_is_checked(device, sound, traced_once, monkeypatch):
    """A run with one more shader runs the checks of that alone, and one with fewer none."""
    ran, check = [], results._result
    monkeypatch.setattr(
        results, "_result", lambda d, c, *more: ran.append(c[0]) or check(d, c, *more)
    )
    sound(rotates=False)
    first, ran[:] = list(ran), []
    sound()
    both, ran[:] = list(ran), []
    assert first and both and not set(first) & set(both)
    assert any(case.check == "optimizer" for case in first)
    assert any(case.check == "rope" for case in both)
    assert not any(case.check.startswith("optimizer") for case in both)
    sound(rotates=False)
    assert not ran and len(known()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[]", "{", '{"sound": []}', '{"sound": {"a": 1}, "wrong": 3}'])
def test_what_is_kept_may_be_anything(sound, traced_once, text):
    results.cache_file().parent.mkdir(parents=True)
    results.cache_file().write_text(text)
    messages = []
    sound(messages.append)
    sound(messages.append)
    assert begun(messages) == 1


@pytest.mark.parametrize("got", [1.0, float("nan")])
@pytest.mark.parametrize("expected", [float("nan"), float("inf")])
def test_a_reference_that_is_no_number_is_no_check(device, got, expected):
    run = Runner(device, device.profile, "float32")
    run.compare(np.array([1.0, got]), np.array([1.0, expected]))
    assert run.excess == run.worst == float("inf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_nobody_wrote_is_not_a_number(device, dtype):
    run = Runner(device, device.profile, dtype)
    unwritten = run.graph.operand("unwritten", 3, 20)
    run.graph.launch(
        "tensor/convert.wgsl", 9, {"x": unwritten, "y": (y := run.graph.float32("y", 3, 20))},
        {"units": 9},
    )  # fmt: skip
    (got,) = run.run(y)
    assert np.isnan(got).all()
