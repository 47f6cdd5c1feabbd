"""Whole models in GGUF: read back, they are what was merged."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from checkpoint.test_gguf_architectures import differing, parts
from e2e.tiny import write_weights
from references.sized import family_configs, traced_configs
from safetensors.numpy import load_file
from support.gguf_files import byte_vocabulary, random_weights, tensors_of, write_model

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf.element_types import QUANTIZED, TYPES
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.export.gguf.architectures import find_llama_cpp
from qlora_wgpu.export.gguf.element_types import FILE_TYPES, find_file_type
from qlora_wgpu.export.gguf.model import gguf_model
from qlora_wgpu.export.merged_weights import MergedWeights
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora import AdapterConfig, save_adapter

NUMBER_OF = {kind.name: kind.number for kind in TYPES.values()}
MORE = traced_configs()
LATENT_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
}  # fmt: skip
# What llama.cpp has of a family, where the recorded case has something else.
CHANGES = {
    "mistral": {}, "llama": {"attention_bias": True, "mlp_bias": True}, "mixtral": {},
    "granite": {}, "qwen3": {}, "gemma": {}, "olmo2": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": None, "layer_types": None},
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3_text": {"query_pre_attn_scalar": 20, "final_logit_softcapping": 7.0},
    "gpt_oss": {"swiglu_limit": 7.0},
    "granitemoe": {},
    "olmoe": {"norm_topk_prob": False, "attention_bias": False, "num_key_value_heads": 6},
    "qwen2_moe": {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1,
                  "use_sliding_window": False, "layer_types": None},
    "phi3": {}, "glm4": {},
    "arcee": {"attention_bias": False, "mlp_bias": False},
    "ernie4_5": {"use_bias": False},
    "exaone4": {
        "layer_types": ["full_attention"] * 2, "sliding_window": None, "head_dim": 12,
    },
    "hunyuan_v1_dense": {},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "stablelm": {"use_qkv_bias": True},
    "stablelm heads": {"qk_layernorm": True, "use_parallel_residual": True},
    "starcoder2": {"sliding_window": None}, "nemotron": {"head_dim": 12},
    "apertus": {"attention_bias": False},
    "cohere": {"use_qk_norm": False, "attention_bias": False},
    "cohere2": {"num_hidden_layers": 5, "layer_types": None, "attention_bias": False},
    "olmo3": {"num_hidden_layers": 5, "layer_types": None, "attention_bias": False,
              "rope_parameters": {
                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                  "full_attention": {
                      "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                      "original_max_position_embeddings": 16}}},
    "granitemoeshared": {},
    "granitemoehybrid experts": {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
        "shared_intermediate_size": 36, "attention_bias": False},
    "hunyuan_v1_moe": {}, "ernie4_5_moe": {}, "lfm2_moe": {
        "conv_bias": False, "routed_scaling_factor": 1.0},
    "glm4_moe": {"routed_scaling_factor": 1.7},
    "exaone_moe": {"num_hidden_layers": 5, "layer_types": None, "n_group": 1, "topk_group": 1,
                   "mlp_layer_types": None},
    "exaone4 windows": {"num_hidden_layers": 64, "layer_types": None, "head_dim": 12},
    "ministral3": {"sliding_window": None}, "lfm2": {"conv_bias": False},
    "qwen3_5_text": {"attention_bias": False, "rms_norm_eps": 1e-6, "linear_key_head_dim": 24},
    "qwen3_5_moe_text": {"linear_key_head_dim": 24},
    "qwen3_next": {"mlp_only_layers": [], "linear_key_head_dim": 24},
    "gemma4_text": {}, "gemma4_text dense": MORE["gemma4-dense"],
    "gemma4_text experts": MORE["gemma4-experts"],
    "gemma4_unified_text": {},
    "deepseek_v2": {"mlp_bias": False, "topk_method": "greedy"},
    "deepseek_v3": {"rope_interleave": True}, "glm4_moe_lite": {"attention_bias": False,
        "rope_parameters": LATENT_YARN},
}  # fmt: skip
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
CONFIGS = family_configs()
VOCABULARY = {"general.name": "tiny", "tokenizer.ggml.model": "none"}


def changed(case: str) -> dict:
    """The config.json of a case: the recorded one of its type, with what llama.cpp has."""
    return CONFIGS[case.split()[0]] | CHANGES[case]


def folder_of(place, config, *, adapter: bool = True):
    """A model's folder with an adapter for all its layers beside it."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    write_weights(place, random_weights(config))
    if adapter:
        adapter_of(place, config)
    return place


def adapter_of(place, config, leaves: tuple[str, ...] = ()):
    rng, tensors = np.random.default_rng(5), {}
    linears = find_family(config).read(config).every_linear
    chosen = [s for s in linears if not leaves or s.name.rpartition(".")[2] in leaves]
    for spec in chosen:
        at = f"base_model.model.{spec.name}.lora_"
        tensors[f"{at}A.weight"] = rng.standard_normal((3, spec.in_features), np.float32)
        tensors[f"{at}B.weight"] = rng.standard_normal((spec.out_features, 3), np.float32)
    targets = sorted({spec.name.rpartition(".")[2] for spec in chosen})
    save_adapter(place / "adapter", tensors, AdapterConfig(3, 6, 0.0, targets, False, "a/base"))


