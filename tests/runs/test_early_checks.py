"""Mistakes that can be reported at once are reported before data is read."""

import pytest
from e2e.tiny import write_model

from qlora_wgpu import LoraConfig, QLoRAModel, train
from qlora_wgpu.errors import CheckpointError, ConfigError, DeviceError


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    write_model(folder / "model")
    return {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "not-there.jsonl")},
        "output": {"dir": str(folder / "run")},
    }


def test_a_missing_gpu(config):
    with pytest.raises(DeviceError, match="no GPU matches 'nope'"):
        train({**config, "device": {"gpu": "nope"}})


def test_a_folder_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        train({**config, "output": {"dir": str(tmp_path / "file" / "run")}})


@pytest.mark.parametrize(
    ("folder", "text"), [("nowhere", "does not exist"), ("model", "it contains a model")]
)
def test_a_folder_to_go_on_from_that_holds_no_adapter(config, tmp_path, folder, text):
    write_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match=rf"^lora\.init_from: .*{text}"):
        train({**config, "lora": {"init_from": str(tmp_path / folder)}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "changes", "text"),
    [
        ({"r": 4}, {}, "trained with r = 2"),
        ({"r": 2}, {"intermediate_size": 24}, "does not fit"),
        ({"r": 2, "target_modules": ["q_proj"]}, {}, "is unknown to this model"),
    ],
)
def test_an_adapter_to_go_on_from_that_does_not_fit(config, tmp_path, device, own, changes, text):
    write_model(tmp_path / "other", **changes)
    lora = LoraConfig(r=2, lora_alpha=4)
    with QLoRAModel.from_pretrained(tmp_path / "other", lora, device=device) as other:
        other.save_adapter(tmp_path / "adapter")
    lora_of_run = {**own, "lora_alpha": 4, "init_from": str(tmp_path / "adapter")}
    with pytest.raises(CheckpointError, match=rf"^lora\.init_from: .*{text}"):
        train({**config, "lora": lora_of_run})  # whose data is not there, and is not missed
