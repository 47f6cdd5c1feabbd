"""What is planned of host memory is what a process takes of it: on Linux, on a software GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from references.seeded import weights as seeded
from references.sized import traced_configs, with_head_dim

from e2e.test_family_types import shapes
from e2e.tiny import write_chats, write_model, write_tokenizer, write_weights
from qlora_wgpu.gpu.device import UPLOAD_CHUNK
from qlora_wgpu.gpu.memory import process_bytes
from qlora_wgpu.limits import MIB

pytestmark = [
    pytest.mark.full,  # measures a driver and its machine
    pytest.mark.skipif(process_bytes() is None, reason="Linux tells what a process takes"),
]
VOCABULARY = {"llama": 100_000, "gemma3_text": 240_000, "qwen3_moe": 100_000}  # most of the memory
CASES = [(family, waits) for family in VOCABULARY for waits in (True, False)]


def written(path, family):
    """A model of which the vocabulary is most, and rows to train on."""
    config = with_head_dim(traced_configs()[family], 24)
    config |= {"hidden_size": 192, "vocab_size": VOCABULARY[family]}
    (path / "config.json").write_text(json.dumps(config))
    names, families = shapes(config)
    write_weights(path, {n: a * np.float32(0.1) for n, a in seeded(names, families).items()})
    write_tokenizer(path)
    write_chats(path / "rows.jsonl", rows=4)
    return path


@pytest.mark.parametrize(("family", "waits"), CASES)
def test_a_process_takes_what_was_planned(tmp_path, monkeypatch, family, waits):
    """When kernels are compiled for the first time, and when the driver has kept them."""
    monkeypatch.setenv("MESA_SHADER_CACHE_DIR", str(tmp_path))
    place = written(tmp_path, family)
    settings = {
        "model": {"path": str(place)},
        "data": {"train": str(place / "rows.jsonl"), "max_seq_length": 32},
        "lora": {"r": 8},
        "train": {"max_steps": 1, "per_device_train_batch_size": 1, "compute_dtype": "float32",
                  "gradient_accumulation_steps": 1},
        "device": {"memory": "45MiB"} if waits else {},
    }  # fmt: skip
    for run in ("first", "again"):
        settings["output"] = {"dir": str(place / run)}
        told, planned = taken(place, settings)
        if run == "again":
            planned -= told["host"]["compiling"]
        assert planned > 0.95 * told["peak"], (run, told)
        # A driver that keeps pace with the uploads has let go of their last piece before the peak.
        assert planned < 1.05 * told["peak"] + UPLOAD_CHUNK, (run, told)
        assert ("lm_head" in told["host"]) is waits


def taken(place, settings, *args):
    """What a run in a process of its own tells, and all that was planned."""
    (place / "run.yaml").write_text(yaml.safe_dump(settings))
    paths = [Path(__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-m", "support.host_peak", place / "run.yaml", *args], env=env,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return told, sum(told["host"].values()) + told["device"]


def test_a_checkpoint_is_written_and_read_in_few_copies(tmp_path):
    """An adapter of 57 MiB is most of the host's part: saved, and gone on from."""
    write_model(
        tmp_path, hidden_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=256, num_hidden_layers=4,
    )  # fmt: skip
    write_chats(tmp_path / "rows.jsonl", rows=4)
    settings = {
        "model": {"path": str(tmp_path)},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_seq_length": 32},
        "lora": {"r": 1024, "lora_alpha": 1024},
        "train": {"max_steps": 1, "gradient_accumulation_steps": 1},
        "output": {"dir": str(tmp_path / "run"), "save_steps": 1},
    }
    for steps, args in ((1, ()), (2, ("--resume",))):
        settings["train"]["max_steps"] = steps
        told, planned = taken(tmp_path, settings, *args)
        assert planned > 0.95 * told["peak"], told
        assert planned < told["peak"] + 2 * 57 * MIB, told
