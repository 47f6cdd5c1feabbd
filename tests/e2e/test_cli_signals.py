"""A run on the command line that is asked to stop, and goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.processes import PATIENCE, until

from e2e.test_cli import CONFIG, run
from e2e.test_cli_verbs import refused
from e2e.tiny import write_chats, write_model

# The process that is supervised waits at a step until it has been asked to stop.
HELD = """\
import os, time
if "QLORA_WGPU_SUPERVISOR" in os.environ:
    from qlora_wgpu.training.optimizer import Optimizer
    from qlora_wgpu.training.run import StopRequest
    asked, note, step = [], StopRequest._note, Optimizer.step
    def noted(self, *how):
        note(self, *how)
        asked.append(how)
    def held(self, current):
        while current == 20 and not asked:
            time.sleep(0.01)
        step(self, current)
    StopRequest._note, Optimizer.step = noted, held
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 6, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "held").mkdir()
    (folder / "held/sitecustomize.py").write_text(HELD)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_cleanly_and_resume_goes_on(place, number):
    out = f"stopped-{number.name}"
    args = ("train", "run.yaml", f"output.dir={out}", "train.max_steps=30", "eval.eval_steps=0",
            "output.save_steps=1000")  # fmt: skip
    path = os.pathsep.join([str(place / "held"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "qlora_wgpu", *args], cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    metrics = place / out / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number and "Traceback" not in errors, errors
    assert "stopped after step" in printed and "`qlora-wgpu train run.yaml output.dir=" in printed
    assert "qlora-wgpu chat" not in printed  # it goes on first
    [kept] = (place / out / "checkpoints").iterdir()
    step = int(kept.name.removeprefix("step-"))
    assert 0 < step < 30
    again = run(*args[:-3], "train.max_steps=30", "eval.eval_steps=0", "--resume",
                "output.save_steps=1000", cwd=place)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert f"resumed from step-{step}" in again.stdout
    rows = [json.loads(x) for x in metrics.read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 31))
    assert "mutually exclusive" in refused(place, "train", "run.yaml", "--resume", "--overwrite")
    assert "train.seed" in refused(
        place, *args[:3], "train.max_steps=30", "eval.eval_steps=0", "--resume", "train.seed=9"
    )
