"""Model folders: whole, sharded, incomplete, and things that are no model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_wgpu.checkpoint import ModelFolder, write_safetensors
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError

CONFIG = {"model_type": "llama", "hidden_size": 4}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        Q_PROJ: rng.standard_normal((4, 6)).astype(np.float32),
        "model.embed_tokens.weight": rng.standard_normal((8, 4)).astype(np.float16),
        NORM: np.ones(4, np.float64),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights yet."""
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> dict[str, str]:
    parts: dict[str, dict[str, np.ndarray]] = {}
    for i, (name, array) in enumerate(tensors().items()):
        parts.setdefault(f"model-0000{1 + i % 2}-of-00002.safetensors", {})[name] = array
    for shard, part in parts.items():
        write_safetensors(folder / shard, part)
    weight_map = weight_map or {name: shard for shard, part in parts.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def refused(path: Path | str, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        ModelFolder.open(path)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_contents(model: ModelFolder) -> None:
    assert sorted(model.names()) == sorted(tensors())
    for name, array in tensors().items():
        assert name in model
        assert model[name].shape == array.shape
        read = model[name].read()
        assert read.dtype == np.float32
        assert read.tobytes() == array.astype(np.float32).tobytes()
        assert model[name].quantized() is None


def test_a_single_file(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", tensors())
    model = ModelFolder.open(folder)
    assert model.path == folder
    assert model.config == CONFIG
    check_contents(model)
    check_contents(ModelFolder.open(str(folder)))
    assert "lm_head.weight" not in model


def test_shards(folder: Path) -> None:
    write_shards(folder)
    check_contents(ModelFolder.open(folder))


def test_a_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    write_safetensors(folder / "model.safetensors", tensors())
    assert ModelFolder.open("~/base").path == folder


def test_a_single_file_goes_before_an_index(folder: Path) -> None:
    """As in transformers; the shards of the index need not even be there."""
    write_shards(folder)
    for shard in folder.glob("model-*"):
        shard.unlink()
    write_safetensors(folder / "model.safetensors", tensors())
    check_contents(ModelFolder.open(folder))


def test_a_tensor_that_the_index_forgot_is_found(folder: Path) -> None:
    weight_map = write_shards(folder)
    del weight_map[NORM]
    write_shards(folder, weight_map)
    check_contents(ModelFolder.open(folder))


def test_the_index_decides_between_two_shards(folder: Path) -> None:
    weight_map = write_shards(folder)
    other = ({*weight_map.values()} - {weight_map[NORM]}).pop()
    held = {n: a for n, a in tensors().items() if weight_map[n] == other}
    write_safetensors(folder / other, held | {NORM: np.full(4, 7, np.float32)})
    check_contents(ModelFolder.open(folder))


def test_a_missing_shard(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert refused(folder) == (
        f"model-00002-of-00002.safetensors is missing from {folder} (1 of 2 shards of "
        "model.safetensors.index.json are missing): download the model again"
    )


def test_a_truncated_shard_is_found_at_once(folder: Path) -> None:
    write_shards(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert refused(folder).startswith(f"{shard} is truncated")


def test_a_tensor_that_its_shard_does_not_hold(folder: Path) -> None:
    weight_map = write_shards(folder)
    write_shards(folder, weight_map | {"more": "model-00001-of-00002.safetensors"})
    assert "tensor 'more' is missing from model-00001-of-00002.safetensors" in refused(folder)


@pytest.mark.parametrize(
    "shard", ["../base/model.safetensors", "/etc/passwd", "a/b", "a\\b", "", ".", "..", 3, None]
)
def test_an_index_that_points_elsewhere(folder: Path, shard: Any) -> None:
    weight_map = write_shards(folder)
    write_shards(folder, weight_map | {"more": shard})
    assert "the shard of tensor 'more' must be" in refused(folder)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_without_a_map(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert "has no weight_map" in refused(folder)


def test_a_broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{\n"weight_map": {')
    assert "index.json is not valid JSON (line 2, column 16: " in refused(folder)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (None, "it has no weights"),
        ("pytorch_model.bin", "only pytorch_model.bin: PyTorch pickles are not supported"),
        ("consolidated.00.pth", "only consolidated.00.pth: PyTorch pickles"),
        ("model-Q4_K_M.gguf", "only model-Q4_K_M.gguf: use the path of that file"),
        ("model-00001-of-00002.safetensors", "only model-00001-of-00002.safetensors: download the"),
        ("model-00001-of-00001.safetensors", "only model-00001-of-00001.safetensors: rename it"),
        ("adapter_model.safetensors", "it is a PEFT adapter; use the folder of its"),
        ("flax_model.msgpack", "only flax_model.msgpack: use the model's safetensors version"),
    ],
)
def test_other_weights_than_safetensors(folder: Path, file: str | None, expected: str) -> None:
    if file:
        (folder / file).write_bytes(b"x")
    message = refused(folder)
    assert message.startswith(f"{folder} has no model.safetensors")
    assert expected in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not valid JSON (line 1, column 1"),
        (b"{'a': 1}", "is not valid JSON (line 1, column 2"),
        (b'{"a": \xff}', "is not valid UTF-8 at byte 6"),
        (b"[1]", "must hold a JSON object, not a list"),
        (b"null", "must hold a JSON object, not null"),
        (b"true", "must hold a JSON object, not a boolean"),
        (b"3", "must hold a JSON object, not a number"),
        (b'"3"', "must hold a JSON object, not a string"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)
def test_broken_configurations(folder: Path, content: bytes, expected: str) -> None:
    (folder / "config.json").write_bytes(content)
    message = refused(folder)
    assert message.startswith(f"{folder / 'config.json'} {expected}")


def test_a_configuration_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode())
    write_safetensors(folder / "model.safetensors", tensors())
    assert ModelFolder.open(folder).config == CONFIG


def test_a_configuration_of_absurd_size(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    assert "too large" in refused(folder)


def test_folders_that_are_no_models(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json, so it is not a Hugging Face model folder" in refused(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "is a PEFT adapter, not a model" in refused(folder)


def test_a_run_s_folder_is_no_model(folder: Path) -> None:
    """Nor is the adapter's GGUF file in it, which a folder's other GGUF files may be."""
    (folder / "config.json").unlink()
    (folder / "adapter.gguf").touch()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    assert "is a run's folder, not a model: use the folder of its base" in refused(folder)


def test_paths_that_are_no_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "is a file: a model must be a folder" in refused(folder / "config.json")
    for text in ("", "nothing", "./nothing/there", "/no/such/folder", "a/b/c", "nothing/", "../x"):
        assert "does not exist" in refused(text)
    hint = "names on the Hugging Face Hub have an owner, such as OWNER/nothing"
    assert refused("nothing").endswith(f"'nothing' does not exist: {hint}")
    for text in ("nothing/", "..", "nothing.gguf"):
        assert "OWNER" not in refused(text)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(folder: Path, bad: float) -> None:
    arrays = tensors()
    arrays[Q_PROJ][3, 5] = bad
    write_safetensors(folder / "model.safetensors", arrays)
    model = ModelFolder.open(folder)
    with pytest.raises(CheckpointError) as caught:
        model[Q_PROJ].read()
    file = folder / "model.safetensors"
    assert str(caught.value).startswith(f"{file}: tensor {Q_PROJ!r} contains NaN or infinity")
    model[NORM].read()


def test_a_float64_beyond_float32(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {"x": np.array([1e300])})
    with pytest.raises(CheckpointError, match="contains NaN or infinity"):
        ModelFolder.open(folder)["x"].read()


def test_a_missing_tensor_names_the_nearest(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", tensors())
    model = ModelFolder.open(folder)
    misspelt = "model.layers.0.self_attn.q_porj.weight"
    with pytest.raises(CheckpointError) as caught:
        model[misspelt]
    assert str(caught.value) == (
        f"{folder}: the checkpoint has no tensor {misspelt!r}; did you mean {Q_PROJ!r}?"
    )
    with pytest.raises(CheckpointError, match=r"has no tensor '!!!'$"):
        model["!!!"]


def test_an_integer_tensor_is_no_weight(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", {"x": np.ones(3, np.int64)})
    with pytest.raises(CheckpointError, match="has dtype I64"):
        ModelFolder.open(folder)["x"].read()


@pytest.mark.parametrize("method", ["aqlm", "hqq", "compressed-tensors"])
def test_models_quantized_by_others(folder: Path, method: str) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors())
    assert f"is quantized with {method}" in refused(folder, UnsupportedModelError)


def test_a_folder_opened_twice_is_independent(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", tensors())
    first, second = ModelFolder.open(folder), ModelFolder.open(folder)
    first[Q_PROJ].read()[:] = 0
    check_contents(second)
    check_contents(first)
