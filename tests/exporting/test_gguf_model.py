"""Whole models in GGUF: read back, they are what was merged."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from checkpoint.test_gguf_architectures import differing, parts
from references.numpy_model import logits
from safetensors.numpy import load_file
from support.gguf_files import byte_vocabulary, random_weights, tensors_of, write_model
from support.gguf_models import (
    CHANGES,
    CONFIGS,
    ROPES,
    VOCABULARY,
    adapter_of,
    changed,
    folder_of,
    kept,
    written,
)

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf_file import QUANTIZED, TYPES
from qlora_wgpu.exporting.gguf import gguf_model
from qlora_wgpu.exporting.gguf_tensors import FILE_TYPES, find_file_type
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.families.family import find_family

BOTH = (
    "olmo2",
    "apertus",
    "exaone_moe",
    "gpt_oss",
    "olmoe",
    "gpt_neox serial",
)  # whose files have a head, be it the embedding
FOLDED = ("falcon_h1", "falcon_h1 gate")
OF_THEIR_OWN = (
    "granite",
    "granitemoeshared",
    "granitemoehybrid mamba experts",
    "bamba",
    "nemotron_h",
    "nemotron_h latent",
    "exaone_moe",
    "hunyuan_v1_moe",
    "cohere2",
    "afmoe",
    "gpt_neox",
)  # whose keys are read and written by functions of theirs
NUMBER_OF = {kind.name: kind.number for kind in TYPES.values()}


@pytest.mark.quick(model_type=OF_THEIR_OWN)
@pytest.mark.parametrize("model_type", [name for name in CHANGES if name not in FOLDED])
def test_a_file_is_the_merged_model(tmp_path, model_type) -> None:
    config = changed(model_type)
    merged, file, _ = written(folder_of(tmp_path, config))
    expected, read = merged.architecture, find_family(file.config).read(file.config)
    ours, theirs = parts(expected.config), parts(read.config)
    tied = ours.pop(".tied"), theirs.pop(".tied")
    assert tied[0] == tied[1] if model_type not in BOTH else tied == (True, False)
    assert differing(theirs, ours) == {}
    names = set(merged.folder.names())
    assert names <= set(file.names())
    for name in names:
        array = kept(model_type, name, merged.float32(name))
        assert np.array_equal(file[name].read(), array), name
    assert any(merged.is_adapted(name) for name in names)


@pytest.mark.parametrize("model_type", FOLDED)
def test_a_file_whose_weights_include_factors(tmp_path, model_type) -> None:
    """It computes what the merged model does, which has them in its configuration."""
    merged, file, _ = written(folder_of(tmp_path, changed(model_type)))
    config = merged.folder.config
    assert config["embedding_multiplier"] != 1 != config["key_multiplier"]
    arrays = {name: merged.float32(name) for name in merged.folder.names()}
    ids = np.arange(3, 20)
    with np.errstate(over="ignore"):  # of gates far below zero
        expected = logits(config, arrays, ids)
        made = logits(file.config, {name: file[name].read() for name in file.names()}, ids)
    # The scan amplifies how float32 rounds products of weights and factors.
    assert np.abs(made - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_head_that_llama_cpp_does_not_do_without(tmp_path) -> None:
    """Qwen 2 MoE's, also where it is the embedding."""
    config = changed("qwen2_moe") | {"tie_word_embeddings": True}
    merged, file, _ = written(folder_of(tmp_path, config))
    read = find_family(file.config).read(file.config)
    assert merged.architecture.tied and not read.tied
    embedding = merged.float32("model.embed_tokens.weight")
    assert np.array_equal(file["lm_head.weight"].read(), embedding)