def written(place, name: str = "f32", **more):
    """A folder's model with its adapter, written and opened again, and the weights it is of."""
    merged = MergedWeights(more.pop("base", place), place / "adapter")
    made = gguf_model(merged, find_file_type(name), lambda size: VOCABULARY)
    path = place / f"{name}.gguf"
    made.write(path, lambda tensor: None)
    return merged, ModelFolder.open(path), made


def kept(model_type: str, name: str, array: np.ndarray) -> np.ndarray:
    """What float32 keeps of a tensor that the file has with something added, or its exponential."""
    with_one = model_type.startswith(("gemma", "nemotron", "qwen3_5", "qwen3_next"))
    with_one = with_one and not model_type.startswith("gemma4")
    if name.endswith("A_log"):
        return np.log(np.exp(array))
    if with_one and name.endswith("norm.weight") and "linear_attn" not in name:
        return (array + np.float32(1)) - np.float32(1)
    return array


@pytest.mark.parametrize("model_type", CHANGES)
def test_a_file_is_the_merged_model(tmp_path, model_type) -> None:
    config = changed(model_type)
    merged, file, _ = written(folder_of(tmp_path, config))
    expected, read = merged.architecture, find_family(file.config).read(file.config)
    ours, theirs = parts(expected.config), parts(read.config)
    tied = ours.pop(".tied"), theirs.pop(".tied")
    assert tied in ((True, True), (False, False)) or model_type == "olmo2"  # which has both
    assert differing(theirs, ours) == {}
    names = set(merged.folder.names())
    assert names <= set(file.names())
    for name in names:
        array = kept(model_type, name, merged.float32(name))
        assert np.array_equal(file.float32(name), array), name
    assert any(merged.is_adapted(name) for name in names)


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


def test_factors_of_phi_3(tmp_path) -> None:
    scaling = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25, 2.5] * 2,
        "long_factor": [1.5, 3.0, 7.5] * 2,
    }  # fmt: skip
    config = CONFIGS["phi3"] | {
        "rope_parameters": scaling, "original_max_position_embeddings": 32, "sliding_window": None,
    }  # fmt: skip
    _, file, _ = written(folder_of(tmp_path, config))
    ropes = [
        find_family(c).read(c).config.layers[0].attention.rope for c in (config, file.config)
    ]  # fmt: skip
    for length in (16, 60):
        assert np.allclose(*(rope.frequencies(length) for rope in ropes), rtol=1e-6, atol=0)
    assert ropes[0].factor == pytest.approx(ropes[1].factor, rel=1e-6)


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
    assert {file.dtype(name) for name in file.names()} == {"F16", "F32"}
    assert len(made.notes) == 1 and "no whole blocks of 32" in made.notes[0]


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
        assert np.array_equal(file.float32(name), expected)
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
            assert np.array_equal(file.float32(name), before.float32(name)), name
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
            assert np.abs(file.float32(name) - array).max() <= np.abs(array).max() * 2**-8
            assert not np.array_equal(array, before.float32(name))
        else:
            assert np.array_equal(file.float32(name), before.float32(name)), name


