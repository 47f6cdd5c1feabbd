"""How weights and adapters are laid out: shards, padding, bytes, and names; no device is needed."""

import numpy as np
import pytest
from e2e.tiny import CONFIG, weights, write_model, write_weights

from qlora_wgpu.bfloat16 import from_bfloat16
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.graph.tensor import ROW_UNIT, padded
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.targets import targeted
from qlora_wgpu.model.weight_placement import WeightPlacement
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.quant import quantize_nf4

LARGE = 1 << 27


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """What is uploaded stays in its storage."""
    monkeypatch.setattr(
        WeightPlacement, "_upload", lambda self, storage, data: setattr(storage, "data", data)
    )


def modules_of(config, quant, dtype="float32", max_binding=LARGE, folder=None, lora=None):
    architecture = find_family(config).read(config)
    adapter = AdapterLayout(lora or LoraConfig(r=5, lora_alpha=5), architecture.linears)
    layout = WeightLayout(quant, dtype, max_binding, folder)
    modules = layout.lay_out(architecture, adapter)
    if folder is not None:
        layout.placement.load(layout.table, None)
    return modules


def storages(modules):
    storage_of = {}
    for matrix in (modules.embedding, modules.head):
        storage_of |= {(t.name, row): t.storage for row, t in matrix.resident}
    for name, layer in modules.linears.items():
        if hasattr(layer.weight, "resident"):
            storage_of |= {(t.name, row): t.storage for row, t in layer.weight.resident}
        else:
            for leaf in ("codes", "absmax", "nested_absmax", "maps"):
                tensor = getattr(layer.weight, leaf)
                if tensor is not None:
                    storage_of[name, leaf] = tensor.storage
        if layer.bias is not None:
            storage_of[name, "bias"] = layer.bias.storage
    return storage_of | {(name, 0): t.storage for name, t in modules.norms.items()}


