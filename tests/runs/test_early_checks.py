"""What can be told at once is told before data is read."""

import pytest
from e2e.tiny import write_model

from qlora_wgpu import train
from qlora_wgpu.errors import ConfigError, DeviceError


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
    with pytest.raises(DeviceError, match="no GPU is called 'nope'"):
        train({**config, "device": {"gpu": "nope"}})


def test_a_folder_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        train({**config, "output": {"dir": str(tmp_path / "file" / "run")}})
