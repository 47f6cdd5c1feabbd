"""Whatever a family launches is executed by a check, statement for statement."""

from dataclasses import replace

import pytest
from references.sized import traced_configs, with_head_dim

from qlora_wgpu.config import Config, LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.matrix import Limits, MatrixShape
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs.workload import TrainingWorkload
from qlora_wgpu.selfcheck.cases import Case
from qlora_wgpu.selfcheck.coverage import Footprint, covering

pytestmark = pytest.mark.slow

PROFILES = {
    "own": None,
    # What software GPUs have on processors of other vectors than this one.
    "4 lanes": cpu_profile(4),
    "8 lanes": cpu_profile(8),
    "8 lanes, 10 rows": cpu_profile(8, 10, short_loops=True),
    "8 lanes, in textures": cpu_profile(8, 10, in_textures=True, short_loops=True),
    "16 lanes": cpu_profile(16),
    "16 lanes, 16 rows": cpu_profile(16, 16),
    "buffers": CPU_PROFILE,
    "registers": replace(GPU_PROFILE, gemm_kind="register", attention_kind="register"),
    "workgroup memory": GPU_PROFILE,
    # What GPUs have that tests seldom run on.
    "few registers": gpu_profile(None, few_registers=True),
    "loads ahead": gpu_profile(None, hoists_loads=True),
    "matrix units": gpu_profile(MatrixShape(16, 16, 16, 32), Limits(1024, 49_152)),
    "matrix units, deep": gpu_profile(
        MatrixShape(16, 16, 16, 32), Limits(1024, 49_152), deep_tiles=True
    ),
    "matrix units of 8": gpu_profile(MatrixShape(8, 8, 8, 32)),
    "matrix units of f32": gpu_profile(MatrixShape(8, 8, 8, 32, "f32")),
}
CONFIGS = traced_configs()
# Kinds of kernels; the others of each are cut otherwise.
KINDS = ["own", "registers", "workgroup memory", "matrix units"]
SETTINGS = (
    {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1, "gradient_checkpointing": True},
    {"gradient_checkpointing": False},
)


