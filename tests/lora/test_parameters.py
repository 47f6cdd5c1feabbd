"""PEFT's adapters on parameters that hold experts together, and ours of each expert."""

import json
from dataclasses import replace

import numpy as np
import pytest

from qlora_wgpu.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.family import PLAIN, Stacking
from qlora_wgpu.lora import AdapterConfig, load_adapter, save_adapter
from qlora_wgpu.lora.expert_parameters import (
    ExpertArrangement,
    arranged,
    from_target_parameters,
    to_target_parameters,
)
from qlora_wgpu.lora.init import STARTED, started_in
from qlora_wgpu.lora.peft_files import WEIGHTS
from qlora_wgpu.lora.peft_names import LORA_A, LORA_B, MAGNITUDE, adapted_layers, tensor_name

AT, EXPERTS, HIDDEN, INNER = "model.layers.0.mlp.experts", 3, 5, 4
ATTENTION = "model.layers.0.self_attn.q_proj"
TURNS = Stacking(in_turns=True)
CONFIG = AdapterConfig(
    r=2, lora_alpha=3, lora_dropout=0.1, use_rslora=False, base_model_name_or_path=None,
    target_modules=["down_proj", "gate_proj", "q_proj", "up_proj"],
)  # fmt: skip


def random(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def of_experts(config, kinds=("gate", "up", "down")):
    made = {tensor_name(ATTENTION, LORA_A): random(2, HIDDEN)}
    made[tensor_name(ATTENTION, LORA_B)] = random(HIDDEN, 2)
    for kind in kinds:
        out, inner = (HIDDEN, INNER) if kind == "down" else (INNER, HIDDEN)
        for i in range(EXPERTS):
            module = f"{AT}.{i}.{kind}_proj"
            rank = config.rank_of(module)
            made[tensor_name(module, LORA_A)] = random(rank, inner) + i
            made[tensor_name(module, LORA_B)] = random(out, rank) - i
    return made


def of_peft(tensors, config, module, parameter):
    """What PEFT's ParamWrapper adds to a parameter (experts, in, out)."""
    rank = config.rank_of(f"{AT}.{parameter}")
    a, b = tensors[tensor_name(module, LORA_A)], tensors[tensor_name(module, LORA_B)]
    a, b = a.reshape(EXPERTS, rank, -1), b.reshape(len(b), rank, EXPERTS)
    return config.scaling_of(f"{AT}.{parameter}") * np.einsum("ore,eri->eio", b, a)


def of_ours(tensors, config):
    """The same of gate, up and down, zero where there is nothing."""
    parts = {k: np.zeros((EXPERTS, HIDDEN, INNER), np.float32) for k in ("gate", "up")}
    parts["down"] = np.zeros((EXPERTS, INNER, HIDDEN), np.float32)
    for layer in adapted_layers(tensors):
        if layer.module != ATTENTION:
            expert, leaf = layer.module.removeprefix(f"{AT}.").split(".")
            scaling = config.scaling_of(layer.module)
            parts[leaf.removesuffix("_proj")][int(expert)] = scaling * (layer.b @ layer.a).T
    gate_up = np.stack([parts["gate"], parts["up"]], -1).reshape(EXPERTS, HIDDEN, 2 * INNER)
    return {"gate_up_proj": gate_up, "down_proj": parts["down"]}


CASES = {
    "all": (("gate", "up", "down"), {}),
    "gate alone": (("gate",), {}),
    "without down": (("gate", "up"), {"use_rslora": True}),
    "down alone": (("down",), {"target_modules": r".*(q|down)_proj"}),
    "other ranks": (("gate", "up", "down"), {"rank_pattern": {"gate_proj": 3}}),
    "other scalings": (("gate", "up"), {"alpha_pattern": {"up_proj": 7}}),
}


@pytest.mark.parametrize("case", CASES)
def test_together_and_apart_again(tmp_path, case):
    kinds, changes = CASES[case]
    config = replace(CONFIG, **changes)
    tensors = of_experts(config, kinds)
    made, theirs = to_target_parameters(tensors, config, TURNS)
    expected = of_ours(tensors, config)
    names = [n for n in ("gate_up_proj", "down_proj") if f"{AT}.{n}" in theirs.target_parameters]
    for name in names:
        module = f"{AT}.base_layer" if name == "gate_up_proj" and len(names) > 1 else AT
        delta = of_peft(made, theirs, module, name)
        assert np.allclose(delta, expected[name], rtol=1e-6, atol=1e-6)
    assert theirs.lora_dropout == 0.0 and made.keys() & tensors.keys() == {
        tensor_name(ATTENTION, leaf) for leaf in (LORA_A, LORA_B)
    }
    assert {ATTENTION: True, "q_proj": True}[theirs.target_modules[0]]
    assert len(theirs.target_modules) == 1
    save_adapter(tmp_path / "adapter", tensors, config, stacking=TURNS)
    got, read = load_adapter(tmp_path / "adapter")
    assert got.keys() == tensors.keys()
    for name, array in tensors.items():
        close = case.startswith("other") and "up_proj.lora_B" in name
        assert np.allclose(got[name], array, rtol=1e-6) if close else (got[name] == array).all()
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        assert read.scaling_of(module) == config.scaling_of(module)
    assert read.target_parameters is None
    told = arranged(tensors, TURNS)
    assert told.kinds == kinds and ExpertArrangement.from_text(told.to_text()) == told
    assert ExpertArrangement.from_text(" ".join(kinds)) == told  # as the first files had it


@pytest.mark.parametrize("in_turns", [True, False])
def test_what_peft_trained(in_turns):
    """One A for gate and up together, of which each has its rows of B."""
    config = replace(
        CONFIG,
        target_modules=[],
        target_parameters=["experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    tensors = {
        tensor_name(f"{AT}.base_layer", LORA_A): random(2 * EXPERTS, HIDDEN),
        tensor_name(f"{AT}.base_layer", LORA_B): random(2 * INNER, 2 * EXPERTS),
        tensor_name(AT, LORA_A): random(2 * EXPERTS, INNER),
        tensor_name(AT, LORA_B): random(HIDDEN, 2 * EXPERTS),
    }
    made, ours = from_target_parameters(
        tensors, config, "adapter", stacking=TURNS if in_turns else PLAIN
    )
    expected = of_ours(made, ours)
    delta = of_peft(tensors, config, f"{AT}.base_layer", "gate_up_proj")
    if not in_turns:
        delta = np.stack(np.split(delta, 2, axis=2), -1).reshape(delta.shape)
    assert np.allclose(delta, expected["gate_up_proj"], rtol=1e-6, atol=1e-6)
    assert np.allclose(of_peft(tensors, config, AT, "down_proj"), expected["down_proj"], atol=1e-6)
    assert ours.target_modules == [f"{AT}.{kind}_proj" for kind in ("down", "gate", "up")]
    assert ours.rank_pattern == {} and ours.rank_of(f"{AT}.1.gate_proj") == 2


def test_a_file_of_ours_that_peft_wrote_again():
    """Without what its metadata told: parts of the rank that share nothing come apart."""
    tensors = of_experts(CONFIG)
    made, theirs = to_target_parameters(tensors, CONFIG, TURNS)
    got, read = from_target_parameters(made, theirs, "adapter", stacking=TURNS)
    assert got.keys() == tensors.keys()
    assert all(np.array_equal(got[name], array) for name, array in tensors.items())
    assert read.rank_of(f"{AT}.2.up_proj") == 2 and read.alpha_of(f"{AT}.2.up_proj") == 3


def test_what_is_refused():
    made, theirs = to_target_parameters(of_experts(CONFIG), CONFIG, TURNS)
    other = replace(theirs, target_parameters=["experts.scales"])
    with pytest.raises(UnsupportedModelError, match=r"experts\.scales, which is not supported"):
        from_target_parameters(made, other, "adapter", stacking=TURNS)
    larger = replace(theirs, rank_pattern={}, r=5)
    with pytest.raises(CheckpointError, match=r"expected .5 · experts"):
        from_target_parameters(made, larger, "adapter", stacking=TURNS)
    with pytest.raises(CheckpointError, match="has rank 4, which does not match gate"):
        from_target_parameters(
            made, theirs, "adapter", ExpertArrangement(("gate",), TURNS), stacking=PLAIN
        )
    del made[tensor_name(AT, LORA_B)]
    with pytest.raises(CheckpointError, match=r"base_model.*experts\.lora_B.* is missing"):
        from_target_parameters(made, theirs, "adapter", stacking=TURNS)


def test_a_name_that_fits_nothing_is_passed_over():
    """As by PEFT, whose all-linear names a router that HunYuan calls otherwise."""
    made, theirs = to_target_parameters(of_experts(CONFIG), CONFIG, TURNS)
    more = replace(theirs, target_parameters=[*theirs.target_parameters, "gate.weight"])
    one, other = (
        from_target_parameters(made, c, "adapter", stacking=TURNS) for c in (theirs, more)
    )
    assert one[0].keys() == other[0].keys() and one[1] == other[1]


MIXTRAL = Stacking(("w1", "w3", "w2"), "block_sparse_moe.experts", "mlp.experts")


def test_names_of_files_and_of_memory(tmp_path):
    """Mixtral's files call its experts otherwise than transformers does."""
    at = "model.layers.1.block_sparse_moe.experts"
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    tensors = {
        name.replace(AT, at).replace(f"{kind}_proj", leaf): array
        for kind, leaf in names.items()
        for name, array in of_experts(CONFIG, (kind,)).items()
    }
    config = replace(CONFIG, target_modules=["q_proj", "w1", "w2", "w3"])
    made, theirs = to_target_parameters(tensors, config, MIXTRAL)
    held = "model.layers.1.mlp.experts"
    assert theirs.target_parameters == [f"{held}.gate_up_proj", f"{held}.down_proj"]
    b = made[tensor_name(f"{held}.base_layer", LORA_B)].reshape(2 * INNER, 4, EXPERTS)
    assert np.array_equal(b[:INNER, :2, 1], tensors[tensor_name(f"{at}.1.w1", LORA_B)])
    assert np.array_equal(b[INNER:, 2:, 1], tensors[tensor_name(f"{at}.1.w3", LORA_B)])
    assert not b[:INNER, 2:].any() and not b[INNER:, :2].any()
    save_adapter(tmp_path / "adapter", tensors, config, stacking=MIXTRAL)
    for stacking in (None, MIXTRAL):  # the file tells
        got, _ = load_adapter(tmp_path / "adapter", stacking=stacking)
        assert got.keys() == tensors.keys()
        assert all(np.array_equal(got[name], array) for name, array in tensors.items())


def test_weights_of_layers_are_parameters_too():
    """As PEFT has them where they are named so, by ranks of their own."""
    dense = "model.layers.0.mlp.up_proj"
    tensors = {
        tensor_name(dense, LORA_A): random(3, HIDDEN),
        tensor_name(dense, LORA_B): random(INNER, 3),
        tensor_name(ATTENTION, LORA_A): random(2, HIDDEN),
        tensor_name(ATTENTION, LORA_B): random(HIDDEN, 2),
    }
    config = replace(
        CONFIG,
        target_modules=["q_proj"],
        target_parameters=["mlp.up_proj.weight"],
        rank_pattern={r"up_proj\.weight": 3},
    )
    made, ours = from_target_parameters(tensors, config, "adapter", stacking=PLAIN)
    assert made == tensors and ours.target_parameters is None
    assert ours.target_modules == [dense, "q_proj"] and ours.rank_of(dense) == 3
    again, theirs = to_target_parameters(made, ours, PLAIN)
    assert again == tensors and theirs.target_parameters == [f"{dense}.weight"]
    assert theirs.rank_of(f"{dense}.weight") == 3 and theirs.target_modules == ["q_proj"]


def test_damaged_metadata(tmp_path):
    save_adapter(tmp_path / "adapter", of_experts(CONFIG), CONFIG, stacking=TURNS)
    path = tmp_path / "adapter/adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"in_turns", b"in_burns"))
    with pytest.raises(CheckpointError, match="metadata adapted_experts is damaged"):
        load_adapter(tmp_path / "adapter")


def test_files_that_keep_the_adapters_name(tmp_path):
    tensors = of_experts(CONFIG)
    save_adapter(tmp_path / "it", tensors, CONFIG, stacking=PLAIN)
    with SafetensorsFile(tmp_path / "it" / WEIGHTS) as file:
        stored = {name: file.float32(name) for name in file.names()}
    named = {n.replace(".weight", ".default.weight"): array for n, array in stored.items()}
    write_safetensors(tmp_path / "it" / WEIGHTS, named)
    loaded, _ = load_adapter(tmp_path / "it")
    assert loaded.keys() == tensors.keys()


def test_a_start_of_something_else_than_pairs(tmp_path):
    magnitude = {tensor_name(ATTENTION, MAGNITUDE): random(HIDDEN)}
    told = {"kind": "pissa", "r": 1, "lora_alpha": 3, "rank_pattern": {}, "alpha_pattern": {}}
    write_safetensors(tmp_path / WEIGHTS, magnitude, {STARTED: json.dumps(told)})
    with pytest.raises(CheckpointError, match="does not consist of two halves"):
        started_in(tmp_path, magnitude, CONFIG)
