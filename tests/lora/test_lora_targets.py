"""Which layers get which adapter, and how it begins: as PEFT has it."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import ExpertSpec, LinearSpec, Stacking
from qlora_wgpu.lora.config import value_for
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, MAGNITUDE, parse_name, tensor_name
from qlora_wgpu.lora.targets import (
    bare_parameters,
    check_saved,
    check_start,
    known_targets,
    lora_config,
    saved_modules,
    targeted,
)
from qlora_wgpu.lora.trained_tokens import Vocabulary

LINEARS = [
    LinearSpec(f"model.layers.{i}.{leaf}", 24, 20)
    for i in range(12)
    for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
]


def names(**lora):
    return [s.name for s in AdapterLayout(LoraConfig(**lora), LINEARS).targets]


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("proj", "model.layers.0.self_attn.q_proj", False),
        ("[qv]_proj", "model.layers.0.self_attn.v_proj", True),
        ("layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", False),
        ("^model.layers.0.self_attn.q_proj$", "model.layers.0.self_attn.q_proj", True),
        ("^layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", False),
        ("^model.layers.1.mlp.up_proj|q_proj", "model.layers.0.self_attn.q_proj", True),
    ],
)
def test_patterns(pattern, module, expected):
    assert value_for({"never": 1, pattern: 9}, module, 4) == (9 if expected else 4)


def test_the_first_pattern_that_fits_counts():
    assert value_for({"q_proj": 1, "self_attn.q_proj": 2}, "a.self_attn.q_proj", 3) == 1


def test_ranks_and_alphas_of_their_own():
    config = LoraConfig(
        r=4, lora_alpha=8, rank_pattern={"q_proj": 6, "layers.3.mlp.up_proj": 1},
        alpha_pattern={"[qv]_proj": 3},
    )  # fmt: skip
    adapter = AdapterLayout(config, LINEARS)
    q, v, up, other = (
        adapter.loras[f"model.layers.{leaf}"]
        for leaf in ("3.self_attn.q_proj", "3.self_attn.v_proj", "3.mlp.up_proj", "4.mlp.up_proj")
    )
    assert [x.r for x in (q, v, up, other)] == [6, 4, 1, 4]
    assert [x.scaling for x in (q, v, up, other)] == [0.5, 0.75, 8.0, 2.0]
    shapes = {n: a.shape for n, a in adapter.split(adapter.initial(0)).items()}
    at = "base_model.model.model.layers.3.self_attn.q_proj.lora_"
    assert shapes[f"{at}A.weight"] == (6, 20) and shapes[f"{at}B.weight"] == (24, 6)
    assert lora_config(adapter.peft) == config.model_copy(
        update={"target_modules": ["q_proj", "up_proj", "v_proj"]}
    )


def test_names_that_fit_nothing_are_passed_over_in_files():
    stack = ExpertSpec("model.experts", "up", 3, 8, 4)
    known = ["q_proj", "layers.0.mlp.up_proj", "model.experts.up"]
    assert known_targets([*known, "c_attn"], LINEARS, [stack]) == known
    assert known_targets(["c_attn"], LINEARS, []) == ["c_attn"]


def test_layers():
    assert len(names()) == 36
    chosen = names(layers_to_transform=[1, 11], target_modules=["q_proj"])
    assert chosen == ["model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"]
    with pytest.raises(ConfigError, match=r"layers_to_transform \[12\] leaves no layer"):
        names(layers_to_transform=[12])


def test_a_regular_expression():
    assert names(target_modules=r".*\.(3|4)\.mlp\..*") == [
        "model.layers.3.mlp.up_proj",
        "model.layers.4.mlp.up_proj",
    ]
    with pytest.raises(ConfigError, match="matches no adaptable layer's full name"):
        names(target_modules="self_attn.q_proj")
    for wrong in ("q_proj", "(", ""):
        with pytest.raises(ConfigError):
            LoraConfig(target_modules=wrong)


def test_how_it_begins():
    spec = [LinearSpec("model.layers.0.q_proj", 300, 500)]
    for init, low, high in (("default", 0.0256, 0.026), ("gaussian", 0.0615, 0.0635)):
        adapter = AdapterLayout(LoraConfig(r=16, init_lora_weights=init), spec)
        flat = adapter.initial(3)
        a, b = adapter.split(flat).values()
        assert a.shape == (16, 500) and not b.any() and low < a.std() < high  # 1/√(3·500), 1/16
        assert not np.array_equal(flat, adapter.initial(4))
    assert np.abs(AdapterLayout(LoraConfig(r=16), spec).initial(3)).max() <= 1 / np.sqrt(500)


def test_experts_have_one_rank():
    stack = ExpertSpec("model.layers.0.mlp.experts", "up_proj", 3, 8, 4)
    with pytest.raises(ConfigError, match="all experts of"):
        AdapterLayout(
            LoraConfig(target_modules=["up_proj"], rank_pattern={"1.up_proj": 2}), LINEARS, [stack]
        )
    with pytest.raises(ConfigError, match="all or none"):
        AdapterLayout(LoraConfig(target_modules=["experts.1.up_proj"]), LINEARS, [stack])
    assert AdapterLayout(LoraConfig(), LINEARS, [stack]).expert_loras == {}
    both = AdapterLayout(LoraConfig(target_modules=["up_proj"]), LINEARS, [stack])
    assert both.expert_loras[stack.name].a_stride > 0


@pytest.mark.parametrize(
    "target_modules",
    [
        ["experts.1.up_proj"],
        ["q_proj", "experts.0.up_proj", "experts.2.up_proj"],
        r".*\.experts\.1\.up_proj",
        r".*\.(q_proj|experts\.[02]\.up_proj)",
    ],
)
def test_some_of_a_layers_experts_are_refused(target_modules):
    stack = ExpertSpec("model.layers.0.mlp.experts", "up_proj", 3, 8, 4)
    with pytest.raises(
        ConfigError,
        match=r"'model\.layers\.0\.mlp\.experts\.[01]\.up_proj' is missing, "
        r"but either all or none of a layer's experts .* name 'up_proj'",
    ):
        AdapterLayout(LoraConfig(target_modules=target_modules), LINEARS, [stack])
    with pytest.raises(ConfigError, match="all or none"):
        targeted(LINEARS, target_modules, [stack])


def test_all_experts_by_a_regular_expression():
    stacks = [ExpertSpec(f"model.layers.{i}.mlp.experts", "up_proj", 3, 8, 4) for i in range(2)]
    config = LoraConfig(target_modules=r".*\.0\.mlp\.experts\..*")
    assert set(AdapterLayout(config, LINEARS, stacks).expert_loras) == {stacks[0].name}


MIXED = [
    LinearSpec("model.layers.0.self_attn.q_proj", 8, 8),
    LinearSpec("model.layers.0.mlp.up_proj", 8, 8),
    LinearSpec("model.layers.1.self_attn.q_proj", 8, 8),
]
STACK = ExpertSpec("model.layers.1.mlp.experts", "up_proj", 3, 8, 8)


def test_dense_layers_beside_experts_are_named_in_full():
    """all-linear leaves out experts, which are called as a dense layer is."""
    adapter = AdapterLayout(LoraConfig(), MIXED, [STACK])
    assert adapter.peft.target_modules == ["model.layers.0.mlp.up_proj", "q_proj"]
    opened = AdapterLayout(lora_config(adapter.peft), MIXED, [STACK])
    assert opened.names == adapter.names
    assert adapter.is_written_together and adapter.peft_differences == []
    [text] = AdapterLayout(LoraConfig(use_dora=True), MIXED, [STACK]).peft_differences
    assert "treats model.layers.0.mlp.up_proj (1 such layers) as experts" in text


def test_layers_that_have_tensors_tell_what_names_mean():
    """PEFT's all-linear leaves experts out, and writes the last parts of names."""
    stored = dataclasses.replace(
        AdapterLayout(LoraConfig(), MIXED, [STACK]).peft, target_modules=["q_proj", "up_proj"]
    )
    names = [spec.name for spec in MIXED]
    opened = AdapterLayout(lora_config(stored, names, [STACK]), MIXED, [STACK])
    assert [spec.name for spec in opened.targets] == names
    experts = [*names, *(spec.name for spec in STACK.linears)]
    opened = AdapterLayout(lora_config(stored, experts, [STACK]), MIXED, [STACK])
    assert [spec.name for spec in opened.targets] == experts