def launches(family, index, dtype, profile, lora=None, head_dim=0, length=24):
    """All that a run of a family launches, its options and heads in turn."""
    lora = lora or LoraConfig(
        r=5, lora_dropout=0.0 if index % 4 == 1 else 0.1, use_dora=index % 2 == 1,
        trainable_token_indices=[0, 7],
    )  # fmt: skip
    quant = QuantConfig(scheme=("nf4", "none")[index // 2 % 2], double_quant=index % 3 > 0)
    config = with_head_dim(CONFIGS[family], head_dim or (24, 64, 128)[index % 3])
    train = {"compute_dtype": dtype, "per_device_train_batch_size": 2, **SETTINGS[index % 2]}
    settings = Config.model_validate({"model": {"path": "none"}, "train": train})
    layout = ModelPlan(
        Pretrained.from_config(config), lora, quant, dtype, profile=profile, max_binding=1 << 27
    )
    return list(TrainingWorkload.of(settings, layout.pretrained, length).launches(layout))


@pytest.mark.parametrize("share", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.cover("values", name=["own", "matrix units"], share=[1, 2])
@pytest.mark.parametrize("name", PROFILES)
def test_every_statement_is_checked(device, name, dtype, share, traced):
    profile = PROFILES[name] or device.profile
    if name == "own" and profile in PROFILES.values():
        return  # its other name's
    executed = traced(device, profile, dtype)
    for index, family in list(enumerate(CONFIGS))[share::4]:
        ran = launches(family, index, dtype, profile)
        cases, missing = covering(Footprint.of(ran).statements, executed)
        assert not missing, (family, sorted(missing))
        assert_chosen_for_a_reason(cases, Footprint.of(ran).statements, executed)


ODD = {
    # Heads that are no whole products of matrix units, and those of which few registers hold a row.
    "gemma2": (20, 252),
    # Latent attention, whose values are narrower than its keys; products whose sums norms add up.
    "glm4_moe_lite": (72,),
    "glm4": (256,),
    "mixtral": (256,),
    # Norms of whole queries and keys, which want them in float32.
    "olmo3": (64,),
    # Layers so narrow that invocations make them one by one, with biases.
    "ernie4_5": (8,),
}


@pytest.mark.full
@pytest.mark.parametrize("family", ODD)
@pytest.mark.parametrize("name", PROFILES)
def test_every_statement_of_other_heads_is_checked(device, name, family, traced):
    """Shapes that families are not traced with above, which other kernels or cuts take."""
    profile = PROFILES[name] or device.profile
    for head_dim in ODD[family]:
        for index in (0, 3):
            dtype = ("bfloat16", "float32")[index % 2]
            ran = launches(
                family, index, dtype, profile, LoraConfig(r=8), head_dim=head_dim, length=33
            )
            _, missing = covering(Footprint.of(ran).statements, traced(device, profile, dtype))
            assert not missing, (head_dim, dtype, sorted(missing))


@pytest.mark.cover(name=["matrix units"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["registers", "workgroup memory", "matrix units"])
def test_every_statement_of_fused_layers_is_checked(device, name, family, traced):
    profile = PROFILES[name]
    ran = launches(family, 0, "bfloat16", profile, LoraConfig(r=8))
    assert any("y1" in launch.tensors for launch in ran)
    assert any("x1" in launch.tensors for launch in ran)
    _, missing = covering(Footprint.of(ran).statements, traced(device, profile, "bfloat16"))
    assert not missing, sorted(missing)


@pytest.mark.cover("values", name=KINDS)
@pytest.mark.parametrize("name", PROFILES)
def test_every_statement_of_pairs_on_both_ends_is_checked(device, name, traced):
    profile = PROFILES[name] or device.profile
    lora = LoraConfig(r=5, target_modules=["q_proj", "embed_tokens", "lm_head"])
    ran = launches("llama", 0, "bfloat16", profile, lora)
    assert any(launch.path == "embedding_pair/gradient.wgsl" for launch in ran)
    _, missing = covering(Footprint.of(ran).statements, traced(device, profile, "bfloat16"))
    assert not missing, sorted(missing)


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
@pytest.mark.cover("values", name=KINDS)
@pytest.mark.parametrize("name", PROFILES)
def test_every_statement_of_an_objective_over_answers_is_checked(device, name, objective, traced):
    profile = PROFILES[name] or device.profile
    train = {"objective": objective, "per_device_train_batch_size": 2}
    settings = Config.model_validate({"model": {"path": "none"}, "train": train})
    base = Pretrained.from_config(with_head_dim(CONFIGS["llama"], 24))
    layout = ModelPlan(
        base, LoraConfig(r=5), QuantConfig(), "bfloat16", profile=profile, max_binding=1 << 27
    )
    ran = list(TrainingWorkload.of(settings, layout.pretrained, 24).launches(layout))
    paths = {launch.path for launch in ran}
    assert ("preference/divergence.wgsl" in paths) == (objective == "kto")
    _, missing = covering(Footprint.of(ran).statements, traced(device, profile, "bfloat16"))
    assert not missing, sorted(missing)


@pytest.mark.parametrize("gradient", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "lion"])
@pytest.mark.cover("values", name=KINDS)
@pytest.mark.parametrize("name", PROFILES)
def test_every_statement_of_an_update_is_checked(device, name, optimizer, gradient, traced):
    profile = PROFILES[name] or device.profile
    settings = Config.model_validate(
        {
            "model": {"path": "none"},
            "train": {"gradient_dtype": gradient},
            "optim": {"name": optimizer},
        }
    )
    layout = ModelPlan(
        Pretrained.from_config(with_head_dim(CONFIGS["llama"], 24)), LoraConfig(r=5),
        QuantConfig(), "bfloat16", profile=profile, max_binding=1 << 27,
        forms=AdapterDtypes.of(settings),
    )  # fmt: skip
    ran = list(TrainingWorkload.of(settings, layout.pretrained, 24).launches(layout))
    _, missing = covering(Footprint.of(ran).statements, traced(device, profile, "bfloat16"))
    assert not missing, sorted(missing)


def assert_chosen_for_a_reason(cases, needed, traced):
    """Each check executes something that is needed and that no other of them does."""
    assert len(set(cases)) == len(cases) < len(traced) / 4
    for case in cases:
        others = (traced[other].statements for other in cases if other is not case)
        assert needed.difference(*others) & traced[case].statements, case


def test_checks_of_what_a_run_compiles_come_first():
    statements = frozenset({("gemm/nt.wgsl", "sum += x * w")})
    short, compiled = (Case(name, print, (), False) for name in ("short", "compiled"))
    traced = {
        short: Footprint(statements, {"nt(TILE=1)": 1_000}),
        compiled: Footprint(statements, {"nt(TILE=8)": 9_000}),
    }
    assert covering(statements, traced) == ([short], frozenset())
    assert covering(statements, traced, {"nt(TILE=8)": 9_000}) == ([compiled], frozenset())


def test_a_statement_that_no_check_has_is_noticed(device, traced):
    graph = Graph("bfloat16", device.profile)
    x, y = graph.float32("x", 3, 8), graph.operand("y", 3, 8)
    graph.launch("tensor/convert.wgsl", 3, {"x": x, "y": y}, {"units": 3})
    needed = Footprint.of(graph.launches).statements | {("tensor/convert.wgsl", "let new = # + #")}
    _, missing = covering(needed, traced(device, device.profile, "bfloat16"))
    assert missing == {("tensor/convert.wgsl", "let new = # + #")}


def test_how_bindings_are_read_and_written_counts_for_all_shaders(device):
    """Whatever they are called; what a shader computes counts for its own file."""

    def statements(path, names, params):
        graph = Graph("bfloat16", device.profile)
        tensors = {name: graph.operand(name, 3, 8) for name in names}
        graph.launch(path, 3, tensors, params)
        return Footprint.of(graph.launches).statements

    converted = statements("tensor/convert.wgsl", ("x", "y"), {"units": 3})
    added = statements("tensor/add.wgsl", ("a", "b", "y"), {"units": 3})
    shared = {text for path, text in converted & added if path == "operands"}
    assert any(text.startswith("fn store_x(") for text in shared)
    assert any(text.startswith("fn load_x(") or "Raw_x" in text for text in shared)
    own = {path for path, _ in added - converted}
    assert own <= {"tensor/add.wgsl", "operands"} and "tensor/add.wgsl" in own


@pytest.mark.cover("values", name=KINDS)
@pytest.mark.parametrize("name", PROFILES)
def test_copies_for_texts_are_checked_and_those_of_the_run_are_its_own(device, name, monkeypatch):
    profile = PROFILES[name] or device.profile
    settings = Config.model_validate({"model": {"path": "none"}})
    base = Pretrained.from_config(with_head_dim(CONFIGS["llama"], 24))

    def checked(machine):
        monkeypatch.setattr("qlora_wgpu.model.derived_weights.machine_bytes", lambda: machine)
        layout = ModelPlan(
            base, LoraConfig(r=5), QuantConfig(), "bfloat16", profile=profile, max_binding=1 << 27
        )
        paths = {
            launch.path
            for launch in TrainingWorkload.of(settings, layout.pretrained, 24).launches(layout)
        }
        assert not layout.packed_weights.nbytes and not layout.packed_weights.needs_fill
        return {path for path in paths if "few_rows/strip" in path}

    both = {"few_rows/strips.wgsl", "few_rows/strip_copy.wgsl"}
    assert checked(1 << 40) == (both if profile.textures else set())
    assert not checked(None)