@pytest.mark.quick(name=["q8_0"])
@pytest.mark.parametrize("name", ["q8_0", "q5_1", "f16"])
@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma2", "phi3", "qwen3", "olmo2"])
def test_tensors_as_llama_cpp_s_converter_has_them(tmp_path, model_type, name) -> None:
    """By gguf's own reader, against base + scaling · B · A in the converter's layout."""
    config = CONFIGS[model_type] | CHANGES[model_type] | {"intermediate_size": 160}
    place = folder_of(tmp_path, config)
    arrays = random_weights(config)
    adapter = load_file(place / "adapter/adapter_model.safetensors")
    for key, a in adapter.items():
        if key.endswith("lora_A.weight"):
            target = key.removeprefix("base_model.model.").replace("lora_A.", "")
            arrays[target] = arrays[target] + 2 * (adapter[key.replace("_A", "_B")] @ a)
    expected = tensors_of(config, arrays)
    written(place, name)
    stored = {t.name: t for t in gguf.GGUFReader(place / f"{name}.gguf").tensors}
    if model_type == "olmo2":
        expected["output.weight"] = expected["token_embd.weight"]
    assert set(stored) == set(expected)
    kinds = set()
    for key, tensor in stored.items():
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        largest = np.abs(expected[key]).max()
        steps = {"F32": 1e-6, "F16": 2**-11, "Q8_0": 0.6 / 127, "Q5_1": 0.6 * 2 / 31}
        kinds.add(tensor.tensor_type.name)
        allowed = steps[tensor.tensor_type.name] * largest
        assert np.abs(array.reshape(expected[key].shape) - expected[key]).max() <= allowed, key
    assert {"f16": {"F32", "F16"}}.get(name, {"F32", "F16", name.upper()}) >= kinds
    assert len(kinds) > 1


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotations(tmp_path, kind) -> None:
    config = CONFIGS["llama"] | {"rope_parameters": ROPES[kind]}
    _, file, _ = written(folder_of(tmp_path, config))
    ropes = [
        find_family(c).read(c).config.layers[0].attention.rope for c in (config, file.config)
    ]  # fmt: skip
    assert np.allclose(*(rope.frequencies(50) for rope in ropes), rtol=1e-6, atol=0)
    assert ropes[0].factor == pytest.approx(ropes[1].factor, rel=1e-6)


@pytest.mark.parametrize("model_type", ["phi3", "llama", "granite", "apertus"])
def test_factors_of_longrope(tmp_path, model_type) -> None:
    pairs = (
        find_family(CONFIGS[model_type]).read(CONFIGS[model_type]).config.dimensions.head_dim // 2
    )
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 4 for i in range(pairs)],
        "long_factor": [1.5 + i for i in range(pairs)],
    }  # fmt: skip
    config = CONFIGS[model_type] | CHANGES[model_type] | {
        "rope_parameters": scaling, "original_max_position_embeddings": 32, "sliding_window": None,
    }  # fmt: skip
    _, file, made = written(folder_of(tmp_path, config))
    # Other architectures than Phi 3's read the factors of no other type.
    assert made.keys[f"{made.architecture}.rope.scaling.type"] == "longrope"
    ropes = [
        find_family(c).read(c).config.layers[0].attention.rope for c in (config, file.config)
    ]  # fmt: skip
    for length in (16, 60):
        assert np.allclose(*(rope.frequencies(length) for rope in ropes), rtol=1e-6, atol=0)
    assert ropes[0].factor == pytest.approx(ropes[1].factor, rel=1e-6)


def test_gemma_3_without_windows(tmp_path) -> None:
    config = changed("gemma3_text")
    config |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    _, file, _ = written(folder_of(tmp_path, config))
    assert file.config["layer_types"] == config["layer_types"]


def test_logits_of_gemma_4_without_a_softcap(tmp_path) -> None:
    config = changed("gemma4_unified_text") | {"final_logit_softcapping": None}
    _, file, made = written(folder_of(tmp_path, config))
    assert made.keys["gemma4.final_logit_softcapping"] == 0.0  # llama.cpp's own is 30
    assert file.config["final_logit_softcapping"] is None