def test_what_peft_reads_as_its_own():
    """All else is written as it has it."""
    sparse = [MIXED[0], MIXED[2]]
    stacks = [dataclasses.replace(STACK, leaf=leaf) for leaf in STACK.stacking.leaves]
    names = ["q_proj", *STACK.stacking.leaves]

    def together(experts=stacks, **changes):
        config = LoraConfig(**{"target_modules": names, **changes})
        return AdapterLayout(config, sparse, experts).is_written_together

    assert not together()
    assert not together(target_modules=["q_proj"], use_rslora=True)
    assert together(use_rslora=True) and together(lora_dropout=0.1)
    assert together(rank_pattern={"up_proj": 3}) and together(target_modules=r".*_proj")
    assert together(target_modules=[stack.name for stack in stacks])
    unknown = [dataclasses.replace(stack, fused=False) for stack in stacks]
    assert together(unknown) and not together(unknown, target_modules=["q_proj"])


def test_names_within_the_part_that_is_adapted():
    """Where other parts of a running model have layers that are called alike."""
    specs = [LinearSpec(f"model.text.layers.0.{leaf}", 8, 8) for leaf in ("x.q_proj", "o_proj")]
    adapter = AdapterLayout(LoraConfig(), specs, within="model.text.")
    assert adapter.peft.target_modules == r"model\.text\.(?:.+\.)?(?:o_proj|q_proj)"
    assert (
        AdapterLayout(lora_config(adapter.peft), specs, within="model.text.").names == adapter.names
    )
    whole = LoraConfig(target_modules=[specs[0].name])
    chosen = AdapterLayout(whole, specs, within="model.text.").peft.target_modules
    assert re.fullmatch(chosen, specs[0].name) and not re.fullmatch(chosen, specs[1].name)
    assert not re.fullmatch(chosen, "model.images.layers.0.x.q_proj")


