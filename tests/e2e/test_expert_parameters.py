"""PEFT's adapters on parameters that hold experts (``target_parameters``), against its results.

``tests/references/record_parameters.py`` records them.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from references.seeded import adapter, batch, weights
from safetensors.numpy import load_file, save_file

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.families.family import find_family
from qlora_wgpu.generation import generate
from qlora_wgpu.lora import load_adapter

FOLDER = Path(__file__).parents[1] / "references"
CASES = sorted(path.stem for path in (FOLDER / "parameters").glob("*.npz"))
PLAIN = QuantConfig(scheme="none")


def base_of(case, folder):
    recorded = np.load(FOLDER / f"{case}.npz")
    folder.mkdir()
    (folder / "config.json").write_text(str(recorded["config"]))
    tensors = weights(json.loads(str(recorded["shapes"])), float(recorded["norm_offset"]))
    save_file(tensors, folder / "model.safetensors")
    return folder


def folders(case, tmp_path):
    """A base, and an adapter as PEFT has written it."""
    kind, _, case = case.rpartition("/")
    recorded = np.load(FOLDER / f"{kind or 'parameters'}/{case}.npz")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(str(recorded["adapter"]))
    tensors = adapter(json.loads(str(recorded["shapes"])))
    save_file(tensors, tmp_path / "adapter/adapter_model.safetensors")
    return base_of(case, tmp_path / "base"), tmp_path / "adapter", recorded


def opened(base, folder, device, dtype="float32"):
    return QLoRAModel.from_pretrained(
        base, adapter=folder, quant=PLAIN, compute_dtype=dtype, device=device
    )


def of_parameters(gradients, architecture, name, shape):
    """The gradient of PEFT's matrix, of those of each expert's."""
    module, _, leaf = name.removeprefix("base_model.model.").rpartition(".lora_")
    stacking = architecture.stacking
    *first, down = range(len(stacking.leaves))
    parts = [down]
    if module.endswith(".base_layer"):
        module, parts = module.removesuffix(".base_layer"), first
    at = stacking.in_files(module)
    count = architecture.experts[0].experts

    def of(expert, part):
        return gradients[f"base_model.model.{at}.{expert}.{stacking.leaves[part]}.lora_{leaf}"]

    if leaf == "A.weight":  # which gate and up have in common there
        return np.concatenate([sum(of(i, part) for part in parts) for i in range(count)])
    together = []
    for i in range(count):
        rows = [of(i, part) for part in parts]
        together.append(np.stack(rows, 1) if stacking.in_turns else np.concatenate(rows))
    return np.stack(together, -1).reshape(shape)


def test_every_mixture_is_recorded():
    """Of every family that has experts in a recorded case."""

    def kinds(cases):
        texts = (str(np.load(FOLDER / f"{case}.npz")["config"]) for case in cases)
        configs = [json.loads(text) for text in texts]
        return {c["model_type"] for c in configs if find_family(c).read(c).experts}

    every = [p.stem for p in FOLDER.glob("*.npz") if "config" in np.load(p).files]
    assert kinds(CASES) == kinds(every)


@pytest.mark.cover(case=["mixtral-experts", "gemma4-experts"])
@pytest.mark.parametrize("case", CASES)
def test_against_peft(device, tmp_path, case):
    base, folder, recorded = folders(case, tmp_path)
    model = opened(base, folder, device)
    ids, mask, labels = batch()
    expected = recorded["logits"][mask == 1]
    logits = model.logits(ids, mask)[mask == 1][:, : expected.shape[-1]]
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    assert abs(loss - recorded["loss"]) <= 1e-5
    checked = [name[5:] for name in recorded.files if name.startswith("grad:")]
    assert len(checked) == 4
    for name in checked:
        exact = recorded[f"grad:{name}"]
        ours = of_parameters(gradients, model.architecture, name, exact.shape)
        assert np.linalg.norm(ours - exact) <= 2e-5 * np.linalg.norm(exact), name


@pytest.mark.cover(case=["mixtral-experts"])
@pytest.mark.parametrize("case", ["mixtral-experts", "gemma4-experts"])
def test_bfloat16(device, tmp_path, case):
    base, folder, _ = folders(case, tmp_path)
    config = json.loads((base / "config.json").read_text())
    # Rounding sends no row elsewhere where each meets all experts.
    key = "top_k_experts" if "top_k_experts" in config else "num_experts_per_tok"
    config[key] = config.get("num_experts") or config["num_local_experts"]
    (base / "config.json").write_text(json.dumps(config))
    ids, mask, labels = batch()
    results = [opened(base, folder, device, d).loss_and_grads(ids, labels, mask) for d in
               ("float32", "bfloat16")]  # fmt: skip
    assert abs(results[0][0] - results[1][0]) <= 0.05 * results[0][0]
    exact, rounded = (np.concatenate([g.ravel() for g in r[1].values()]) for r in results)
    assert np.linalg.norm(rounded - exact) <= 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("case", ["mixtral-experts", "gemma4-experts", "qwen2_moe-experts"])
def test_written_again_and_merged(device, tmp_path, case):
    base, folder, recorded = folders(case, tmp_path)
    model = opened(base, folder, device)
    ids, mask, _ = batch()
    logits = model.logits(ids, mask)[mask == 1]
    model.save_adapter(tmp_path / "again")
    written = json.loads((tmp_path / "again/adapter_config.json").read_text())
    held = set(json.loads(str(recorded["shapes"])))
    assert set(load_file(tmp_path / "again/adapter_model.safetensors")) == held
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in held}
    at = {module for module in modules if module.endswith(".experts")}
    expected = {f"{a}.{p}" for a in at for p in ("gate_up_proj", "down_proj")}
    assert set(written["target_parameters"]) == expected
    again = opened(base, tmp_path / "again", device)
    assert np.array_equal(again.logits(ids, mask)[mask == 1], logits)
    merge(base, folder, tmp_path / "merged", base="original", quant=PLAIN)
    config = LoraConfig(r=1, target_modules=["o_proj"])
    merged = QLoRAModel.from_pretrained(tmp_path / "merged", config, PLAIN, "float32", device)
    difference = np.abs(merged.logits(ids, mask)[mask == 1] - logits).max()
    assert difference <= 1e-5 * np.abs(logits).max()


DENSE = ["all-linear", ["gate_proj", "o_proj"], ["down_proj"]]


@pytest.mark.parametrize("targets", DENSE)
@pytest.mark.parametrize("case", ["qwen3_moe-experts", "deepseek_v3-experts"])
def test_layers_that_are_called_as_experts_keep_their_adapters(device, tmp_path, case, targets):
    """PEFT would take the names of their modules for experts': their weights are named instead."""
    base = base_of(case, tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=targets, lora_dropout=0.1)
    model = QLoRAModel.from_pretrained(base, lora, PLAIN, "float32", device)
    parts = model.adapter.split(model.adapter.initial(0))
    model.load_adapter(adapter({name: array.shape for name, array in parts.items()}))
    model.save_adapter(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    leaves = {name.rpartition(".")[2] for name in written["target_modules"]}
    assert not leaves & {"gate_proj", "up_proj", "down_proj"}
    architecture = find_family(json.loads((base / "config.json").read_text())).read(
        json.loads((base / "config.json").read_text())
    )
    stacked = {spec.name for stack in architecture.experts for spec in stack.linears}
    adapted = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in parts}
    dense = {n for n in adapted - stacked if n.endswith(("gate_proj", "up_proj", "down_proj"))}
    assert dense and {f"{n}.weight" for n in dense} <= set(written["target_parameters"])
    tensors, config = load_adapter(tmp_path / "adapter")
    state = model.adapter_state_dict()
    assert tensors.keys() == state.keys() and config.target_parameters is None
    assert all(np.array_equal(array, state[name]) for name, array in tensors.items())
    again = opened(base, tmp_path / "adapter", device)
    assert again.adapter.names == model.adapter.names


