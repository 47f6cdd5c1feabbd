"""What tests of configuration files share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qlora_wgpu.config import load_config

FILES = Path(__file__).parent / "dialects"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Reads a text as the file of a folder, from another folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    folder = tmp_path / "conf"
    folder.mkdir()

    def run(text, overrides=(), name="run.yaml"):
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(path, overrides)

    return run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a file of each trainer, and LLaMA-Factory's data."""
    monkeypatch.chdir(tmp_path)
    for file in FILES.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "data").mkdir()
    info = {
        "mine": {
            "file_name": "mine.json",
            "columns": {"prompt": "question", "query": "context", "response": "answer"},
        },
        "chats": {
            "file_name": "chats.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content"},
        },
        "identity": {"file_name": "identity.json", "num_samples": 90},
        "pairs": {"file_name": "pairs.json", "ranking": True},
        "hub": {"hf_hub_url": "owner/name", "subset": "main", "split": "test"},
    }
    (tmp_path / "data" / "identity.json").write_text("[]")
    sets = "identity: {path: data/identity.json, source: local, converter: alpaca}\n"
    (tmp_path / "sets.yaml").write_text(sets + "more: {path: o/n, weight: 0.5}\n")
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path