@pytest.mark.parametrize(
    ("targets", "together"),
    [("w1", True), ("w3", True), ("w1 w2", True), ("w1 w3", True), ("w2", False),
     ("w1 w3 w2", False), ("q_proj", False)],
)  # fmt: skip
def test_experts_that_peft_fuses(targets, together):
    stacks = [
        ExpertSpec(
            f"model.layers.{i}.block_sparse_moe.experts", leaf, 2, 8, 8,
            stacking=Stacking(("w1", "w3", "w2")),
        )
        for i in range(2)
        for leaf in ("w1", "w3", "w2")
    ]  # fmt: skip
    config = LoraConfig(target_modules=targets.split())
    assert AdapterLayout(config, [MIXED[0]], stacks).is_written_together == together


def test_names():
    for leaf in (LORA_A, LORA_B, MAGNITUDE):
        assert parse_name(tensor_name("model.layers.0.q_proj", leaf)) == (
            "model.layers.0.q_proj",
            leaf,
        )
    assert parse_name("base_model.model.a.b.lora_A.default.weight") == ("a.b", LORA_A)
    assert parse_name("base_model.model.a.lora_magnitude_vector.default.weight") == ("a", MAGNITUDE)
    assert parse_name("base_model.model.a.lora_A.bias") is None
    assert parse_name("model.a.lora_A.weight") is None


def test_dora():
    adapter = AdapterLayout(LoraConfig(r=2, use_dora=True), LINEARS[:2])
    shapes = {n: a.shape for n, a in adapter.split(adapter.initial(0)).items()}
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    assert shapes[at] == (24,) and len(shapes) == 6 and adapter.num_parameters == 2 * (88 + 24)
    assert lora_config(adapter.peft).use_dora
    stack = ExpertSpec("model.layers.0.mlp.experts", "up_proj", 3, 8, 4)
    with pytest.raises(ConfigError, match="is not supported for experts"):
        AdapterLayout(LoraConfig(use_dora=True, target_modules=["up_proj"]), LINEARS, [stack])


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_for_no_adapted_layer_is_an_error(key):
    for pattern in ("qproj", "up_proj"):  # misspelt; of a layer without an adapter
        with pytest.raises(ConfigError, match=f"lora.{key}: '{pattern}' matches no adapted layer"):
            names(target_modules=["q_proj", "v_proj"], **{key: {"v_proj": 2, pattern: 4}})


@pytest.mark.parametrize(("lora", "told"), [
    ({"use_dora": True}, "use_dora is not supported for embed_tokens"),
    ({"init_lora_weights": "pissa"}, "pissa is not supported for embed_tokens"),
    ({"trainable_token_indices": [1]}, "names embed_tokens while rows of tokens are trained"),
    ({"ensure_weight_tying": True}, "one pair for both is not supported"),
])  # fmt: skip
def test_what_a_pair_on_an_embedding_cannot_be_with(lora, told):
    tied = Vocabulary("embed_tokens", "lm_head", 50, 20, tied=True)

    def laid_out(targets):
        config = LoraConfig(target_modules=targets, **lora)
        return AdapterLayout(config, LINEARS, (), AdapterDtypes(), None, vocabulary=tied)

    with pytest.raises(ConfigError, match=told):
        laid_out(["q_proj", "embed_tokens"])
    if "ensure_weight_tying" not in lora:
        assert laid_out(["q_proj"]).embedding is None


