"""A GPU's driver that crashes for real, seen from the command line."""

import json
import os
import subprocess
import sys

import pytest
from e2e.tiny import write_chats, write_model

CONFIG = """\
model: {path: model}
lora: {r: 2, lora_alpha: 2}
data: {train: train.jsonl, max_seq_length: 32}
train: {max_steps: 8, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
optim: {learning_rate: 1e-2}
output: {dir: out, save_steps: 2, save_total_limit: 2}
log: {logging_steps: 1}
"""

# What goes wrong, in the process that Python starts with this file on its path.
FAULTS = """\
import os
from pathlib import Path

def before_step(number, what):
    from qlora_wgpu.training.optimizer import Optimizer
    step = Optimizer.step
    def faulty(self, current):
        if current == number:
            what(self._model.device)
        step(self, current)
    Optimizer.step = faulty

def destroy(device):
    buffer = device.raw.create_buffer(size=16, usage=device.backend.module.BufferUsage.COPY_DST)
    encoder = device.raw.create_command_encoder()
    encoder.clear_buffer(buffer)
    commands = encoder.finish()
    buffer.destroy()
    device.raw.queue.submit([commands])  # the native library panics

fault, step, times = os.environ["FAULT"].split(":")
if "QLORA_WGPU_SUPERVISOR" in os.environ:  # the supervised process
    tally = Path(os.environ["TALLY"])
    tally.open("a").write("x")
    if tally.stat().st_size <= int(times):
        before_step(int(step), globals()[fault])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crashes")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "faults").mkdir()
    (folder / "faults" / "sitecustomize.py").write_text(FAULTS)
    return folder


def environment(place, fault):
    paths = [str(place / "faults"), os.environ.get("PYTHONPATH", "")]
    tally = place / "tally"
    tally.unlink(missing_ok=True)
    return {
        **os.environ, "FAULT": fault, "TALLY": str(tally),
        "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200",
    }  # fmt: skip


def train(place, name, *args, fault="none:0:0"):
    command = [sys.executable, "-m", "qlora_wgpu", "train", "run.yaml", f"output.dir={name}", *args]
    return subprocess.run(
        command, cwd=place, env=environment(place, fault), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def rows(place, name):
    lines = (place / name / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row.get("loss")) for row in map(json.loads, lines)]


def adapter(place, name):
    return (place / name / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_goes_on_after_a_crash(place):
    whole = train(place, "whole")
    assert whole.returncode == 0 and not whole.stderr, whole.stderr
    done = train(place, "crashed", fault="destroy:6:1")
    assert done.returncode == 0, done.stderr
    (note,) = done.stderr.splitlines()
    assert "SIGABRT" in note and "step-4" in note and "device.submit_milliseconds=25" in note
    assert adapter(place, "crashed") == adapter(place, "whole")
    assert rows(place, "crashed") == rows(place, "whole")