# ---- routers ---------------------------------------------------------------------------------

ROUTERS = sorted(f"routers/{case}" for case in CASES)
ALL_LINEAR = sorted(f"all_linear/{path.stem}" for path in (FOLDER / "all_linear").glob("*.npz"))


@pytest.mark.quick
def test_every_mixtures_router_is_recorded():
    assert sorted(f"routers/{p.stem}" for p in (FOLDER / "routers").glob("*.npz")) == ROUTERS


@pytest.mark.cover(
    case=["routers/granitemoe-experts", "routers/gemma4-experts", "all_linear/mixtral-experts"]
)
@pytest.mark.parametrize("case", ROUTERS + ALL_LINEAR)
def test_adapters_on_routers_against_peft(device, tmp_path, case):
    """Where they are linear layers, and where they are bare parameters of transformers."""
    base, folder, recorded = folders(case, tmp_path)
    model = opened(base, folder, device)
    ids, mask, labels = batch()
    expected = recorded["logits"][mask == 1]
    logits = model.logits(ids, mask)[mask == 1][:, : expected.shape[-1]]
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    assert abs(loss - recorded["loss"]) <= 1e-5
    checked = [name[5:] for name in recorded.files if name.startswith("grad:")]
    assert len(checked) == 2
    for name in checked:
        exact = recorded[f"grad:{name}"]
        module, _, leaf = name.removeprefix("base_model.model.").partition(".lora_")
        module = model.architecture.stacking.router_in_files(module)
        ours = gradients[f"base_model.model.{module}.lora_{leaf}"]
        assert np.linalg.norm(ours - exact) <= 2e-5 * np.linalg.norm(exact), name


WRITTEN = ["routers/granitemoe-experts", "routers/gemma4-experts", *ALL_LINEAR]