# ---- modules trained whole -----------------------------------------------------------------------

EMBEDDING = "model.embed_tokens"


def ends(*, tied=False, **more):
    return Vocabulary(EMBEDDING, "lm_head", 50, 20, tied, **more)


@pytest.mark.parametrize(
    ("vocabulary", "lora", "expected"),
    [
        (ends(), {}, ()),
        (ends(), {"modules_to_save": ["lm_head"]}, ("lm_head",)),
        (ends(), {"modules_to_save": ["lm_head", "embed_tokens"]}, (EMBEDDING, "lm_head")),
        (ends(bias=True), {"modules_to_save": ["embed_tokens"]}, (EMBEDDING,)),
        (ends(tied=True), {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
         (EMBEDDING,)),
        (ends(tied=True), {"modules_to_save": ["lm_head"]}, "lm_head is tied to model.embed_tok"),
        (ends(bias=True), {"modules_to_save": ["lm_head"]}, "lm_head has a bias, which PEFT would"),
        (ends(), {"modules_to_save": ["norm"]}, r"'norm' is not supported \(supported: embed_tok"),
    ],
)  # fmt: skip
def test_modules_that_are_trained_whole(vocabulary, lora, expected):
    if isinstance(expected, tuple):
        assert saved_modules(LoraConfig(**lora), vocabulary) == expected
        return
    with pytest.raises(ConfigError, match=f"modules_to_save.*{expected}"):
        saved_modules(LoraConfig(**lora), vocabulary)


@pytest.mark.parametrize(
    ("saved", "lora", "adapted", "gradient", "trains_rows", "message"),
    [
        ([], {"init_lora_weights": "pissa"}, ["lm_head"], "bfloat16", True, None),
        (["lm_head"], {}, ["q_proj"], "float32", False, None),
        (["lm_head"], {}, ["lm_head"], "float32", False, "target_modules both name lm_head"),
        (["lm_head"], {}, ["q_proj"], "float32", True, "only rows of them"),
        (["lm_head"], {"init_lora_weights": "pissa"}, [], "float32", False, "mutually exclusive"),
        (["lm_head"], {}, [], "bfloat16", False, "requires gradients in float32"),
    ],
)
def test_what_goes_with_modules_that_are_trained_whole(
    saved, lora, adapted, gradient, trains_rows, message
):
    given = saved, LoraConfig(**lora), adapted, AdapterDtypes(gradient=gradient)
    if message is None:
        check_saved(*given, trains_rows=trains_rows)
        return
    with pytest.raises(ConfigError, match=message):
        check_saved(*given, trains_rows=trains_rows)


@pytest.mark.parametrize(
    ("kind", "lora", "stacks", "message"),
    [
        ("default", {"use_dora": True, "r": 21}, [1], None),
        ("gaussian", {"use_dora": True, "r": 21}, [1], None),
        ("pissa", {"r": 20}, [], None),
        ("pissa", {"r": 21}, [], "needs rank 21 of .*q_proj, which has 20: lower lora.r"),
        ("pissa", {"use_dora": True}, [], "use_dora are mutually exclusive"),
        ("pissa", {"trainable_token_indices": [1]}, [], "leave one of them out"),
        ("pissa", {}, [1], "is not supported for experts"),
    ],
)
def test_starts_that_a_base_cannot_have(kind, lora, stacks, message):
    config = AdapterLayout(LoraConfig(), LINEARS).peft
    given = dataclasses.replace(config, **lora), kind, LINEARS[:1], stacks
    if message is None:
        check_start(*given)
        return
    with pytest.raises(ConfigError, match=f"init_lora_weights: {kind}.*{message}"):
        check_start(*given)


def test_bare_parameters_have_no_magnitudes():
    routers = [SimpleNamespace(name=name, is_module=name == "b") for name in "abc"]
    assert bare_parameters(LoraConfig(), ["a", "b"], routers) == {"a"}
    assert bare_parameters(LoraConfig(use_dora=True), ["b"], routers) == set()
    with pytest.raises(ConfigError, match="use_dora is not supported for a, a bare parameter"):
        bare_parameters(LoraConfig(use_dora=True), ["a"], routers)