REFUSED = {
    "experts whose weights": ("qwen3_moe", {}),
    "a swiglu_limit or": ("gpt_oss", {}),
    "YaRN with factors of its own": ("gpt_oss", {
        "swiglu_limit": 7.0, "rope_parameters": ROPES["yarn"]}),
    "a score scale of": ("gemma2", {}),
    "positions in layer 1": ("smollm3", {}),
    "a head of its own": ("gemma", {"tie_word_embeddings": False}),
    "the activation gelu": ("llama", {"hidden_act": "gelu"}),
    "heads that are together 120 wide": ("qwen2", {"head_dim": 20}),
    "RoPE of type dynamic": (
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "YaRN with beta_fast": ("llama", {"rope_parameters": ROPES["yarn"] | {"beta_fast": 8.0}}),
    "RoPE of type llama3": ("qwen2", {
        "rope_parameters": ROPES["llama3"], "use_sliding_window": False}),
    "this order of layers": ("gemma2", {
        "query_pre_attn_scalar": 20, "layer_types": ["full_attention", "sliding_attention"]}),
    "a bias of model.layers.0.self_attn.o_proj": ("qwen3", {"attention_bias": True}),
    "a bias of model.layers.0.conv.in_proj": ("lfm2", {}),
    "groups that are ranked by the best of each": ("deepseek_v2", {"mlp_bias": False}),
    "halves of heads that rotate together": ("deepseek_v3", {}),
    "27 layers with a q_lora_rank": ("glm4_moe_lite", {
        "attention_bias": False, "num_hidden_layers": 27, "mlp_layer_types": None}),
    "YaRN whose mscale and": ("glm4_moe_lite", {"attention_bias": False}),
    "YaRN with a beta_fast, beta_slow": ("glm4_moe_lite", {
        "attention_bias": False, "rope_parameters": LATENT_YARN | {"beta_slow": 2.0}}),
    "RoPE of type linear": ("deepseek_v3", {
        "rope_interleave": True, "rope_parameters": ROPES["linear"]}),
    "a model without experts": ("glm4_moe", {"first_k_dense_replace": 9}),
    "this order of layers with and": ("exaone_moe", {
        "num_hidden_layers": 4, "layer_types": None, "n_group": 1, "topk_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
    "a routed_scaling_factor of 1.7": ("lfm2_moe", {"conv_bias": False}),
    "weights do not sum up to one, or": ("lfm2_moe", {"conv_bias": False, "norm_topk_prob": False}),
    "chosen without a correction": ("lfm2_moe", {
        "conv_bias": False, "routed_scaling_factor": 1.0, "use_expert_bias": False}),
    "a token meets different numbers": ("hunyuan_v1_moe", {"moe_topk": [2, 3]}),
    "layers that all attend": ("lfm2", {
        "conv_bias": False, "layer_types": ["full_attention"] * 2}),
    "layers without biases": ("starcoder2", {"use_bias": False}),
    "2 layers with norms of heads": ("cohere", {"use_qk_norm": True, "attention_bias": False}),
    "another activation than xIELU": ("apertus", {"attention_bias": False, "hidden_act": "silu"}),
    "queries that grow without YaRN": ("ministral3", {
        "sliding_window": None, "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16}}),
    "a rms_norm_eps of 0.001 beside delta nets": ("qwen3_5_text", {"attention_bias": False}),
    "a linear_key_head_dim of 16 and": ("qwen3_next", {"mlp_only_layers": []}),
    "layers without experts beside": ("qwen3_next", {"linear_key_head_dim": 24}),
    "a model of delta nets without any": ("qwen3_5_moe_text", {
        "linear_key_head_dim": 24, "layer_types": ["full_attention"] * 2}),
    "keys and values that are shared by layers": ("gemma4_text", {
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "per_layer_config": {"0": {"head_dim": 28}, "4": {"head_dim": 28}}}),
    "a scaled rotation of layers with": ("gemma4_text", {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {
            "rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}}}),
    "layers with a window whose rotation": ("olmo3", {
        "num_hidden_layers": 4, "layer_types": None, "attention_bias": False}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_llama_cpp_does_not_compute(tmp_path, what) -> None:
    model_type, changes = REFUSED[what]
    place = folder_of(tmp_path, CONFIGS[model_type] | changes)
    with pytest.raises(UnsupportedModelError) as told:
        written(place)
    assert what in str(told.value) and "qlora-wgpu merge" in str(told.value)
    assert not (place / "f32.gguf").exists()


def test_a_family_that_llama_cpp_has_not() -> None:
    with pytest.raises(UnsupportedModelError, match="'phimoe' are not exported to GGUF"):
        find_llama_cpp("phimoe", "models", has_experts=True)


def test_roots_that_llama_cpp_adds_something_else_under(tmp_path) -> None:
    *_, made = written(folder_of(tmp_path, changed("glm4_moe_lite")))
    assert "adds 1e-05, the rms_norm_eps, under the roots of the latent" in made.notes[0]
    *_, made = written(folder_of(tmp_path / "v3", changed("deepseek_v3")))
    assert made.notes == ()


def test_windows_that_llama_cpp_has_not(tmp_path) -> None:
    *_, made = written(folder_of(tmp_path, CONFIGS["mistral"]))
    assert "texts of more than 7 tokens" in made.notes[0]


def test_numbers_that_are_too_large_for_a_type(tmp_path) -> None:
    config = CONFIGS["llama"]
    place = folder_of(tmp_path, config)
    arrays = random_weights(config)
    arrays["model.embed_tokens.weight"][3, 5] = 1e6
    write_weights(place, arrays)
    with pytest.raises(UnsupportedModelError, match="holds 1e\\+06, which f16 does not"):
        written(place, "f16")
    assert written(place, "bf16")[1].float32("model.embed_tokens.weight")[3, 5] > 9e5


@pytest.mark.parametrize(
    ("name", "message"),
    [("q4_k_m", "llama-quantize model.gguf smaller.gguf Q4_K_M"), ("int8", "is no type of GGUF")],
)
def test_types_that_are_not_written(name, message) -> None:
    with pytest.raises(ConfigError, match=message):
        find_file_type(name)


def test_a_disk_without_room(tmp_path, monkeypatch) -> None:
    place = folder_of(tmp_path, CONFIGS["llama"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=r"has room for 0[.]00 GB, but the file takes"):
        written(place)
    assert not (place / "f32.gguf").exists()
