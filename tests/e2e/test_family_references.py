"""Every family against recorded PyTorch: odd shapes, padding, a row with nothing to learn."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from references.config_trials import TEXTS
from references.seeded import adapter, batch, weights
from safetensors.numpy import save_file
from support.recorded_models import (
    check_gradients,
    check_logits,
    check_normalizers,
    check_training,
    recorded_base,
    start,
)

from e2e.test_family_types import shapes
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, register_family
from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import family, llama, parts
from qlora_wgpu.families.family import known_families

FOLDER = Path(__file__).parents[1] / "references"
CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if "config" in np.load(path).files)
# Kinds of rotation differ by a table alone.
FORWARDS = [
    c for c in CASES if ("rope" not in c and not c.startswith("llama-")) or c == "llama-dora"
]


def lora(recorded):
    names = [n for n in recorded.files if n.startswith("grad:")]
    modules = {n.split(".")[-3] for n in names if n.endswith(".weight")}
    dora = any(n.endswith("magnitude_vector") for n in names)
    rank = next(len(recorded[n]) for n in names if n.endswith("lora_A.weight"))
    return LoraConfig(r=rank, lora_alpha=10, target_modules=sorted(modules), use_dora=dora)


def quant(case):
    """How a case's linear layers are stored: what was recorded of 4 bits knows their bits."""
    return QuantConfig(scheme="nf4" if case.endswith("-nf4") else "none")


@pytest.mark.quick
def test_every_family_is_recorded():
    types = {json.loads(str(np.load(FOLDER / f"{c}.npz")["config"]))["model_type"] for c in CASES}
    # A text part under the name of a model with images is the same forward.
    assert types | set(TEXTS) >= set(known_families())


