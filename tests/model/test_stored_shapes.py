"""What config.json says is compared with the files' headers when a folder is opened."""

import json
from pathlib import Path

import pytest
from e2e.tiny import CONFIG, write_model
from references.sized import traced_configs

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.pretrained import Pretrained, tensor_shapes
from qlora_wgpu.model.weights import WeightLayout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 2**22}, r"shape \(83, 36\), expected \(4194304, 36\) by config.json"),
        ({"intermediate_size": 2**20}, r"expected \(1048576, 36\)"),
        ({"num_hidden_layers": 200}, r"has no tensor 'model.layers.2"),
        ({"head_dim": 1024}, r"expected \(6144, 36\)"),
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


@pytest.mark.parametrize("scheme", ["nf4", "none"])
def test_the_table_has_every_tensor_of_every_family_once(scheme: str) -> None:
    for family, config in traced_configs().items():
        architecture = find_family(config).read(config)
        layout = WeightLayout(QuantConfig(scheme=scheme), "float32", 1 << 27)
        layout.lay_out(
            architecture, AdapterLayout(LoraConfig(), architecture.linears, architecture.experts)
        )
        parts = [part for weight in layout.table for part in weight.parts]
        assert len(parts) == len(dict(parts)), family
        assert dict(parts) == tensor_shapes(architecture), family
