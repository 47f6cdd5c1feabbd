"""4-bit folders as transformers opens them (tests/references/quantized_folders.py tries it)."""

import json

import numpy as np
import pytest
from references.seeded import weights
from references.sized import family_configs
from safetensors.numpy import load_file, save_file

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.exporting import quantize_folder
from qlora_wgpu.model.pretrained import Pretrained

TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def write(folder, config, prefix="", more=()):
    """A base whose files begin some names otherwise than the running model."""
    architecture = Pretrained.from_config(config).architecture
    shapes = {
        f"{s.name}.weight": (s.out_features, s.in_features) for s in architecture.every_linear
    }
    shapes |= {**architecture.norm_shapes, **architecture.router_shapes}
    shapes[architecture.embed_name] = (architecture.vocab_size, architecture.hidden_size)
    if not architecture.tied:
        shapes[architecture.head_name] = shapes[architecture.embed_name]
    arrays = weights(shapes, architecture.norm_offset)
    if prefix:
        own = "model.language_model."
        arrays = {prefix + n.removeprefix(own): array for n, array in arrays.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**arrays, **{n: np.ones((8, 8), np.float32) for n in more}},
              folder / "model.safetensors")  # fmt: skip
    return folder


def skipped(folder):
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    return quantization["llm_int8_skip_modules"]


def in_4_bits(folder):
    opened = ModelFolder.open(folder)
    return {name for name in opened.names() if opened[name].format is not None}


def test_a_plain_model(tmp_path):
    base = write(tmp_path / "base", family_configs()["llama"])
    quantize_folder(base, tmp_path / "q4")
    assert skipped(tmp_path / "q4") == ["lm_head"]


@pytest.mark.parametrize("out", ["", "."])
def test_a_new_folder_needs_a_name(tmp_path, monkeypatch, out):
    base = write(tmp_path / "base", family_configs()["llama"])
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not a name for a new folder"):
        quantize_folder(base, out)


def test_a_model_that_lacks_a_layer_is_refused(tmp_path):
    """Nothing else would tell of it before the new folder is trained."""
    base = write(tmp_path / "base", family_configs()["llama"])
    arrays = load_file(base / "model.safetensors")
    arrays["other"] = arrays.pop("model.layers.0.mlp.up_proj.weight")
    save_file(arrays, base / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj"):
        quantize_folder(base, tmp_path / "q4")
    assert not (tmp_path / "q4").exists()


def test_parts_for_images_are_named(tmp_path):
    """As files call them, and as transformers 5 does in a running model."""
    config = {"model_type": "gemma3", "text_config": TEXT}
    vision = ("vision_tower.encoder.layers.0.fc1.weight", "multi_modal_projector.projection_weight")
    base = write(tmp_path / "base", config, "language_model.model.", vision)
    quantize_folder(base, tmp_path / "q4")
    assert skipped(tmp_path / "q4") == [
        "lm_head",
        "model.multi_modal_projector",
        "model.vision_tower",
        "multi_modal_projector",
        "vision_tower",
    ]
    assert len(in_4_bits(tmp_path / "q4")) == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "block"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")]
)
def test_experts_stay(tmp_path, model_type, block):
    """transformers 5 stacks experts, and takes none in 4 bits."""
    config = family_configs()[model_type]
    base = write(tmp_path / "base", config)
    quantize_folder(base, tmp_path / "q4")
    blocks = [f"model.layers.{i}.{block}" for i in range(config["num_hidden_layers"])]
    assert skipped(tmp_path / "q4") == ["lm_head", *blocks]
    architecture = Pretrained.open(tmp_path / "q4").architecture
    assert in_4_bits(tmp_path / "q4") == {f"{spec.name}.weight" for spec in architecture.linears}
    quantize_folder(base, tmp_path / "all", experts=True)
    every = {f"{spec.name}.weight" for spec in architecture.every_linear}
    assert in_4_bits(tmp_path / "all") == every
    gates = [f"{name}.gate" for name in blocks]
    assert skipped(tmp_path / "all") == ["lm_head", *gates]


def test_a_disk_without_room_is_told_before_a_weight_is_read(tmp_path, monkeypatch):
    base = write(tmp_path / "base", family_configs()["llama"])
    seen = []
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    told = rf"{tmp_path}/new has 1[.]0 MB of free space, but the model needs [1-9][\d,]*[.]\d MB"
    with pytest.raises(CheckpointError, match=told):
        quantize_folder(base, tmp_path / "new" / "q4", progress=seen.append)
    assert not seen and {path.name for path in tmp_path.iterdir()} == {"base"}
