"""How config.json files are read: defaults, and old keys beside new ones."""

import math
import re

import numpy as np
import pytest
from families.small_configs import (
    G4,
    KINDS,
    NEEDED,
    NO_SHARED,
    PLAIN,
    SIZES,
    layers,
    read,
    windows,
)

from qlora_wgpu.families.family import known_families
from qlora_wgpu.families.parts.moe import SparseMoeBlock
from qlora_wgpu.families.parts.rope import read_rope
from qlora_wgpu.ops.pointwise import ClampedGLU


def test_windows():
    assert windows("mistral") == (4096,) * 4
    assert windows("mistral", sliding_window=None) == (None,) * 4
    assert windows("qwen2", sliding_window=9) == (None,) * 4
    used = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert windows("qwen2", **used) == (None, None, None, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen3", **used, layer_types=kinds) == (9, None, 9, None)
    assert windows("gemma2") == (4096, None, 4096, None)
    assert windows("gemma3_text", sliding_window=5, sliding_window_pattern=2) == (5, None) * 2
    assert windows("gemma3_text", sliding_window=5, num_hidden_layers=7)[4:] == (5, None, 5)
    assert windows("qwen3_moe", sliding_window=9) == (None,) * 4
    assert windows("qwen3_moe", use_sliding_window=True, sliding_window=9) == (9,) * 4
    assert windows("qwen3_moe", use_sliding_window=True) == (4096,) * 4
    assert windows("qwen3_moe", use_sliding_window=True, sliding_window=None) == (None,) * 4
    for model_type in ("exaone4", "cohere2"):
        assert windows(model_type) == (4096, 4096, 4096, None)
        assert windows(model_type, sliding_window_pattern=2) == (4096, None) * 2
    kinds = {"layer_types": ["full_attention"] * 4, "sliding_window_pattern": "LLLG"}
    assert windows("exaone4", **kinds) == (None,) * 4
    assert windows("ministral3") == (None,) * 4


def test_layers_without_rotation():
    def rotated(**changes):
        return [layer.attention.rope is not None for layer in layers("smollm3", **changes)]

    assert rotated() == [True, True, True, False]
    for model_type in ("exaone4", "cohere2"):
        ropes = [layer.attention.rope for layer in layers(model_type)]
        assert [rope is not None for rope in ropes] == [True, True, True, False]
    kinds = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    assert all(layer.attention.rope for layer in layers("exaone4", **kinds))
    needed = NEEDED["granitemoehybrid"]
    assert not any(layer.attention.rope for layer in layers("granitemoehybrid", **needed))
    assert rotated(no_rope_layers=[0, 1, 1, 0]) == [False, True, True, False]


def test_layers_with_experts():
    architecture = read(
        "qwen3_moe",
        mlp_only_layers=[0],
        decoder_sparse_step=2,
        num_experts=5,
        num_experts_per_tok=2,
    )
    mixtures = [isinstance(layer.mlp, SparseMoeBlock) for layer in architecture.config.layers]
    assert mixtures == [False, True, False, True]
    assert {s.at for s in architecture.experts} == {f"model.layers.{i}.mlp.experts" for i in (1, 3)}
    assert set(architecture.router_shapes.values()) == {(5, SIZES["hidden_size"])}
    assert not any("experts" in s.name for s in architecture.linears)
    new = read("mixtral", num_local_experts=3)
    assert new.experts[0].linears[2].name == "model.layers.0.block_sparse_moe.experts.2.w1"


def test_gpt_oss_by_default():
    """128 experts, 4 of them for a token, biases everywhere, every other layer slides."""
    architecture = read("gpt_oss")
    first, second, *_ = architecture.config.layers
    assert (first.attention.window, second.attention.window) == (128, None)
    assert first.mlp.activation == ClampedGLU(swiglu_limit=7.0, swiglu_alpha=1.702)
    assert (first.mlp.num_experts, first.mlp.num_experts_per_tok) == (128, 4)
    assert architecture.norms["model.layers.3.self_attn.sinks"] == SIZES["num_attention_heads"]
    assert architecture.norms["model.layers.3.mlp.router.bias"] == 128
    assert all(spec.bias for spec in architecture.every_linear)
    rope = first.attention.rope
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    written = {**yarn, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
    published = read("gpt_oss", rope_scaling=written, rope_theta=150_000)
    expected = published.config.layers[0].attention.rope
    assert np.array_equal(rope.table(9), expected.table(9))
    assert not any(spec.bias for spec in read("gpt_oss", attention_bias=False).linears)


def test_an_expert_that_all_tokens_meet():
    architecture = read("qwen2_moe", shared_expert_intermediate_size=40)
    sizes = {s.name: (s.out_features, s.in_features) for s in architecture.linears}
    assert sizes["model.layers.3.mlp.shared_expert.up_proj"] == (40, SIZES["hidden_size"])
    assert sizes["model.layers.3.mlp.shared_expert_gate"] == (1, SIZES["hidden_size"])
    assert windows("qwen2_moe", use_sliding_window=True, max_window_layers=2) == (
        4096, None, None, None,
    )  # fmt: skip


def test_which_layers_of_later_mixtures_have_experts():
    def mixtures(model_type, **changes):
        changes = {**NEEDED.get(model_type, {}), **changes}
        return [isinstance(layer.mlp, SparseMoeBlock) for layer in layers(model_type, **changes)]

    assert mixtures("ernie4_5_moe") == [False, True, True, True]
    ends = {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2}
    assert mixtures("ernie4_5_moe", **ends) == [False, True, False, False]
    assert mixtures("lfm2_moe", num_dense_layers=None) == [False, False, True, True]
    assert mixtures("glm4_moe", first_k_dense_replace=0) == [True] * 4
    assert mixtures("olmoe") == [True] * 4


def test_two_names_of_one_key():
    for keys in ({"moe_num_experts": 9}, {"num_experts": 9}):
        assert layers("ernie4_5_moe", **keys)[1].mlp.num_experts == 9
    assert layers("glm4_moe", num_local_experts=16)[1].mlp.num_experts == 16


def test_old_and_new_keys_of_rope_mean_the_same():
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert np.array_equal(read_rope(new, 12).table(9), read_rope(old, 12).table(9))
    lists = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    su = read_rope({"rope_scaling": {"type": "su", **lists}, **lengths}, 12)
    named = read_rope({"rope_parameters": {"rope_type": "longrope", **lists}, **lengths}, 12)
    assert np.array_equal(su.table(20), named.table(20))
    assert su.factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))
    null = read_rope({"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5}, 12)
    assert np.array_equal(null.table(9), read_rope({"rope_theta": 5e5}, 12).table(9))
    # Within the first length the short factors count, past it the long ones.
    assert su.frequencies(16)[1] == 2 * su.frequencies(17)[1]


def test_gemma_3_rotates_by_two_bases():
    old = read("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, head_dim=12)
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = read("gemma3_text", rope_parameters=both, head_dim=12, num_hidden_layers=6)
    near, far = (new.config.layers[i].attention.rope for i in (0, 5))
    assert np.array_equal(near.table(9), old.config.layers[0].attention.rope.table(9))
    assert not np.array_equal(near.table(9), far.table(9))


def test_olmo_3_rescales_layers_that_see_everything():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    base = {"rope_theta": 500000.0}
    plain = {"rope_type": "default", **base}
    both = {"sliding_attention": plain, "full_attention": {**yarn, **base}}
    for keys in ({"rope_parameters": both}, {**base, "rope_scaling": yarn}):
        near, _, _, far = (layer.attention.rope for layer in layers("olmo3", **keys))
        assert np.array_equal(near.table(9), read_rope(base, 12).table(9))
        expected = read_rope({**SIZES, **base, "rope_scaling": yarn}, 12)
        assert np.array_equal(far.table(9), expected.table(9))
    near, _, _, far = (layer.attention.rope for layer in layers("olmo3"))
    assert np.array_equal(near.table(9), far.table(9))
    assert windows("olmo3") == (4096, 4096, 4096, None)


@pytest.mark.parametrize("flat", [{"rope_type": "default"}, {"rope_theta": 5e5, "type": "default"}])
def test_olmo_3s_flat_keys_that_say_what_holds_anyway(flat):
    for keys in ({"rope_parameters": flat}, {"rope_parameters": flat, "rope_theta": 500000}):
        for attention in layers("olmo3", **keys):
            assert np.array_equal(attention.attention.rope.table(9), read_rope(
                {"rope_theta": 5e5}, 12).table(9))  # fmt: skip


def test_gemmas_activations():
    for family in ("gemma2", "gemma3_text"):
        for name in ("gelu", "gelu_pytorch_tanh", "silu"):
            assert layers(family, hidden_activation=name)[0].mlp.activation == name
    # transformers 5 has forgotten this key of the first Gemma's.
    gemma = read("gemma", hidden_activation="gelu")
    assert gemma.config.layers[0].mlp.activation == "gelu_pytorch_tanh"
    assert "hidden_activation = gelu" in gemma.notes[0]
    assert read("gemma", hidden_activation="gelu_pytorch_tanh").notes == ()


def test_multipliers_and_defaults():
    granite = read("granite", logits_scaling=4.0, embedding_multiplier=2.0)
    assert granite.config.layers[0].attention.scale == 1.0
    assert granite.logit_scale == 0.25 and granite.config.embedding_scale == 2.0
    assert read("gemma").norm_offset == 1.0 and read("gemma").tied
    assert read("gemma2").logit_softcap == 30.0
    assert [layer.attention.softcap for layer in layers("gemma2")] == [50.0] * 4
    assert read("gemma3_text").logit_softcap is None
    assert not read("llama").tied and read("cohere").tied
    assert (
        read("glm4", head_dim=12).linears[0].bias and not read("glm4", head_dim=12).linears[3].bias
    )
    names = {spec.name.rsplit(".", 1)[1] for spec in read("phi3").linears}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_heads_with_weights_of_their_own():
    norms = read("cohere", use_qk_norm=True).norm_shapes
    attention = "model.layers.3.self_attn."
    assert norms[attention + "q_norm.weight"] == (6, 12)
    assert norms[attention + "k_norm.weight"] == (2, 12)
    assert not any("q_norm" in name for name in read("cohere").norms)
    stable = read("stablelm", qk_layernorm=True, partial_rotary_factor=0.5)
    assert stable.stored_norms[f"{attention}k_layernorm.norms.1.weight"] == (12,)
    assert f"{attention}k_layernorm.norms.2.weight" not in stable.stored_norms


def test_gpt_neox_has_names_of_its_own():
    """For the rotation's keys; the usual ones count within ``rope_parameters`` alone."""
    made = read("gpt_neox", rotary_pct=0.5, rotary_emb_base=500, rope_theta=7.0)
    layer = made.config.layers[0]
    assert (layer.attention.rope.rotary_dim, layer.attention.rope.theta) == (6, 500)
    assert layer.order.parallel and layer.attention.dimensions.num_key_value_heads == 6
    rope = {"rope_theta": 9.0, "partial_rotary_factor": 1.0}
    inner = layers("gpt_neox", rope_parameters=rope, rotary_pct=0.5)[0].attention.rope
    assert (inner.rotary_dim, inner.theta) == (12, 9.0)
    whole = {"hidden_size": 96, "pad_token_id": 3}  # of heads of 16 a quarter is rotated
    by_default = read("gpt_neox", **whole)
    assert by_default.config.layers[0].attention.rope.rotary_dim == 4
    assert by_default.padding_idx is None and read("llama", **whole).padding_idx == 3
    assert read("gpt_neox", rotary_pct=0.5, hidden_dropout=0.1).notes


def test_queries_of_ministral_3_grow():
    attention = layers("ministral3", head_dim=12)[0].attention
    plain, grown = attention.rope.table(40_000), attention.query_rope.table(40_000)
    factors = 1 + 0.1 * np.log([1, 2, 3])  # Hugging Face's beta, every 16,384 tokens
    for position, factor in zip((16_383, 16_384, 32_768), factors, strict=True):
        assert np.allclose(grown[position], factor * plain[position], rtol=1e-6)


def test_layers_of_gemma_4_share_keys_and_values():
    shared = {**G4, "layer_types": KINDS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    made = layers("gemma4_text", **shared)
    assert [layer.attention.shared for layer in made] == [False, False, True, True]
    assert [layer.keeps for layer in made] == [True, True, False, False]
    assert [layer.mlp.dimensions.intermediate_size for layer in made] == [100, 100, 200, 200]
    assert [layer.attention.dimensions.head_dim for layer in made] == [256, 20] * 2
    names = {spec.name for spec in read("gemma4_text", **shared).linears}
    assert "model.layers.1.self_attn.v_proj" in names
    assert not any(re.match(r"model.layers.[23].self_attn.[kv]_proj", name) for name in names)
    assert windows("gemma4_text", **PLAIN) == (512, 512, 512, None)  # the last sees everything
    assert read("gemma4_text", **G4).tables == {"model.embed_tokens_per_layer.weight": (262144, 24)}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    last = layers("gemma4_text", **keys, **PLAIN)[-1].attention
    assert last.keys_as_values and last.dimensions.num_key_value_heads == 1
    table = last.rope.table(9)  # of a head of 512 a quarter turns
    assert table.shape[1] == 256 and (table[:, 64:] == [1, 0]).all() and table[8, 63, 1] > 0


def test_the_text_part_of_mistral_3():
    ministral = read("mistral3", **NEEDED["mistral3"])
    assert ministral.config.layers[0].attention.query_rope is not None and not ministral.tied
    assert ministral.embed_name == "model.language_model.embed_tokens.weight"
    small = {**SIZES, "sliding_window": None}
    assert read("mistral3", text_config=small, tie_word_embeddings=True).tied
    other = {**small, "tie_word_embeddings": False}
    assert not read("mistral3", text_config=other, tie_word_embeddings=True).tied


def test_who_ties_the_head_of_a_vision_language_model():
    tied = {**SIZES, "tie_word_embeddings": True}
    either = {"llava": "llama", "qwen2_vl": None, "qwen2_5_vl": None}
    whole_alone = {"llava_next": "llama", "idefics3": "llama", "smolvlm": "llama", "qwen3_vl": None}
    for model_type, text in (either | whole_alone).items():
        named = {} if text is None else {"model_type": text}
        assert read(model_type, text_config={**tied, **named}).tied == (model_type in either)
        plain = {**SIZES, **named}
        assert not read(model_type, text_config=plain).tied
        assert read(model_type, text_config=plain, tie_word_embeddings=True).tied
    of_lfm2 = {**SIZES, "model_type": "lfm2"}
    assert read("lfm2_vl", text_config=of_lfm2).tied
    assert not read("lfm2_vl", text_config=of_lfm2, tie_embedding=False).tied


def test_qwen_s_language_models_have_defaults_of_their_own():
    for model_type, theta in (("qwen2_vl", 1e6), ("qwen2_5_vl", 1e6), ("qwen3_vl", 5e5)):
        layer = read(model_type, text_config=SIZES).config.layers[0]
        assert layer.attention.rope.theta == theta
        assert layer.norm.eps == (1e-6 if model_type == "qwen3_vl" else 1e-5)
    kind = {"type": "mrope", "mrope_section": [2, 2, 2]}
    flat = read("qwen2_5_vl", rope_scaling=kind, rope_theta=1e4, rms_norm_eps=1e-6)
    nested = {"rope_scaling": kind, "rope_theta": 1e4, "rms_norm_eps": 1e-6}
    own = read("qwen2_5_vl", text_config={**SIZES, **nested})
    assert flat.norms == own.norms and flat.linears == own.linears
    assert flat.config.layers[0].norm == own.config.layers[0].norm
    table = flat.config.layers[0].attention.rope.table(9)
    assert np.array_equal(table, own.config.layers[0].attention.rope.table(9))
    assert flat.config.layers[0].attention.rope.kind == "default"
    windows = {"use_sliding_window": True, "max_window_layers": 0}  # which transformers ignores
    assert (
        read("qwen3_vl", text_config={**SIZES, **windows}).config.layers[0].attention.window is None
    )


def test_hunyuan_s_base_is_stretched_for_all_lengths():
    scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
    rope = layers("hunyuan_v1_dense", rope_scaling=scaling)[0].attention.rope
    assert not rope.by_length
    base = {"rope_theta": 10_000.0 * 50.0 ** (12 / 10)}
    assert np.array_equal(rope.table(9), read_rope(base, 12).table(9))


@pytest.mark.parametrize("sections", [[11, 11, 10], [0, 32, 0], [1, 2, 40]])
def test_multimodal_rope_of_texts_is_plain(sections):
    """However pairs are divided, all three positions of a text's token are the same number."""
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    ropes = [
        layers("qwen3_5_text", head_dim=256, rope_parameters=keys)[3].attention.rope
        for keys in (rope, {**rope, "mrope_section": sections, "mrope_interleaved": True})
    ]
    plain, text = (each.table(9) for each in ropes)
    assert np.array_equal(plain, text) and ropes[1].rotary_dim == 64
    # Time, height and width of each token, and by which of them a pair turns.
    positions = np.tile(np.arange(9), (3, 1))
    axis = np.zeros(32, int)
    for own in (1, 2):
        axis[own : 3 * sections[own] : 3] = own
    frequencies = 1e7 ** -(np.arange(32) / 32)
    angles = positions[axis].T * frequencies
    np.testing.assert_allclose(text[..., 0], np.cos(angles), atol=2e-6)
    np.testing.assert_allclose(text[..., 1], np.sin(angles), atol=2e-6)


def test_layers_of_delta_nets():
    def attending(model_type, **changes):
        kinds = [type(layer.attention).__name__ for layer in layers(model_type, **changes)]
        return [kind == "Attention" for kind in kinds]

    assert attending("qwen3_next") == [False, False, False, True]
    assert attending("qwen3_5_text", full_attention_interval=2) == [False, True] * 2
    kinds = ["full_attention", "linear_attention"] * 2
    named = {"layer_types": kinds, "full_attention_interval": 4}
    assert attending("qwen3_5_moe_text", **named) == [True, False] * 2
    dense = [type(x.mlp).__name__ for x in layers("qwen3_next", mlp_only_layers=[1])]
    assert dense == ["SparseMoeBlock", "GatedMLP", "SparseMoeBlock", "SparseMoeBlock"]
    every_other = layers("qwen3_next", decoder_sparse_step=2)
    assert [type(x.mlp).__name__ for x in every_other] == ["GatedMLP", "SparseMoeBlock"] * 2
    none = layers("qwen3_next", num_experts=0)
    assert {type(x.mlp).__name__ for x in none} == {"GatedMLP"}
    ignored = layers("qwen3_5_moe_text", mlp_only_layers=[1], decoder_sparse_step=2)
    assert {type(x.mlp).__name__ for x in ignored} == {"SparseMoeBlock"}


def test_what_is_added_to_stored_norms():
    """One to all but what is a delta net's own."""
    architecture = read("qwen3_5_text")
    offsets = {name: architecture.offset_of(name) for name in architecture.norms}
    plain = {name for name, offset in offsets.items() if offset == 0.0}
    assert plain == {name for name in offsets if ".linear_attn." in name} and len(plain) == 12
    assert set(offsets.values()) == {0.0, 1.0}


def test_dropouts_that_are_not_applied_are_told():
    assert len(read("seed_oss").notes) == 2
    assert not read("seed_oss", attention_dropout=0.0, residual_dropout=0.0).notes


@pytest.mark.parametrize("model_type", known_families())
def test_every_family_names_its_layers_once(model_type):
    needed = NEEDED.get(model_type, {})
    changes = {"head_dim": 12, "partial_rotary_factor": 0.5, **needed}
    architecture = read(model_type, **changes)
    names = [spec.name for spec in architecture.every_linear]
    ends = [name for name in names if "altup_" in name or "per_layer_model" in name]
    assert len(names) == len(set(names)) and (len(names) - len(ends)) % 4 == 0
    assert not set(names) & {name.rsplit(".", 1)[0] for name in architecture.norms}


def test_ids_of_images_and_sound():
    """Of Gemma 3n and 4: transformers embeds them as no text's, even where there is no image."""
    text = {"text_config": {**SIZES, **NO_SHARED, "head_dim": 12, "vocab_size": 99}}
    offsets = {"vision_config": {"vocab_offset": 90}, "audio_config": {"vocab_offset": 95}}
    assert read("gemma3n", **text).media_ids == read("gemma3n_text", **NO_SHARED).media_ids == ()
    of = read("gemma3n", **text, **offsets)
    assert (of.media_ids, of.text_vocab_size) == ((range(90, 99),), 90)
    published = read("gemma3n", text_config={**text["text_config"], "vocab_size": 262_400})
    assert published.media_ids == (range(262_144, 262_400),)
    of = read("gemma4", text_config={**SIZES, **G4, "head_dim": 12}, video_token_id=7)
    assert (of.media_ids, of.text_vocab_size) == ((range(258_881, 258_882), range(7, 8)), 7)
    keys = {"video_token_id": None, "audio_token_id": 5, "text_config": {**SIZES, "head_dim": 12}}
    assert read("gemma4_unified", **keys).media_ids == (range(258_880, 258_881), range(5, 6))
