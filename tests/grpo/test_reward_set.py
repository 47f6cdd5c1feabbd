"""Reward functions of a run: allowed, named, weighted, and ended with it."""

import subprocess
import sys

import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.config.loading import load_config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.grpo.reward_process import RewardProcess
from qlora_wgpu.grpo.reward_set import RewardSet


def config(**given):
    return Config(model={"path": "none"}, train={"objective": "grpo"}, grpo=given)


def own(completions, **_):
    return [0.5] * len(completions)


def test_names_and_weights():
    regexes = [{"regex": {"pattern": pattern}} for pattern in "ab"]
    made = RewardSet.of(config(reward_funcs=regexes), [own], allow_code=False)
    assert list(made.functions) == ["regex", "regex_2", "own"] and made.weights == [1.0] * 3
    weights = config(reward_funcs=["json"], reward_weights=[2.0, 0.5])
    assert RewardSet.of(weights, [own], allow_code=False).weights == [2.0, 0.5]
    with pytest.raises(ConfigError, match=r"2 weights for 1 reward functions \(json\)"):
        RewardSet.of(weights, allow_code=False)


def test_a_file_runs_if_it_is_allowed(tmp_path):
    (tmp_path / "rewards.py").write_text("def brevity(completions, **_):\n    return [1.0]\n")
    (tmp_path / "run.yaml").write_text(
        "model: {path: none}\ntrain: {objective: grpo}\n"
        "grpo: {reward_funcs: ['rewards.py:brevity']}\n"
    )
    settings = load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match="is code that runs with your rights"):
        RewardSet.of(settings, allow_code=False)
    made = RewardSet.of(settings, allow_code=True)
    process = made.functions["brevity"]
    assert isinstance(process, RewardProcess) and process(completions=["a"]) == [1.0]
    made.close()
    assert not process.is_running


@pytest.mark.slow
def test_the_command_line_asks_for_its_option(tmp_path):
    (tmp_path / "rewards.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "run.yaml").write_text(
        "model: {path: none}\ndata: {train: rows.jsonl}\ntrain: {objective: grpo}\n"
        "grpo: {reward_funcs: ['rewards.py:brevity']}\n"
    )
    command = [sys.executable, "-m", "qlora_wgpu", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode and "pass --allow-code" in done.stderr and "ran" not in done.stderr
    assert "Traceback" not in done.stderr


def test_only_functions():
    with pytest.raises(ConfigError, match="must be a list of functions, got 'json'"):
        RewardSet.of(config(), ["json"], allow_code=False)
