"""Shapes, workloads, sums by kernel and the report of ``bench``; no GPU is opened."""

import io
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from qlora_wgpu.bench import ceilings, workload
from qlora_wgpu.bench.ceilings import Ceilings
from qlora_wgpu.bench.gaps import Gaps
from qlora_wgpu.bench.kernels import KernelTime, sum_up
from qlora_wgpu.bench.measure import Measurement
from qlora_wgpu.bench.random_folder import RandomFolder
from qlora_wgpu.bench.report import show, to_json
from qlora_wgpu.bench.shapes import SHAPES, config_of, find_shape
from qlora_wgpu.bench.step import StepTimes
from qlora_wgpu.bench.timing import Spread, best_of, clocked_submits
from qlora_wgpu.bench.workload import Workload
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import CheckpointError, ConfigError, OutOfMemoryError, UnsupportedModelError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.profile import CPU_PROFILE
from qlora_wgpu.gpu.wgsl import load_shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import matrix
from qlora_wgpu.model.quantized_weights import own_format
from qlora_wgpu.quant import quantize_nf4

CONFIG = {
    "model_type": "llama",
    "vocab_size": 83,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_bias": True,
}


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


# -- shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_every_preset_is_a_model_that_can_be_trained(name):
    for text in (name, name.upper(), name.lower()):
        shape = find_shape(text)
        assert (shape.name, shape.weights) == (name, "random")
        assert shape.config == config_of(name)
    architecture = find_family(shape.config).read(shape.config)
    assert architecture.num_layers == SHAPES[name]["num_hidden_layers"]


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smollm2-135m", 134.5), ("llama-3.2-1b", 1235.8), ("llama-3.1-8b", 8030.3)],
)
def test_presets_have_as_many_parameters_as_their_models(name, millions):
    assert RandomFolder(config_of(name)).num_parameters == pytest.approx(1e6 * millions, rel=1e-3)


def test_a_config_or_a_folder_without_weights_gets_random_ones(config_file):
    for path in (config_file, config_file.parent):
        shape = find_shape(str(path))
        assert shape.config == CONFIG and shape.weights == "random"
        assert isinstance(shape.folder, RandomFolder)


def test_a_folder_with_weights_keeps_them(config_file):
    save_file({"x": np.ones(3, np.float32)}, config_file.parent / "model.safetensors")
    shape = find_shape(str(config_file.parent))
    assert type(shape.folder) is ModelFolder
    assert shape.weights == str(config_file.parent)
    np.testing.assert_array_equal(shape.folder.float32("x"), 1)
    # Its config.json alone still means the shape.
    assert find_shape(str(config_file)).weights == "random"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama-3.2-1", "did you mean 'llama-3.2-1b'"),
        ("XXL", "there is no shape 'XXL'"),
        ("", "there is no shape ''"),
        ("meta-llama/Llama-3.2-1B", "there is no shape"),
        ("gone/config.json", "path of a model folder"),
    ],
)
def test_an_unknown_shape_names_those_there_are(text, expected):
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b") as caught:
        find_shape(text)
    assert expected in str(caught.value)


def test_paths_that_are_no_model(tmp_path, config_file):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_shape(str(empty))
    config_file.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        find_shape(str(config_file))
    config_file.write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    for path in (config_file, config_file.parent):
        with pytest.raises(UnsupportedModelError, match="mamba"):
            find_shape(str(path))
    (config_file.parent / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError):
        find_shape(str(config_file.parent))


def test_random_weights_fit_the_config_and_stay_the_same():
    folder, again = RandomFolder(CONFIG), RandomFolder(CONFIG)
    architecture = find_family(CONFIG).read(CONFIG)
    shapes = {architecture.embed_name: (83, 36), architecture.head_name: (83, 36)}
    for spec in architecture.linears:
        shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
        if spec.bias:
            shapes[f"{spec.name}.bias"] = (spec.out_features,)
    shapes |= architecture.norm_shapes
    assert set(folder.names()) == set(shapes)
    for name, shape in shapes.items():
        array = folder.float32(name)
        assert folder.has(name) and folder.shape(name) == array.shape == shape
        assert array.dtype == np.float32 and np.isfinite(array).all()
        np.testing.assert_array_equal(array, again.float32(name))
        assert folder.quantized(name) is None
        if name in architecture.norms:
            np.testing.assert_array_equal(array, 1)
    assert not folder.has("model.layers.2.mlp.up_proj.weight")
    weight = folder.float32("model.layers.0.mlp.up_proj.weight")
    assert weight.std() == pytest.approx(0.02, rel=0.1)
    assert np.abs(weight - folder.float32("model.layers.1.mlp.up_proj.weight")).max() > 0.01