@pytest.mark.parametrize("name", FILE_TYPES)
def test_types(tmp_path, name) -> None:
    """Each matrix is what gguf's quantizer makes of the merged one; small tensors stay whole."""
    config = CONFIGS["llama"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    merged, _, made = written(folder_of(tmp_path, config), name)
    kind = gguf.GGMLQuantizationType(FILE_TYPES[name].kind.number)
    reader = gguf.GGUFReader(tmp_path / f"{name}.gguf")
    assert reader.get_field("general.file_type").contents() == FILE_TYPES[name].number
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert stored["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    head = stored["output.weight"].tensor_type
    few_bits = kind.value in QUANTIZED and kind.name != "Q8_0"
    assert head.name == ("Q8_0" if few_bits else kind.name)
    down = stored["blk.1.ffn_down.weight"]
    assert down.tensor_type == kind and not made.notes
    array = merged.float32("model.layers.1.mlp.down_proj.weight")
    assert np.array_equal(down.data, gguf.quants.quantize(array, kind).reshape(down.data.shape))
    assert sum(tensor.n_bytes for tensor in reader.tensors) == made.nbytes


def test_rows_that_are_no_whole_blocks(tmp_path) -> None:
    _, file, made = written(folder_of(tmp_path, CONFIGS["llama"]), "q4_0")
    assert {file[name].stored_dtype for name in file.names()} == {"F16", "F32"}
    assert len(made.notes) == 1 and "not a multiple of 32" in made.notes[0]


def test_a_file_as_the_base(tmp_path) -> None:
    """What the adapter leaves alone is carried over bit for bit, keys and all."""
    base = small_llama(tmp_path, **{"split.count": 0, "general.tags": ["x", "y"]})
    merged, file, _ = written(tmp_path, "f16", base=base)
    old, new = gguf.GGUFReader(base), gguf.GGUFReader(tmp_path / "f16.gguf")
    before = {t.name: t for t in old.tensors}
    for tensor in new.tensors:
        if tensor.name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
            assert tensor.tensor_type.name == "F16"
        else:
            assert np.array_equal(tensor.data, before[tensor.name].data), tensor.name
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.0.{name}.weight"
        expected = merged.float32(name).astype(np.float16).astype(np.float32)
        assert np.array_equal(file[name].read(), expected)
    gone = set(old.fields) - set(new.fields)
    assert gone == {"split.count"}
    for name, field in new.fields.items():
        if name.startswith(("tokenizer.", "llama.", "general.tags")):
            assert field.contents() == old.fields[name].contents()
            assert field.types == old.fields[name].types, name


def small_llama(place, **keys):
    """A base in a GGUF file, with further keys, and an adapter beside it."""
    config = {
        "model_type": "llama", "vocab_size": 280, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    more = byte_vocabulary("{{ messages }}") | keys
    base = write_model(
        place / "base.gguf", config, random_weights(config), keys=more,
        types={"attn_v.weight": gguf.GGMLQuantizationType.Q5_1},
        default=gguf.GGMLQuantizationType.Q8_0,
    )  # fmt: skip
    adapter_of(place, config, ("q_proj", "down_proj"))
    return base


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_a_base_that_is_aligned_otherwise(tmp_path, monkeypatch, alignment) -> None:
    """The file that is written has an alignment of its own, and says no other one."""
    with monkeypatch.context() as changed:
        changed.setattr(gguf.GGUFWriter, "__init__", aligned(alignment))
        base = small_llama(tmp_path)
    before, reader = ModelFolder.open(base), gguf.GGUFReader(base)
    assert reader.alignment == alignment
    _, file, _ = written(tmp_path, "f16", base=base)
    for name in before.names():
        if not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert np.array_equal(file[name].read(), before[name].read()), name
    theirs = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "f16.gguf").tensors}
    for tensor in reader.tensors:
        if not tensor.name.endswith(("attn_q.weight", "ffn_down.weight")):
            assert np.array_equal(theirs[tensor.name], tensor.data), tensor.name


def aligned(alignment):
    """A writer's beginning, with an alignment that its file says."""
    begin = gguf.GGUFWriter.__init__

    def begun(self, *args, **options):
        begin(self, *args, **options)
        self.add_custom_alignment(alignment)

    return begun


def test_a_base_with_an_array_of_nothing(tmp_path, monkeypatch) -> None:
    base = small_llama(tmp_path)
    opened = ModelFolder.open(base)
    opened.file.metadata["tokenizer.ggml.eog_token_ids"] = np.array([], np.int32)
    merged = MergedWeights(base, tmp_path / "adapter")
    merged.folder = opened
    made = gguf_model(merged, find_file_type("f16"), lambda size: VOCABULARY)
    made.write(tmp_path / "f16.gguf", lambda tensor: None)
    assert "tokenizer.ggml.eog_token_ids" not in gguf.GGUFReader(tmp_path / "f16.gguf").fields


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "granitemoeshared",
        "ernie4_5_moe",
        "apertus",
        "stablelm heads",
        "qwen3_5_text",
        "qwen3_next",
        "glm4_moe_lite",
    ],
)
def test_another_adapter_on_a_file(tmp_path, case) -> None:
    """The file of an exported model as the base of another adapter, which is merged into it."""
    place = folder_of(tmp_path, changed(case))
    _, before, _ = written(place)
    merged, file, _ = written(place, base=tmp_path / "f32.gguf", name="bf16")
    for name in before.names():
        array = merged.float32(name)
        if merged.is_adapted(name):
            assert np.abs(file[name].read() - array).max() <= np.abs(array).max() * 2**-8
            assert not np.array_equal(array, before[name].read())
        else:
            assert np.array_equal(file[name].read(), before[name].read()), name