@pytest.mark.parametrize(
    "quant", [{}, {"double_quant": False}, {"blocksize": 32}, {"scheme": "none"}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_planned_is_what_is_loaded(tmp_path, quant, dtype):
    folder = write_model(tmp_path / "m", attention_bias=True, tie_word_embeddings=False)
    opened, quant = ModelFolder.open(folder), QuantConfig(**quant)
    planned = storages(modules_of(opened.config, quant, dtype, 5000))
    loaded = storages(modules_of(opened.config, quant, dtype, 5000, opened))
    assert set(planned) == set(loaded) and len(planned) > 30
    for key, storage in loaded.items():
        assert planned[key].nbytes == storage.nbytes == storage.data.nbytes, key
        assert planned[key].kind == storage.kind and planned[key].data is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_binding", [1, 1500, 3000, LARGE])
def test_row_shards_cover_a_matrix_once(tmp_path, dtype, max_binding):
    folder = ModelFolder.open(write_model(tmp_path / "m"))
    matrix = modules_of(CONFIG, QuantConfig(scheme="none"), dtype, max_binding, folder).embedding
    size = 4 if dtype == "float32" else 2
    row_bytes = padded(36) * size
    rows = []
    for row0, tensor in matrix.resident:
        assert row0 == len(rows) and tensor.columns == 36 and tensor.stride == padded(36)
        # A shard is never cut below the few rows that a tile needs.
        assert tensor.nbytes <= max(max_binding, ROW_UNIT * row_bytes)
        assert row0 % ROW_UNIT == 0
        data = tensor.storage.data
        data = from_bfloat16(data) if dtype == "bfloat16" else data
        assert data.shape == (tensor.rows, padded(36)) and not data[:, 36:].any()
        rows.extend(data[:, :36])
    expected = weights(CONFIG)["model.embed_tokens.weight"]
    bound = 0 if dtype == "float32" else 2**-8
    assert np.all(np.abs(np.array(rows) - expected) <= bound * np.abs(expected))
    assert (len(matrix.resident) == 1) == (max_binding == LARGE)


@pytest.mark.parametrize("double", [True, False])
def test_nf4_is_uploaded_as_quantized(tmp_path, double):
    folder = ModelFolder.open(write_model(tmp_path / "m"))
    name = "model.layers.0.self_attn.k_proj"
    quant = QuantConfig(double_quant=double)
    weight = modules_of(CONFIG, quant, folder=folder).linears[name].weight
    expected = quantize_nf4(weights(CONFIG)[f"{name}.weight"], 64, double)
    assert (weight.rows, weight.columns, weight.form.blocksize) == (20, 36, 64)

    def bytes_of(tensor):
        return tensor.storage.data.reshape(-1).view(np.uint8)

    for leaf in ("codes", "absmax"):
        stored = np.ascontiguousarray(getattr(expected, leaf)).reshape(-1).view(np.uint8)
        held = bytes_of(getattr(weight, leaf))
        assert np.array_equal(held[: stored.size], stored) and held.size % 4 == 0
        assert held.size - stored.size < 4 and not held[stored.size :].any()
    maps = bytes_of(weight.maps).view(np.float32)
    assert np.array_equal(maps[:16], expected.format.quant_map)
    assert (weight.nested_absmax is not None) == double
    if double:
        assert np.array_equal(maps[16:272], expected.nested_quant_map)
        assert maps[272] == np.float32(expected.nested_offset)


def test_tied_matrices_are_stored_once(tmp_path):
    tied = modules_of(CONFIG, QuantConfig())
    assert tied.head is tied.embedding
    untied = modules_of({**CONFIG, "tie_word_embeddings": False}, QuantConfig())
    assert untied.head is not untied.embedding
    folder = write_model(tmp_path / "m")
    tensors = weights(CONFIG)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_weights(folder, tensors)
    modules = modules_of(CONFIG, QuantConfig(), folder=ModelFolder.open(folder))
    held = modules.embedding.resident[0][1].storage.data
    assert np.array_equal(held[:, :36], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.embed_tokens.weight", "embed_tokens.weight is missing.*tie_word"),
        ("lm_head.weight", "tensor 'lm_head.weight' is missing"),
    ],
)
def test_an_untied_matrix_has_no_other_name(tmp_path, missing, message):
    config = {**CONFIG, "tie_word_embeddings": False}
    folder = write_model(tmp_path / "m", tie_word_embeddings=False)
    modules_of(config, QuantConfig(), folder=ModelFolder.open(folder))
    tensors = weights(config)
    del tensors[missing]
    write_weights(folder, tensors)
    with pytest.raises(CheckpointError, match=message):
        modules_of(config, QuantConfig(), folder=ModelFolder.open(folder))


def architecture(**changes):
    config = {**CONFIG, **changes}
    return find_family(config).read(config)


@pytest.mark.parametrize("r", [1, 5, 8, 64])
def test_an_adapter_s_matrices_can_be_bound_and_do_not_overlap(r):
    adapter = AdapterLayout(LoraConfig(r=r, lora_alpha=1), architecture().linears)
    spans = sorted(
        (t.offset, t.nbytes) for lora in adapter.loras.values() for t in (lora.a, lora.b)
    )
    assert len(spans) == 28 == len(adapter.names)
    assert all(offset % ALIGNMENT == 0 for offset, _ in spans)
    ends = [offset + nbytes for offset, nbytes in spans]
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
    assert ends[-1] <= 4 * adapter.length == adapter.parameters.nbytes
    for lora in adapter.loras.values():
        assert (lora.grad_a.offset, lora.grad_b.offset) == (lora.a.offset, lora.b.offset)
        assert lora.grad_a.storage is adapter.gradient.whole.storage is not lora.a.storage
    features = [(s.in_features, s.out_features) for s in architecture().linears]
    assert adapter.num_parameters == sum(r * (i + o) for i, o in features)


def test_split_and_join_are_inverse():
    adapter = AdapterLayout(LoraConfig(r=5, lora_alpha=1), architecture().linears)
    rng = np.random.default_rng(0)
    state = adapter.split(rng.standard_normal(adapter.length).astype(np.float32))
    flat = adapter.join(state)
    for name, array in adapter.split(flat).items():
        assert np.array_equal(array, state[name]), name
    used = sum(array.size for array in state.values())
    assert np.count_nonzero(flat) == used  # the padding is zero
    state[next(iter(state))][:] = 7
    assert not np.array_equal(adapter.join(state), flat)  # and split gave copies


def test_a_start_does_not_depend_on_what_else_is_adapted():
    linears = architecture().linears
    one = AdapterLayout(LoraConfig(r=4, lora_alpha=1, target_modules=["v_proj"]), linears)
    every = AdapterLayout(LoraConfig(r=4, lora_alpha=1), linears)
    few, all_ = one.split(one.initial(3)), every.split(every.initial(3))
    assert all(np.array_equal(array, all_[name]) for name, array in few.items())
    starts = [a[:, :36].tobytes() for name, a in all_.items() if "lora_A" in name]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 14),
        (["q_proj"], 2),
        (["self_attn.q_proj", "down_proj"], 4),
        (["model.layers.1.mlp.up_proj"], 1),
        (["layers.0.mlp.up_proj", "up_proj"], 2),
    ],
)
def test_targets(targets, count):
    linears = architecture().linears
    specs = targeted(linears, targets)
    assert len(specs) == count
    assert specs == [s for s in linears if s in specs]  # in the model's order


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], "did you mean 'q_proj'"),
        (["proj"], "unknown layer 'proj'"),
        (["lm_head"], "lm_head"),
        (["q_proj", "zzz"], "'zzz'; this model has"),
        (["_proj"], "_proj"),
        (["layers.7.mlp.up_proj"], "layers.7"),
    ],
)
def test_targets_that_fit_nothing(targets, message):
    with pytest.raises(ConfigError, match=message):
        targeted(architecture().linears, targets)


def test_names_are_those_of_peft():
    adapter = AdapterLayout(
        LoraConfig(r=2, lora_alpha=1), architecture(num_hidden_layers=1).linears
    )
    leaves = [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    assert set(adapter.names) == {
        f"base_model.model.model.layers.0.{leaf}.lora_{ab}.weight" for leaf in leaves for ab in "AB"
    }
    assert adapter.peft.target_modules == sorted(leaf.split(".")[1] for leaf in leaves)