def test_no_two_rows_of_large_random_weights_are_alike():
    config = {**CONFIG, "vocab_size": 40_000, "hidden_size": 40, "tie_word_embeddings": True}
    weight = RandomFolder(config).float32("model.embed_tokens.weight")
    assert len(np.unique(weight[:, :2], axis=0)) == 40_000


@pytest.mark.parametrize("double", [False, True])
def test_random_codes_are_those_of_normal_weights(double):
    """Codes and scales made without quantizing: as long, and as spread, as if they were."""
    quant = QuantConfig(blocksize=64, double_quant=double)
    config = {**CONFIG, "hidden_size": 900, "intermediate_size": 1501}
    folder = RandomFolder(config, quant=quant)
    name, other = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    made, again = folder.quantized(name), RandomFolder(config, quant=quant).quantized(name)
    exact = quantize_nf4(folder.float32(name), 64, double)
    for field in ("codes", "absmax", "nested_absmax"):
        got, expected = getattr(made, field), getattr(exact, field)
        assert (got is None) == (expected is None)
        if got is not None:
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), field
            np.testing.assert_array_equal(got, getattr(again, field))
    weights = made.dequantize()
    assert weights.shape == (1501, 900) and weights.std() == pytest.approx(0.02, rel=0.02)
    assert abs(weights.mean()) < 1e-4
    assert (weights != folder.quantized(other).dequantize()).mean() > 0.5
    assert len(np.unique(weights[:, :8], axis=0)) == 1501
    form = made.format
    assert (form.blocksize, form.nested_blocksize) == (64, 256 if double else None)
    assert form.nested_blocksize == own_format(quant).nested_blocksize
    for dense in ("model.embed_tokens.weight", "model.norm.weight"):
        assert folder.quantized(dense) is None
    assert RandomFolder(config, quant=QuantConfig(scheme="none")).quantized(name) is None


# -- workloads -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"seq": 1}, "--seq must be at least 2, got 1"),
        ({"rank": -3}, "--rank must be at least 1, got -3"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"seq": 65}, "--seq 65 is longer than the model's 64 positions"),
    ],
)
def test_numbers_that_cannot_be(config_file, changes, expected):
    with pytest.raises(ConfigError) as caught:
        Workload(find_shape(str(config_file)), **{"seq": 64, **changes})
    assert expected in str(caught.value)


def test_the_longest_sequence_may_be_measured(config_file):
    assert Workload(find_shape(str(config_file)), seq=64, rank=4).lora.lora_alpha == 8
    config_file.write_text(json.dumps({**CONFIG, "max_position_embeddings": None}))
    assert Workload(find_shape(str(config_file)), seq=9999).seq == 9999


def fake_device(**changes):
    info = {"adapter_type": "CPU", "backend_type": "Vulkan", "description": "driver 1"}
    given = {
        "name": "card",
        "is_cpu": True,
        "max_binding": 1 << 27,
        "profile": CPU_PROFILE,
        "gpu": SimpleNamespace(info=info),
        "backend": SimpleNamespace(name="wgpu", package="wgpu"),
    }
    return SimpleNamespace(**{**given, **changes})


def test_a_software_adapter_may_not_take_more_than_the_machine_has(monkeypatch):
    work = Workload(find_shape("S"), batch=2)
    total = sum(work.planned_memory(fake_device()).values())
    monkeypatch.setattr(workload, "_available_bytes", lambda: total)
    work.planned_memory(fake_device())
    monkeypatch.setattr(workload, "_available_bytes", lambda: total - 1)
    with pytest.raises(OutOfMemoryError, match=r"S with --batch 2 --seq 256 .*--checkpointing$"):
        work.planned_memory(fake_device())
    work.planned_memory(fake_device(is_cpu=False))
    monkeypatch.setattr(workload, "_available_bytes", lambda: None)
    work.planned_memory(fake_device())


def test_checkpointing_is_not_advised_to_who_has_it(monkeypatch):
    monkeypatch.setattr(workload, "_available_bytes", lambda: 1)
    with pytest.raises(OutOfMemoryError) as caught:
        Workload(find_shape("S"), gradient_checkpointing=True).planned_memory(fake_device())
    assert "checkpointing" not in str(caught.value)


def test_what_is_absurd_is_refused_before_it_is_traced(monkeypatch, config_file):
    monkeypatch.setattr(workload, "_available_bytes", lambda: 1 << 30)
    config_file.write_text(json.dumps({**CONFIG, "vocab_size": 3_000_000_000}))
    with pytest.raises(OutOfMemoryError, match="at least 205,994 MiB"):
        Workload(find_shape(str(config_file)), seq=64).planned_memory(fake_device())


def test_what_32_bits_do_not_count_is_a_sentence():
    work = Workload(find_shape("S"), batch=10**8)
    with pytest.raises(OutOfMemoryError, match="more elements than kernels can count"):
        work.planned_memory(fake_device(is_cpu=False))


