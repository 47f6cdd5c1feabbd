"""What families read and write beyond pairs of keys."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.gguf import families, mixtures
from qlora_wgpu.gguf.architecture import Keys


def keys_of(architecture, **values):
    named = {f"{architecture}.{k.replace('__', '.')}": value for k, value in values.items()}
    return Keys({"general.architecture": architecture, **named}, "F")


SWA = {"rope_theta": 1e4, "num_hidden_layers": 4}
SLIDING, FULL = "sliding_attention", "full_attention"


def test_granite_s_windows_and_rotations_are_listed():
    rotates = np.array([True, False, True, True])
    keys = keys_of("granite_swa", attention__rope_pattern=rotates)
    made = families.read_granite_swa(keys, None, SWA)
    assert made["layer_rope_theta"] == [1e4, 0, 1e4, 1e4]
    assert made["layer_types"] == [SLIDING] * 3 + [FULL]
    plain = families.read_granite_swa(keys_of("granite_swa"), None, SWA)
    assert plain["layer_rope_theta"] == [1e4] * 4
    for pattern in (np.ones(3, bool), True):
        with pytest.raises(CheckpointError, match="must have a value for each of the 4 layers"):
            families.read_granite_swa(
                keys_of("granite_swa", attention__rope_pattern=pattern), None, SWA
            )


@pytest.mark.parametrize(
    ("ropes", "window", "expected"),
    [
        (["a", None, "a"], 64, [True, False, True]),
        ([None, None, None], 64, [False] * 3),
        (["a", "b", None], 64, "different bases"),
        (["a", "a", "a"], None, "full attention in every layer"),
    ],
)
def test_granite_s_rotations_have_one_base(monkeypatch, ropes, window, expected):
    monkeypatch.setattr(families, "check_granite", lambda keys: None)
    keys = SimpleNamespace(
        attentions=[SimpleNamespace(rope=rope) for rope in ropes],
        values={"attention.sliding_window": window} if window else {},
        unsupported=UnsupportedModelError,
    )  # fmt: skip
    if isinstance(expected, str):
        with pytest.raises(UnsupportedModelError, match=expected):
            families.write_granite_swa(keys)
        return
    families.write_granite_swa(keys)
    assert keys.values["attention.rope_pattern"].tolist() == expected


@pytest.mark.parametrize("layers", [63, 64])
def test_exaone_4_has_windows_in_64_layers_alone(layers):
    config = {"rope_theta": 1e6, "num_hidden_layers": layers}
    made = families.read_exaone4(keys_of("exaone4"), None, config)
    if layers == 64:
        assert made["sliding_window"] == 4096
        assert made["layer_types"] == [SLIDING, SLIDING, SLIDING, FULL] * 16
        keys = keys_of("exaone4", attention__sliding_window=64, rope__freq_base_swa=1e6)
        assert families.read_exaone4(keys, None, config)["sliding_window"] == 64
        with pytest.raises(UnsupportedModelError, match=r"rope\.freq_base_swa = 10000"):
            families.read_exaone4(keys_of("exaone4", rope__freq_base_swa=1e4), None, config)
        return
    assert made == {"sliding_window": None, "layer_types": [FULL] * 63}
    with pytest.raises(UnsupportedModelError, match="sliding_window = 64 is not supported"):
        families.read_exaone4(keys_of("exaone4", attention__sliding_window=64), None, config)


# ---- mixtures ------------------------------------------------------------------------------------


def writing(**more):
    return SimpleNamespace(unsupported=UnsupportedModelError, **more)


@pytest.mark.parametrize(("counts", "works"), [([2, 2], True), ([], True), ([2, 3], False)])
def test_every_layer_has_the_same_experts_per_token(counts, works):
    keys = writing(mixtures=[SimpleNamespace(num_experts_per_tok=count) for count in counts])
    if works:
        mixtures.check_one_top_k(keys)
        return
    with pytest.raises(UnsupportedModelError, match="numbers of experts per token that differ"):
        mixtures.check_one_top_k(keys)


@pytest.mark.parametrize(
    ("count", "sums", "normalized", "message"),
    [
        (2, True, True, None),
        (2, False, False, None),
        (1, True, True, "layers with experts next to layers without"),
        (2, False, True, r"do not sum to one \(norm_topk_prob = false\)"),
        (2, True, False, r"weights that sum to one \(norm_topk_prob = true\)"),
    ],
)
def test_layers_without_experts_or_with_other_weights(count, sums, normalized, message):
    keys = writing(
        mixtures=[None] * count, decoder=SimpleNamespace(layers=[None] * 2),
        experts=SimpleNamespace(norm_topk_prob=sums),
    )  # fmt: skip
    if message is None:
        mixtures.check_every_layer(keys, normalized=normalized)
        return
    with pytest.raises(UnsupportedModelError, match=message):
        mixtures.check_every_layer(keys, normalized=normalized)


@pytest.mark.parametrize(
    ("changes", "sigmoid", "message"),
    [
        ({}, True, None),
        ({"sigmoid": False}, False, None),
        ({}, False, "do not sum to one, or groups"),
        ({"normalized": False}, True, "do not sum to one, or groups"),
        ({"groups": 2}, True, "do not sum to one, or groups"),
        ({"scale": 2.5}, True, "a routed_scaling_factor of 2.5"),
        ({"correction": None}, True, "without a correction bias"),
    ],
)
def test_routers_that_no_key_describes(changes, sigmoid, message):
    own = {"sigmoid": True, "normalized": True, "groups": 1, "scale": 1.0, "correction": "b"}
    own |= changes
    choice = SimpleNamespace(correction=own.pop("correction"))
    keys = writing(scoring=SimpleNamespace(**own), experts=SimpleNamespace(choice=choice))
    if message is None:
        mixtures.check_router(keys, sigmoid=sigmoid)
        return
    with pytest.raises(UnsupportedModelError, match=message):
        mixtures.check_router(keys, sigmoid=sigmoid)


@pytest.mark.parametrize(
    ("groups", "top", "pairs", "written"),
    [(4, 2, True, (4, 2)), (4, 4, False, (None, None)), (4, 2, False, None)],
)
def test_groups_of_experts(groups, top, pairs, written):
    scoring = SimpleNamespace(groups=groups, top_groups=top, pairs=pairs)
    keys = writing(scoring=scoring)
    if written is None:
        with pytest.raises(UnsupportedModelError, match="ranked by their best expert"):
            mixtures.check_groups(keys)
        return
    mixtures.check_groups(keys)
    assert (mixtures._groups(keys), mixtures._top_groups(keys)) == written


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, (1, 1)), ({"expert_group_count": 4}, (4, 4)), ({"expert_group_count": 0}, (1, 1)),
     ({"expert_group_count": 4, "expert_group_used_count": 2}, (4, 2)),
     ({"expert_group_count": 4, "expert_group_used_count": 0}, (4, 1))],
)  # fmt: skip
def test_groups_that_a_file_names(values, expected):
    made = mixtures.read_groups(keys_of("own", **values), None, {})
    assert (made["n_group"], made["topk_group"]) == expected


def test_keys_of_softmax_experts():
    assert mixtures.by_softmax(normalized=None) == {
        "expert_gating_func": (0, 1), "expert_weights_scale": (0.0, 1.0),
    }  # fmt: skip
    assert mixtures.by_softmax(normalized=True, scaled=True) == {
        "expert_gating_func": (0, 1), "expert_weights_norm": (True,),
    }  # fmt: skip
    (size,) = mixtures.shared_size("n", "width")
    assert size({"n": 3, "width": 5}) == 15


def test_the_kinds_of_llama():
    biased = {"blk.0.attn_q.bias"}
    assert mixtures.read_llama(keys_of("llama"), biased, {}) == {
        "attention_bias": True, "mlp_bias": False,
    }  # fmt: skip
    mistral = mixtures.read_llama(keys_of("llama", attention__sliding_window=64), set(), {})
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 64)
    experts = {"expert_count": 8, "expert_used_count": 2}
    mixtral = mixtures.read_llama(keys_of("llama", **experts), set(), {})
    assert (mixtral["model_type"], mixtral["sliding_window"]) == ("mixtral", None)
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (8, 2)
    with pytest.raises(UnsupportedModelError, match="expert_gating_func = 2 is not supported"):
        mixtures.read_llama(keys_of("llama", **experts, expert_gating_func=2), set(), {})


def test_granite_s_shared_mlp():
    assert mixtures.read_granite_moe(keys_of("granite"), None, {}) == {}
    shared = keys_of("granite", expert_shared_feed_forward_length=64)
    made = mixtures.read_granite_moe(shared, None, {})
    assert made["model_type"] == "granitemoeshared" and made["shared_intermediate_size"] == 64
