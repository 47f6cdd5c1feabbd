"""What config.json says is compared with the files' headers when a folder is opened."""

import json
from pathlib import Path

import pytest
from e2e.tiny import CONFIG, write_model

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.model.pretrained import Pretrained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**22}, r"shape \(83, 36\), but config.json asks for \(4194304, 36\)"),
        ({"intermediate_size": 2**20}, r"config.json asks for \(1048576, 36\)"),
        ({"num_hidden_layers": 200}, r"has no tensor 'model.layers.2"),
        ({"head_dim": 1024}, r"config.json asks for \(6144, 36\)"),
    ],
)
def test_sizes_that_the_files_deny(folder: Path, changes: dict, message: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(CheckpointError, match=message):
        Pretrained.open(folder)


def test_a_sound_folder(folder: Path) -> None:
    assert Pretrained.open(folder).architecture.num_layers == 2


@pytest.mark.parametrize("quantization", [[], "nf4", 4, True])
def test_a_quantization_that_is_no_object(folder: Path, quantization: object) -> None:
    config = CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantization_config must be an object"):
        Pretrained.open(folder)