# -- clocks and sums -----------------------------------------------------------------------


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)


def test_the_best_of_rounds_is_kept_for_each_launch():
    times = iter([3.0, 1.0, 0.5, 2.0, 5.0, 0.25])
    timer = SimpleNamespace(seconds=lambda dispatch: next(times))
    assert best_of([["a"], ["b", "its second part"]], timer, 2) == [2.0, 1.5]


def test_submits_are_counted_and_left_as_they_were():
    class Queue:
        def __init__(self):
            self.got = []

        def submit(self, buffers):
            self.got.append(buffers)

    queue = Queue()
    device = SimpleNamespace(raw=SimpleNamespace(queue=queue))
    with pytest.raises(ZeroDivisionError), clocked_submits(device) as clock:
        queue.submit([1])
        assert 0 < clock.seconds < 1
        raise ZeroDivisionError
    seconds = clock.seconds
    queue.submit([2])
    assert queue.got == [[1], [2]] and clock.seconds == seconds


def launch(label, written=("y",), flops=0, table=None, code="", **tensors):
    bindings = {
        name: SimpleNamespace(writable=name in written, table=name == table) for name in tensors
    }
    shader = SimpleNamespace(label=f"{label}(A=1)", bindings=bindings, code=code)
    made = SimpleNamespace(
        shader=shader, tensors=tensors, params=b"", label=label, flops=flops,
        written=lambda: [t for n, t in tensors.items() if n in written],
    )  # fmt: skip
    made.nbytes = Launch.nbytes.fget(made)
    return made


def test_bytes_are_those_of_each_tensor_once():
    x, y = matrix("x", 3, 8, "float32"), matrix("y", 2, 8, "bfloat16")
    assert launch("cast", x=x, y=y).nbytes == 96 + 32
    assert launch("cast", a=x, b=x, y=y).nbytes == 96 + 32
    # A lookup is bound to a whole table, of which it reads as much as it writes.
    table = matrix("table", 1000, 8, "bfloat16")
    assert launch("lookup", table="x", x=table, y=y).nbytes == 64
    assert (
        load_shader("embedding/forward.wgsl", (("ELEMENTS", 1), ("FLAT", 64)))
        .bindings["weight"]
        .table
    )


def test_kernels_add_up_by_label():
    x, y = matrix("x", 1, 8, "float32"), matrix("y", 1, 8, "float32")
    launches = [
        launch("small", x=x, y=y),
        launch("gemm", x=x, y=y, flops=100),
        launch("gemm", x=x, y=y, flops=50),
    ]
    gemm, small = sum_up(launches, [0.5, 1.0, 0.5])
    assert gemm == KernelTime("gemm", 2, 1.5, 0.75, 150, 128)
    assert small == KernelTime("small", 1, 0.5, 0.25, 0, 64)
    assert (gemm.flops_per_second, gemm.bytes_per_second) == (100.0, 128 / 1.5)
    assert (small.flops_per_second, small.bytes_per_second) == (0.0, 128.0)
    with pytest.raises(ValueError, match="zip"):
        sum_up(launches, [1.0, 1.0])


def test_a_clock_that_stands_still_divides_by_nothing():
    y = matrix("y", 1, 8, "float32")
    (row,) = sum_up([launch("gemm", y=y, flops=7)], [0.0])
    figures = row.to_json(Ceilings(4e9, 2e9))
    assert (figures["share"], figures["flops_per_second"], figures["bytes_per_second"]) == (0, 0, 0)
    assert sum_up([], []) == []


def test_the_ceiling_counts_the_multiply_adds_that_its_shader_has():
    shader = load_shader("bench/fma.wgsl")
    assert shader.code.count("= fma(") == ceilings._FMA_PER_TURN
    assert shader.workgroup_size == (ceilings._FMA_GROUP, 1, 1)


def test_the_ceiling_of_matrix_units_counts_what_its_shader_multiplies():
    constants = (("GROUP", 128), ("HALF", True), ("K", 8), ("M", 16), ("N", 16), ("SUBGROUPS", 4))
    shader = load_shader("bench/matrix.wgsl", constants)
    assert shader.code.count("= subgroupMatrixMultiplyAccumulate(") == ceilings._MATRICES_PER_TURN
    assert shader.workgroup_size == (128, 1, 1)
    assert ceilings._matrix_rate(fake_device()) == 0.0  # kernels use none here


def test_the_higher_ceilings_are_kept():
    first, second = Ceilings(3.0, 1.0), Ceilings(2.0, 4.0, 7.0)
    assert first.higher(second) == second.higher(first) == Ceilings(3.0, 4.0, 7.0)


