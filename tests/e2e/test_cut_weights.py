"""A weight file that is cut while a run reads from it ends the run with a sentence, saved."""

import os

import numpy as np
import pytest
from support.allocating import allocating_device
from support.observing import observed

from e2e.tiny import write_chats, write_model
from qlora_wgpu import Config, train
from qlora_wgpu.errors import WeightFileError
from qlora_wgpu.mapped_files import check_not_truncated, map_file, path_of, read_now
from qlora_wgpu.training import Observer


class Cutting(Observer):
    """Cuts a file once some steps are done."""

    def __init__(self, path=None):
        self.path, self.notes, self.memory = path, [], None

    def planned(self, memory):
        self.memory = sum(memory.values())

    def note(self, text):
        self.notes.append(text)

    def step(self, row):
        if self.path is not None and row["step"] == 3:
            os.truncate(self.path, 4096)


def test_a_run_is_saved_before_it_ends(in_buffers, monkeypatch, tmp_path):
    device = allocating_device(monkeypatch)
    write_model(  # rows without padding, so that the file's own are read
        tmp_path / "model", store="bfloat16", tie_word_embeddings=False, vocab_size=4096,
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    write_chats(tmp_path / "chats.jsonl", rows=12)

    def run(name, observer, **changes):
        settings = {
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "chats.jsonl"), "max_seq_length": 48},
            "lora": {"r": 2},
            "train": {
                "max_steps": 8,
                "gradient_accumulation_steps": 1,
                "gradient_checkpointing": True,
            },
            "output": {"dir": str(tmp_path / name), "save_steps": 100},
            "log": {"logging_steps": 1},
            "device": changes,
        }
        return train(Config.model_validate(settings), callbacks=observed(observer))

    whole = Cutting()
    run("whole", whole, keep_dequantized=False)
    device.budget = whole.memory - 300_000
    path = tmp_path / "model" / "model.safetensors"
    size, cutting = path.stat().st_size, Cutting(path)
    message = (
        rf"{path} was truncated while it was read: 4,096 of {size:,} bytes are left; copy or "
        r"download it again; the run is saved after step [34]: resume=True continues it"
    )
    with pytest.raises(WeightFileError, match=message):
        run("cut", cutting, memory=device.budget)
    assert any("the input embedding" in note for note in cutting.notes)
    saved = list((tmp_path / "cut" / "checkpoints").glob("step-*"))
    assert len(saved) == 1


@pytest.mark.quick
def test_a_map_knows_what_it_is_of(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        mapped = map_file(path, file, 10)
    part = mapped[100:200].view(np.uint16)
    read_now(part)
    check_not_truncated(part)
    assert path_of(part) == str(path) and path_of(part.copy()) is None
    path.unlink()  # whoever has it mapped still has all of it
    check_not_truncated(part)
    check_not_truncated(part.copy())
    assert mapped[0] == 10