@pytest.mark.quick(case=["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("case", CASES)
def test_against_pytorch(device, tmp_path, case, pytestconfig):
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    model = QLoRAModel.from_pretrained(folder, lora(recorded), quant(case), "float32", device)
    ids, mask, labels = batch()
    logits = model.logits(ids, mask)
    check_logits(logits, recorded, mask)
    check_normalizers(logits, recorded, mask)
    model.load_adapter(start(recorded))
    check_gradients(model, recorded, ids, mask, labels)
    steps = None if pytestconfig.getoption("tier") == "full" else 3
    check_training(model, folder, recorded, ids, mask, labels, tmp_path / "run", steps)


@pytest.mark.parametrize("case", ["cohere-qknorm", "stablelm-qknorm", "gpt_oss-experts"])
def test_weights_of_parts_are_read_back_as_they_are_stored(device, tmp_path, case):
    """Those of heads, and of experts with biases."""
    config = json.loads(str(np.load(FOLDER / f"{case}.npz")["config"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = weights(shapes(config)[0], 0.0)
    save_file(tensors, tmp_path / "model.safetensors")
    quant = QuantConfig(scheme="none")
    model = QLoRAModel.from_pretrained(tmp_path, None, quant, "float32", device)
    state = model.base_state_dict()
    assert set(state) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(state[name], array)


# A vision-language model, its text's recorded case, its prefix in PEFT, and others in files.
VISION = {
    "gemma3": ("gemma3", "model.language_model.", ["language_model.model."]),
    "gemma3n": ("gemma3n", "model.language_model.", []),
    "idefics3": ("llama", "model.text_model.", []),
    "smolvlm": ("llama", "model.text_model.", []),
    "llava": ("qwen2", "model.language_model.", ["language_model.model."]),
    "llava_next": ("mistral", "model.language_model.", ["language_model.model."]),
    "lfm2_vl": ("lfm2", "model.language_model.", []),
    "qwen2_vl": ("qwen2", "model.language_model.", ["model."]),
    "qwen2_5_vl": ("qwen2", "model.language_model.", ["model."]),
    "qwen3_vl": ("qwen3", "model.language_model.", []),
    "qwen3_vl_moe": ("qwen3_moe-balanced-experts", "model.language_model.", []),
    "exaone4_5": ("exaone4", "model.language_model.", []),
}


@pytest.mark.cover(model_type=["gemma3", "smolvlm", "llava", "qwen2_5_vl"])
@pytest.mark.parametrize("model_type", VISION)
def test_the_language_model_of_a_vision_language_model(device, tmp_path, model_type):
    case, prefix, others = VISION[model_type]
    recorded = np.load(FOLDER / f"{case}.npz")
    tensors = weights(json.loads(str(recorded["shapes"])), float(recorded["norm_offset"]))
    text = json.loads(str(recorded["config"]))
    whole = {"model_type": model_type, "text_config": text}
    whole["tie_word_embeddings"] = "lm_head.weight" not in tensors
    ids, mask, _ = batch()
    for begins in (prefix, *others):
        folder = tmp_path / begins
        folder.mkdir()
        head = "language_model.lm_head.weight" if begins.startswith("lang") else "lm_head.weight"
        (folder / "config.json").write_text(json.dumps(whole))
        renamed = {name.replace("model.", begins, 1): array for name, array in tensors.items()}
        renamed = {head if n == "lm_head.weight" else n: array for n, array in renamed.items()}
        save_file({**renamed, "vision_tower.x": np.zeros(3)}, folder / "model.safetensors")
        model = QLoRAModel.from_pretrained(
            folder, LoraConfig(r=5, lora_alpha=10), QuantConfig(scheme="none"), "float32", device
        )
        logits = model.logits(ids, mask)
        worst = np.abs(logits[..., :40] - recorded["logits"])[mask == 1].max()
        assert worst <= 1e-5 * np.abs(recorded["logits"][mask == 1]).max()
        names = model.adapter_state_dict()
        assert all(name.startswith(f"base_model.model.{prefix}") for name in names)
        model.save_adapter(folder / "adapter")
        saved = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        modules = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in names}
        named = saved["target_modules"]  # of which PEFT adapts none in an image tower
        if isinstance(named, list):  # next to layers that it adapts as parameters
            named += [name.removesuffix(".weight") for name in saved["target_parameters"]]
        assert all(is_named(module, named) for module in modules)
        layer = next(m for m in modules if m.endswith("q_proj"))
        assert not is_named(layer.replace(prefix, "model.vision_tower."), named)


def is_named(module: str, target_modules: str | list[str]) -> bool:
    """As PEFT does: a pattern of whole names, or their ends."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in target_modules)


@pytest.mark.quick
def test_a_family_of_ones_own(device, tmp_path, monkeypatch):
    recorded = np.load(FOLDER / "llama.npz")
    monkeypatch.setattr(family, "_REGISTERED", {})
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(str(recorded["config"])), "model_type": "my-llama"})
    )
    save_file(weights(json.loads(str(recorded["shapes"])), 0.0), tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="my-llama"):
        QLoRAModel.from_pretrained(tmp_path, device=device)
    register_family("my-llama", parts.DecoderFamily(llama.compose))
    assert "my-llama" in known_families()
    model = QLoRAModel.from_pretrained(
        tmp_path, LoraConfig(r=5, lora_alpha=10), QuantConfig(scheme="none"), "float32", device
    )
    ids, mask, _ = batch()
    logits = model.logits(ids, mask)
    assert np.abs(logits[..., :40] - recorded["logits"])[mask == 1].max() <= 1e-4


@pytest.mark.cover(case=["llama-dora", "qwen3_moe-experts"])
@pytest.mark.parametrize("case", FORWARDS)
def test_quantized_and_recomputed(device, tmp_path, case):
    """NF4 and bfloat16 stay near the recorded loss; recomputing layers changes no bit."""
    recorded = np.load(FOLDER / f"{case}.npz")
    (tmp_path / "config.json").write_text(str(recorded["config"]))
    shapes = json.loads(str(recorded["shapes"]))
    save_file(weights(shapes, float(recorded["norm_offset"])), tmp_path / "model.safetensors")
    results = []
    for again in (False, True):
        model = QLoRAModel.from_pretrained(
            tmp_path, lora(recorded), device=device, gradient_checkpointing=again
        )
        names = {n: a.shape for n, a in model.adapter_state_dict().items()}
        model.load_adapter(adapter(names))
        results.append(model.loss_and_grads(*batch()[::2], batch()[1]))
    (loss, kept), (same, made_again) = results
    # Four bits a weight move the loss of random weights by a few per cent.
    assert abs(loss / recorded["losses"][0] - 1) <= 0.1 and loss == same
    assert all(np.array_equal(array, made_again[name]) for name, array in kept.items())
