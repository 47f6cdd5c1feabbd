"""A few shaders with one operator changed, each refused; the campaign draws hundreds."""

import random

import pytest

from campaigns.shader_mutants import Loader, Mutant, of_a_file, of_a_statement
from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.wgsl import load_shader
from qlora_wgpu.selfcheck.cases import cases_for
from qlora_wgpu.selfcheck.results import _result, variants

# File, what stands there, what instead, and the check that notices.
MUTANTS = [
    ("cross_entropy/total.wgsl", "stats[0] += total", "stats[0] = total", "cross_entropy"),
    ("cross_entropy/total.wgsl", "i += THREADS", "i += THREADS * 8u", "cross_entropy"),
    ("common/log.wgsl", "(1.0 / 3.0 +", "(1.25 / 3.0 +", "logits"),
    ("common/bfloat16.wgsl", "+ odd)", "- odd)", "rounding"),
    ("rms_norm/backward.wgsl", "(r * mean)", "(r + mean)", "rms_norm"),
    ("gated_delta/gate_gradients.wgsl", "sum = end * sum +", "sum =", "gated_delta_rule"),
    ("sampling/choose.wgsl", "x[$e] > best", "x[$e] >= best", "choice"),
    ("common/gemm_results.wgsl", "v += load_residual(at)", "v = load_residual(at)", "linear"),
]


@pytest.fixture(scope="module")
def load():
    loader = Loader()
    with loader.installed():
        yield loader


@pytest.mark.parametrize(("path", "before", "after", "check"), MUTANTS)
def test_a_mutant_is_refused(device, load, path, before, after, check):
    lines = (wgsl.shader_folder() / path).read_text().split("\n")
    numbers = [i for i, line in enumerate(lines) if before in line]
    assert numbers
    for number in numbers:  # whichever of them this GPU's kernels have
        changed = lines[number].replace(before, after)
        with load.mutated(Mutant("chosen", path, lines[number], changed, number)):
            assert is_refused(device, check), number


def is_refused(device, check):
    """Whether any case of a check fails, of any way that this GPU has of cutting kernels."""
    return any(
        not _result(device, [case], variant, profile, "bfloat16").good
        for variant, profile in variants(device).items()
        for case in cases_for(profile)
        if case.check == check
    )


def test_mutants_follow_from_their_seed_and_change_something():
    shaders = [load_shader("tensor/fill.wgsl", (("ELEMENTS", 1), ("FLAT", 8)), ())]
    for seed in range(20):
        one, again = (of_a_file(random.Random(seed)) for _ in range(2))
        assert one == again and one.before != one.after
        assert of_a_statement(random.Random(seed), shaders).path == "tensor/fill.wgsl"
