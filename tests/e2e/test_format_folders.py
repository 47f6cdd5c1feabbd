"""Bases in other forms than NF4 train as their dequantized weights do, and merge into them."""

import json
import warnings
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from references.seeded import adapter, batch
from safetensors.numpy import save_file
from support.commands import run_here

from e2e.tiny import CONFIG, weights
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import Config
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.exporting import merge
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.quant import quantize_nf4
from qlora_wgpu.runs.hub_upload import _training_facts

LORA = LoraConfig(r=8, lora_alpha=16)
SIZES = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "dtype": "bfloat16",
}
# No whole number of tiles or groups, but for the last, in shuffled groups.
CONFIGS = {
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [24, 16]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "symmetric": False, "group_size": 8},
            }
        },
        "ignore": ["lm_head"],
    },
    "shuffled": {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True},
}


def quantized(kind, stem, weight):
    """A weight's tensors, of values of about its size."""
    rows, columns = weight.shape
    random = np.random.default_rng([rows, columns])
    if kind == "int8":
        codes = np.rint(weight * 200).astype(np.int8)
        return {f"{stem}.weight": codes, f"{stem}.SCB": np.linspace(0.5, 1, rows, dtype=np.float32)}
    if kind == "fp8":
        codes = (weight * 100).astype(ml_dtypes.float8_e4m3fn)
        tiles = random.uniform(0.005, 0.015, (-(-rows // 24), -(-columns // 16)))
        return {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": tiles.astype(np.float32)}
    if kind == "w4a16":
        scales = random.uniform(0.01, 0.05, (rows, columns // 8)).astype(ml_dtypes.bfloat16)
        return {
            f"{stem}.weight_packed": random.integers(
                -(2**31), 2**31, (rows, columns // 8), np.int32
            ),
            f"{stem}.weight_zero_point": np.full((rows // 8, columns // 8), 0x9A78_6587, np.uint32),
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": np.array(weight.shape),
        }
    groups = np.arange(columns, dtype=np.int32) // CONFIGS[kind]["group_size"]
    if kind == "shuffled":
        groups = groups[random.permutation(columns)]
    scales = random.uniform(0.01, 0.05, (groups.max() + 1, rows)).astype(np.float16)
    words = random.integers(-(2**31), 2**31, (columns // 8, rows)).astype(np.int32)
    zeros = random.integers(0, 2**31, (len(scales), rows // 8)).astype(np.int32) & 0x77777777
    parts = {"qweight": words, "qzeros": zeros, "scales": scales, "g_idx": groups}
    return {f"{stem}.{leaf}": array for leaf, array in parts.items()}


def written(folder, tensors, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders in each form, and beside them what they stand for, in float32."""
    made = {}
    for kind, quantization in CONFIGS.items():
        place = tmp_path_factory.mktemp(kind)
        config = {**CONFIG, **SIZES}
        values = weights(config, 1)
        linears = [name for name in values if name.endswith("_proj.weight")]
        tensors = {name: array for name, array in values.items() if name not in linears}
        for name in linears:
            tensors |= quantized(kind, name.removesuffix(".weight"), values[name])
        stored = written(place / "stored", tensors, config | {"quantization_config": quantization})
        folder = ModelFolder.open(stored)
        for name in linears:
            weight = folder[name].quantized()
            values[name] = folder[name].read() if weight is None else weight.dequantize()
            if weight is None:
                values[name] = quantize_nf4(values[name]).dequantize()
        made[kind] = stored, written(place / "plain", values, config)
    return made


def computed(folder, scheme, dtype, device):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = QLoRAModel.from_pretrained(folder, LORA, QuantConfig(scheme=scheme), dtype, device)
    parts = model.adapter.split(model.adapter.initial(0))
    model.load_adapter(adapter({name: array.shape for name, array in parts.items()}))
    ids, mask, labels = batch()
    ids, labels = ids % 80, np.where(labels < 0, labels, labels % 80)
    return *model.loss_and_grads(ids, labels, mask), [str(each.message) for each in told]


@pytest.mark.cover(own=[True])
@pytest.mark.parametrize(("own", "dtype"), [(True, "float32"), (False, "bfloat16")])
@pytest.mark.parametrize("kind", CONFIGS)
def test_trains_as_its_dequantized_weights(device, monkeypatch, folders, kind, own, dtype):
    if not own:
        monkeypatch.setattr(device, "profile", replace(GPU_PROFILE, fused_linears=False))
    stored, plain = folders[kind]
    loss, gradients, told = computed(stored, "nf4", dtype, device)
    expected_loss, expected, _ = computed(plain, "none", dtype, device)
    assert loss == expected_loss
    for name, array in expected.items():
        assert np.abs(array).max() > 0
        assert np.array_equal(gradients[name], array), name
    assert any("changed their weights by" in text for text in told) == (kind == "shuffled")


def test_a_warning_says_how_far_weights_moved(device, folders):
    stored = ModelFolder.open(folders["shuffled"][0])
    weights = [w for tensor in stored.names() if (w := stored.weight_in(tensor)) is not None]
    values = [weight.read() for weight in weights if weight.is_quantized]
    moved = np.concatenate([(quantize_nf4(v).dequantize() - v).reshape(-1) for v in values])
    whole = np.concatenate([v.reshape(-1) for v in values])
    percent = 100 * np.linalg.norm(moved) / np.linalg.norm(whole)
    [text] = computed(folders["shuffled"][0], "nf4", "float32", device)[2]
    assert text.startswith("7 linear layers are stored in a format that no kernel supports")
    assert f"changed their weights by {percent:.2g} %" in text and 5 < percent < 20


def memory(pretrained, device):
    layout = ModelPlan(
        pretrained, LORA, QuantConfig(), "bfloat16", profile=device.profile, max_binding=1 << 27
    )
    return layout.memory(StepOptions("train", 1, 16))


@pytest.mark.quick
@pytest.mark.parametrize("kind", CONFIGS)
def test_plans_know_it_without_weights(device, folders, kind):
    config = json.loads((folders[kind][0] / "config.json").read_text())
    held = memory(Pretrained.open(folders[kind][0]), device)
    told = memory(Pretrained.from_config(config), device)
    assert held == told or kind == "shuffled"  # which only the files tell of


@pytest.mark.quick
def test_users_are_told_of_it(device, folders):
    stored = folders["fp8"][0]
    [note] = Pretrained.open(stored).notes
    assert note == "linear layers stay as stored: 7 in FP8 E4M3"
    for kind, scheme in {
        "int8": "LLM.int8",
        "gptq": "GPTQ",
        "fp8": "FP8 E4M3",
        "w4a16": "INT4",
    }.items():
        opened = Pretrained.open(folders[kind][0])
        planned = Pretrained.from_config(opened.config)
        assert opened.scheme(QuantConfig()) == planned.scheme(QuantConfig()) == scheme
        assert opened.scheme(QuantConfig(scheme="none")) == "none"
    assert Pretrained.open(folders["fp8"][1]).scheme(QuantConfig()) == "nf4"
    done = run_here("estimate", str(stored), "--seq", "16", cwd=stored)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0 and "FP8 E4M3, bfloat16" in said and note in said
    settings = Config.model_validate({"model": {"path": str(stored)}})
    assert _training_facts(settings, stored)["quantization of the base"].startswith("FP8 E4M3; ")


@pytest.mark.parametrize("kind", CONFIGS)
def test_merges_into_its_dequantized_weights(device, folders, tmp_path, kind):
    stored, plain = folders[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = QLoRAModel.from_pretrained(stored, LORA, None, "float32", device)
    model.save_adapter(tmp_path / "adapter")  # B is zero
    with pytest.raises(UnsupportedModelError, match="its original weights are unknown"):
        merge(stored, tmp_path / "adapter", tmp_path / "merged")
    merge(stored, tmp_path / "adapter", tmp_path / "merged", base="dequantized")
    merged, expected = ModelFolder.open(tmp_path / "merged"), ModelFolder.open(plain)
    assert Counter(merged.names()) == Counter(expected.names())
    for name in expected.names():
        values = expected[name].read()
        if name.endswith("_proj.weight"):
            values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(merged[name].read(), values), name