@pytest.mark.cover(case=["routers/granitemoe-experts", "all_linear/mixtral-experts"])
@pytest.mark.parametrize("case", WRITTEN)
def test_routers_written_again_and_merged(device, tmp_path, case):
    base, folder, recorded = folders(case, tmp_path)
    model = opened(base, folder, device)
    ids, mask, _ = batch()
    logits = model.logits(ids, mask)[mask == 1]
    model.save_adapter(tmp_path / "again")
    held = set(json.loads(str(recorded["shapes"])))
    assert set(load_file(tmp_path / "again/adapter_model.safetensors")) == held
    again = opened(base, tmp_path / "again", device)
    assert np.array_equal(again.logits(ids, mask)[mask == 1], logits)
    for name in ("original", "dequantized"):  # routers are never quantized
        merge(base, folder, tmp_path / name, base=name, quant=PLAIN)
        config = LoraConfig(r=1, target_modules=["o_proj"])
        merged = QLoRAModel.from_pretrained(tmp_path / name, config, PLAIN, "float32", device)
        difference = np.abs(merged.logits(ids, mask)[mask == 1] - logits).max()
        assert difference <= 1e-5 * np.abs(logits).max()


def test_a_router_is_adapted_where_it_is_named(device, tmp_path):
    """For prompts and new tokens, and beside an adapter without."""
    base = base_of("qwen3_moe-experts", tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj", "gate"])
    model = QLoRAModel.from_pretrained(base, lora, PLAIN, "float32", device)
    routers = [f"base_model.model.{spec.name}" for spec in model.architecture.routers]
    parts = model.adapter.split(model.adapter.initial(0))
    assert {f"{name}.lora_A.weight" for name in routers} <= set(parts)
    ids, mask, _ = batch()
    plain = model.logits(ids, mask)
    drawn = adapter({name: array.shape for name, array in parts.items()})
    queries = {name: array for name, array in drawn.items() if "q_proj" in name}
    nothing = {n: np.zeros_like(a) for n, a in drawn.items() if n not in queries}
    model.load_adapter({**queries, **nothing})
    of_queries = model.logits(ids, mask)
    model.load_adapter(drawn)
    changed = model.logits(ids, mask)
    assert np.abs(changed - of_queries).max() > 1e-3 * np.abs(plain).max()
    prompt = ids[0][mask[0] == 1]
    whole = prompt.tolist()
    for token in generate(model, prompt.tolist(), max_new_tokens=4):
        assert token == model.logits(np.array([whole]))[0, -1].argmax()
        whole.append(token)
    model.save_adapter(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    names = [name.removeprefix("base_model.model.") for name in routers]
    assert written["target_parameters"] == [f"{name}.weight" for name in names]
    assert written["target_modules"] == ["q_proj"]
    beside = QLoRAModel.from_pretrained(base, LoraConfig(r=2), PLAIN, "float32", device)
    assert not any("gate.lora" in name for name in beside.adapter.names)  # all-linear
    beside.load_adapter(tmp_path / "adapter", name="routers")
    beside.set_adapter("routers")
    assert np.array_equal(beside.logits(ids, mask), changed)
    beside.set_adapter("default")
    assert np.array_equal(beside.logits(ids, mask), plain)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_begins_as_part_of_a_router(device, tmp_path, start):
    base = base_of("gemma4-experts", tmp_path / "base")
    whole = QLoRAModel.from_pretrained(
        base, LoraConfig(r=1, target_modules=["q_proj"]), PLAIN, "float32", device
    )
    ids, mask, _ = batch()
    expected = whole.logits(ids, mask)[mask == 1]
    lora = LoraConfig(r=2, target_modules=["q_proj", "router.proj"], init_lora_weights=start)
    model = QLoRAModel.from_pretrained(base, lora, PLAIN, "float32", device)
    parts = model.adapter_state_dict()
    assert all(array.any() for array in parts.values())
    logits = model.logits(ids, mask)[mask == 1]
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    drawn = adapter({name: array.shape for name, array in parts.items()})
    model.load_adapter({n: a + np.float32(0.1) * drawn[n] for n, a in parts.items()})
    trained = model.logits(ids, mask)[mask == 1]
    assert np.abs(trained - logits).max() > 1e-3 * np.abs(logits).max()
    model.save_adapter(tmp_path / "adapter")  # for the base as it was
    again = opened(base, tmp_path / "adapter", device)
    difference = np.abs(again.logits(ids, mask)[mask == 1] - trained).max()
    assert difference <= 1e-5 * np.abs(trained).max()


@pytest.mark.quick
def test_a_routers_parameter_takes_no_magnitude(device, tmp_path):
    base = base_of("qwen3_moe-experts", tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj", "gate"], use_dora=True)
    with pytest.raises(
        ConfigError, match=r"use_dora is not supported for .*gate, a bare parameter"
    ):
        QLoRAModel.from_pretrained(base, lora, PLAIN, "float32", device)
