"""Short forms of the campaigns that are scripts."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from e2e.tiny import CONFIG

from campaigns import (
    budgets,
    checkpoints,
    drawn_models,
    folders,
    gpu_limits,
    io_faults,
    kills,
    pictures,
    rows,
    yaml_files,
)
from campaigns.gpu_limits import BINDING, PROMISED, WORKGROUPS
from campaigns.scenes import staged
from campaigns.support import Tally
from qlora_wgpu import LoraConfig, QuantConfig

ROOT = Path(__file__).parents[1]


def short_crashes() -> None:
    """All three on one stage; ends with 1 where something is lost."""
    tally = Tally(seconds=120)
    with staged(quick=True) as stage:
        kills.run(stage, 2, 0, tally)
        io_faults.run(stage, 5, 0, tally)
        checkpoints.run(stage, 4, 2, tally)
    sys.exit(1 if tally.failures else 0)


def test_nothing_is_lost() -> None:
    """In a process of its own, since the campaigns fork."""
    code = "from campaigns.test_short_forms import short_crashes; short_crashes()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_folders() -> None:
    tally = Tally(seconds=5)
    folders.run(3, 7, tally)
    assert tally.failures == []


def test_yaml_files() -> None:
    tally = Tally(seconds=4)
    yaml_files.run(60, 7, tally)
    assert tally.failures == []


def test_rows() -> None:
    assert rows.run(count=3, seed=1, seconds=30) == 0


def test_pictures() -> None:
    tally = Tally(seconds=6)
    pictures.run(40, 7, tally)
    assert tally.failures == [] and tally.outcomes["decoded"]


@pytest.mark.parametrize("name", ["templates", "tokenizers", "patterns"])
def test_what_files_of_strangers_compute(name: str) -> None:
    command = [sys.executable, "-m", f"campaigns.{name}"]
    limits = ["--count", "60", "--seed", "7", "--seconds", "3"]
    done = subprocess.run(
        [*command, *limits], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(char.isdigit() for char in done.stdout.partition(" s\n")[2]), done.stdout


def test_a_mixture_under_budgets() -> None:
    tally = Tally(seconds=600, first=8)
    budgets.run(1, 1, tally, every=1000)
    assert tally.failures == [] and tally.outcomes == {"planned, as taken": 1}


@pytest.mark.parametrize("way", ["buffers", "gpu"])
def test_a_gpu_that_allows_what_webgpu_promises(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, 9))
    config = {**CONFIG, "num_hidden_layers": 1, "vocab_size": 700}
    case = drawn_models.Drawn(config, LoraConfig(r=4), QuantConfig(), ids, np.ones_like(ids), ids)
    monkeypatch.setattr(gpu_limits, "small_model", lambda rng: case)
    trial = gpu_limits.Trial(random.Random(2), tmp_path, way)
    least = {name: values[0] for name, values in PROMISED.items()}
    for binding in (60_000, 2_000):  # some is cut, and a row of logits cannot be
        limits = {**least, BINDING: binding, WORKGROUPS: 64}
        offered = replace(gpu_limits.whole(way), limits=limits)
        outcome, wrong = trial.outcome(gpu_limits.Drawn(way, offered, 64))
        assert not wrong and ("refused" in outcome) == (binding == 2_000), outcome