def test_a_kernel_is_held_against_the_nearest_ceiling():
    most = Ceilings(4e9, 2e9, 16e9)
    products = KernelTime("gemm", 1, 1.0, 1.0, 10**9, 10**9)
    assert products.of_nearest(most) == ("bytes", 0.5)
    on_units = replace(products, nbytes=0, flops=8 * 10**9, on_matrix_units=True)
    assert on_units.of_nearest(most) == ("operations", 0.5)
    assert replace(on_units, on_matrix_units=False).of_nearest(most) == ("operations", 2.0)
    assert on_units.of_nearest(Ceilings(4e9, 2e9)) == ("operations", 2.0)  # theirs is not known
    y = matrix("y", 1, 8, "float32")
    (row,) = sum_up([launch("gemm", y=y, code="subgroup_matrix_left<f16>")], [1.0])
    assert row.on_matrix_units


def test_copies_are_cut_for_each_kind_of_memory():
    constants = (("ELEMENTS", 1), ("FLAT", 64))
    for texture in (False, True):
        memory = Bound("float32", texture)
        bindings = load_shader(
            "tensor/copy.wgsl", constants, (("x", memory), ("y", memory))
        ).bindings
        assert {n: (b.texture, b.writable) for n, b in bindings.items()} == {
            "x": (texture, False),
            "y": (texture, True),
        }


# -- the report ----------------------------------------------------------------------------


def measured(kernels):
    return Measurement(
        workload=Workload(find_shape("S"), batch=2, seq=8),
        device=fake_device(name="card [red]"),
        ceilings=Ceilings(4e9, 2e9),
        load_seconds=1.0,
        prepare_seconds=2.0,
        compile_seconds=1.5,
        gaps=Gaps(dispatch=2e-6, submit=3e-5, timed=1e-2),
        steps=StepTimes(3.0, Spread(0.5, 0.25, 1.0), 0.125, 7.5),
        flops_per_step=10**9,
        kernels=kernels,
        planned=Counter({"base": 2 << 20, "inputs": 1 << 20}),
        peak_bytes=4 << 20,
        adapter_parameters=99,
    )


KERNELS = [
    KernelTime("gemm", 3, 0.3, 0.75, 6 * 10**8, 3 * 10**8),
    KernelTime("add", 1, 0.1, 0.25, 0, 10**8),
]


def shown(measurement):
    console = Console(file=io.StringIO(), width=160)
    show(console, measurement)
    return console.file.getvalue()


def test_json_holds_what_was_found():
    figures = json.loads(json.dumps(to_json(measured(KERNELS)), allow_nan=False))
    assert figures["tokens_per_second"] == {"median": 32.0, "min": 16.0, "max": 64.0}
    assert figures["step_seconds"] == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert figures["flops_per_second"] == 2e9
    assert figures["seconds"] == {
        "load": 1, "prepare": 2, "compile": 1.5, "first_step": 3, "to_first_step": 6,
    }  # fmt: skip
    # Each of four launches less the hundredth of a second that one of nothing takes.
    assert math.isclose(figures["work_seconds"], 0.36)
    assert figures["gaps"]["dispatch"] == 2e-6
    assert figures["kernels"][0]["of_nearest_ceiling"] == 0.5
    assert figures["memory"]["planned_total"] == 3 << 20 == sum(
        figures["memory"]["planned"].values()
    )  # fmt: skip
    assert figures["timestamps"] is True
    assert math.isclose(figures["kernels_seconds"], 0.4)
    assert figures["kernels"][0]["flops_per_second"] == 2e9
    assert figures["kernels"][0]["bytes"] == 3 * 10**8
    assert figures["device"]["name"] == "card [red]"


def test_the_text_tells_the_same():
    text = shown(measured(KERNELS))
    for expected in (
        "card [red] (driver 1)", "S, batch 2, sequence 8, rank 8, bfloat16", "random",
        "32.0 (16.0 to 64.0, 5 steps)", "2.0 GFLOP/s of the whole step, 50.0%",
        "4.0 GFLOP/s multiply-adds, 2.0 GB/s copy", "12.5% of a step",
        "140.00 ms of a step, 28.0%; a launch that does nothing takes 2.0 µs",
        "after 6.00 s: 1.00 loading, 2.00 compiling, 3.00 computing",
        "4.0 MiB taken, 3.0 MiB planned: base 2.0 MiB, inputs 1.0 MiB",
    ):  # fmt: skip
        assert expected in text, expected
    gemm = next(line for line in text.splitlines() if "gemm" in line)
    assert gemm.split() == ["gemm", "3", "300.00", "75.0%", "2.0", "50.0%", "1.0", "50.0%"]


def test_without_timestamps_it_says_so_and_leaves_the_table_out():
    measurement = measured(None)
    figures = to_json(measurement)
    assert figures["timestamps"] is False
    assert figures["kernels"] is None and figures["kernels_seconds"] is None
    assert figures["work_seconds"] is None
    text = shown(measurement)
    assert "no timestamp queries" in text and "launches" not in text
