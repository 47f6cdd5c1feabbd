"""Layers that a 4-bit folder keeps in 16 bits stay so; a head of its own is used."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from references.seeded import batch, weights
from references.sized import family_configs

import qlora_wgpu
from e2e.tiny import CONFIG, write_model, write_weights
from e2e.tiny import weights as tiny_weights
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.bfloat16 import from_bfloat16, to_bfloat16
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.quantized.bitsandbytes import nf4_entries, nf4_parts
from qlora_wgpu.checkpoint.safetensors_file import Entry, write_stream
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.exporting import merge
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.quant import quantize_nf4

pytestmark = pytest.mark.quick

RECORDED = np.load(Path(__file__).parents[1] / "references" / "mixed" / "llama.npz")
LORA = LoraConfig(r=4, lora_alpha=8)


def bfloat16_values(shapes):
    arrays = weights(shapes, 0.0)
    return {name: from_bfloat16(to_bfloat16(array)) for name, array in arrays.items()}


def write_mixed(folder, config, values, in_4_bits):
    """A folder in bfloat16 with some tensors in 4 bits, as bitsandbytes writes them."""
    entries, data = {}, {}
    for name, array in values.items():
        if name in in_4_bits:
            entries |= nf4_entries(name, array.shape, 64, True)
            data |= nf4_parts(name, quantize_nf4(array), "bfloat16")
        else:
            entries[name], data[name] = Entry("BF16", array.shape), to_bfloat16(array)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_stream(folder / "model.safetensors", entries, data.__getitem__)
    return data


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed") / "base"
    values = bfloat16_values(json.loads(str(RECORDED["shapes"])))
    in_4_bits = json.loads(str(RECORDED["offsets"]))
    data = write_mixed(folder, json.loads(str(RECORDED["config"])), values, in_4_bits)
    for name, checksum in json.loads(str(RECORDED["checksums"])).items():
        assert zlib.crc32(np.ascontiguousarray(data[name]).tobytes()) == checksum, name
    return folder


def apart(model):
    ids, mask, _ = batch()
    return np.abs(model.logits(ids, mask)[..., :40] - RECORDED["logits"])[mask == 1].max()


@pytest.mark.slow
def test_layers_in_16_bits_stay_as_stored(device, mixed):
    """The logits are those of bitsandbytes' own dequantized weights, up to 4.9 large."""
    model = QLoRAModel.from_pretrained(mixed, LORA, None, "float32", device)
    assert apart(model) < 3e-5
    [note] = model.layout.pretrained.notes
    assert "6 of 21 linear layers are stored as floats" in note


def test_merging_leaves_them_alone(device, mixed, tmp_path):
    model = QLoRAModel.from_pretrained(mixed, LORA, None, "float32", device)
    model.save_adapter(tmp_path / "adapter")  # B is zero
    merge(mixed, tmp_path / "adapter", tmp_path / "merged", base="dequantized")
    stored, merged = (ModelFolder.open(path) for path in (mixed, tmp_path / "merged"))
    for name in merged.names():
        quantized = stored[name].quantized()
        array = stored[name].read() if quantized is None else quantized.dequantize()
        assert np.array_equal(merged[name].read(), from_bfloat16(to_bfloat16(array))), name


def memory(pretrained, device):
    layout = ModelPlan(
        pretrained, LORA, QuantConfig(), "bfloat16", profile=device.profile, max_binding=1 << 27
    )
    return layout.memory(StepOptions("train", 1, 16))


@pytest.mark.slow
def test_the_plan_knows_without_weights(device, mixed):
    config = json.loads((mixed / "config.json").read_text())
    held = memory(Pretrained.open(mixed), device)
    assert held == memory(Pretrained.from_config(config), device)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    assert held["base"] > memory(Pretrained.from_config(plain), device)["base"] * 1.2
    told = qlora_wgpu.estimate(str(mixed), rank=4, seq=16)
    assert told.memory["base"] == held["base"] and told.workload.pretrained.notes


@pytest.mark.slow
def test_experts_in_floats(device, tmp_path):
    """As transformers writes mixtures: attention in 4 bits, experts as they were."""
    config = family_configs()["qwen3_moe"]
    architecture = Pretrained.from_config(config).architecture
    shapes = {
        f"{s.name}.weight": (s.out_features, s.in_features) for s in architecture.every_linear
    }
    shapes |= {**architecture.norm_shapes, **architecture.router_shapes}
    shapes |= dict.fromkeys(
        (architecture.embed_name, architecture.head_name),
        (architecture.vocab_size, architecture.hidden_size),
    )
    attention = {f"{spec.name}.weight" for spec in architecture.linears}
    values = bfloat16_values(shapes)
    write_mixed(tmp_path / "mixed", config, values, attention)
    one = architecture.experts[0].linears[1].name
    write_mixed(tmp_path / "one", config, values, {*attention, f"{one}.weight"})
    model = QLoRAModel.from_pretrained(tmp_path / "mixed", LORA, None, "float32", device)
    state = model.base_state_dict()
    for stack in architecture.experts:
        for spec in stack.linears:
            assert np.array_equal(state[f"{spec.name}.weight"], values[f"{spec.name}.weight"])
    name = next(iter(attention))
    assert np.array_equal(state[name], quantize_nf4(values[name]).dequantize())
    state = QLoRAModel.from_pretrained(tmp_path / "one", LORA, None, "float32", device)
    state = state.base_state_dict()
    assert np.array_equal(
        state[f"{one}.weight"], quantize_nf4(values[f"{one}.weight"]).dequantize()
    )
    other = architecture.experts[0].linears[0].name
    assert np.array_equal(state[f"{other}.weight"], values[f"{other}.weight"])


def test_a_head_of_its_own_under_a_tying_configuration(device, tmp_path):
    """transformers 5.23 ties equal matrices only, and warns where they differ."""
    folder, quant = write_model(tmp_path / "m"), QuantConfig(scheme="none")
    untied = {**CONFIG, "tie_word_embeddings": False}
    tensors = tiny_weights(untied, 3)
    write_weights(folder, tensors)
    tied = QLoRAModel.from_pretrained(folder, LORA, quant, "float32", device)
    ids = np.arange(20)[None]
    (folder / "config.json").write_text(json.dumps(untied))
    expected = QLoRAModel.from_pretrained(folder, LORA, quant, "float32", device).logits(ids)
    assert np.array_equal(tied.logits(ids), expected)
    assert "contain another lm_head.weight" in tied.layout.pretrained.notes[0]
    assert np.array_equal(tied.base_state_dict()["lm_head.weight"], tensors["lm_head.weight"])

    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    same = Pretrained.open(folder)
    assert same.architecture.tied and not same.notes


def test_an_untied_model_without_a_head(device, tmp_path):
    """transformers makes up a random one, and reports it."""
    folder = write_model(tmp_path / "m", tie_word_embeddings=False)
    write_weights(folder, tiny_weights(CONFIG))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing, .* cannot replace"):
        QLoRAModel.from_pretrained(folder, LORA, device=device)
