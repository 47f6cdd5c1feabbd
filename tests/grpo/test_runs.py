"""GRPO and RLOO as runs: from rows and reward functions to an adapter, its log and its samples."""

import json

import numpy as np
import pytest
from e2e.tiny import write_model, write_tokenizer

from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.errors import ConfigError, DataError, RewardError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.training import checkpoint_folders, read_rows
from qlora_wgpu.training.optimizer import Optimizer

ROWS = [{"prompt": text, "wanted": text[0]} for text in ("abc", "de f", "gh, i", "jkl.", "mn")]


def share(completions, wanted, **_):
    """The share of a letter in each completion."""
    return [text.count(one) / 8 for text, one in zip(completions, wanted, strict=True)]


def heaviest(completion_ids, **_):
    """A reward that hardly any two completions share."""
    return [sum(ids) / 100 for ids in completion_ids]


def opened(folder, device):
    write_model(folder)
    write_tokenizer(folder)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0)
    return QLoRAModel.from_pretrained(folder, lora, QuantConfig(), "float32", device)


def config(folder, steps=4, objective="grpo", train=(), **grpo):
    given = {"num_generations": 4, "max_completion_length": 8, "beta": 0.04, **grpo}
    return Config(
        model={"path": str(folder)},
        train={
            "objective": objective, "max_steps": steps, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, **dict(train),
        },
        grpo=given,
        optim={"learning_rate": 1e-2, "lr_scheduler_type": "constant"},
        eval={"eval_steps": 2},
        output={"dir": str(folder / "run"), "save_steps": 1, "save_total_limit": None},
    )  # fmt: skip


def trained(folder, device, settings, rows=ROWS, held_out=None, functions=(share,), **options):
    model = opened(folder, device)
    trainer = Trainer(model, settings, reward_funcs=functions, **options)
    return model, trainer.train(rows, held_out)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_a_run_logs_rewards_by_their_names(device, tmp_path, objective):
    settings = config(tmp_path, objective=objective)
    _, result = trained(tmp_path, device, settings, held_out=ROWS[:2])
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "eval_loss" not in row]
    assert len(steps) == 4
    for row in steps:
        assert {
            "reward", "reward_std", "rewards/share/mean", "rewards/share/std", "kl",
            "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio",
            "clip_ratio/region_mean", "generation_share", "entropy",
        } <= row.keys()  # fmt: skip
        assert row["reward"] == row["rewards/share/mean"]
    assert steps[0]["kl"] == 0.0 and steps[-1]["kl"] != 0.0
    evaluations = [row for row in rows if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert result.metric_for_best_model == "reward"
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 16 and all(row["rewards"].keys() == {"share"} for row in samples)


@pytest.mark.slow
def test_ratios_are_1_also_with_dropout(device, tmp_path):
    write_model(tmp_path)
    write_tokenizer(tmp_path)
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5)
    model = QLoRAModel.from_pretrained(tmp_path, lora, QuantConfig(), "float32", device)
    settings = config(tmp_path, 2, beta=0.0, epsilon=0.0)
    Trainer(model, settings, reward_funcs=[heaviest]).train(ROWS)
    for row in read_rows(tmp_path / "run" / "metrics.jsonl"):
        assert row["clip_ratio/region_mean"] == 0.0 and row["grad_norm"] > 0


@pytest.mark.slow
def test_a_resumed_run_is_bit_exact(device, tmp_path):
    """From each checkpoint, also between two steps of one generation."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    more = {"steps_per_generation": 4, "num_iterations": 2}
    whole = config(tmp_path / "whole", 6, **more)
    model, _ = trained(tmp_path / "whole", device, whole)
    expected = model.adapter_state_dict()
    parts = config(tmp_path / "parts", 6, **more)

    class Killed(Exception):
        pass

    calls = 0

    def fails(completions, wanted, **_):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Killed("power")
        return share(completions, wanted)

    fails.__name__ = "share"
    with pytest.raises(RewardError, match="Killed: power"):
        trained(tmp_path / "parts", device, parts, functions=(fails,))
    assert [f.name for f in checkpoint_folders(tmp_path / "parts" / "run")][-1] == "step-4"
    for stop in (5, 6):
        model = opened(tmp_path / "parts", device)
        trainer = Trainer(model, parts, reward_funcs=(share,), resume=True)
        for step in trainer.steps(ROWS):
            if step.step == stop:
                break
    state = model.adapter_state_dict()
    assert all(np.array_equal(expected[name], state[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["generation", "rewards", "update"])
def test_a_killed_run_resumes_bit_exactly(device, tmp_path, monkeypatch, place):
    """Nothing is saved but the checkpoints before."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    model, _ = trained(tmp_path / "whole", device, config(tmp_path / "whole", 3))
    expected, calls = model.adapter_state_dict(), 0

    class Killed(BaseException):
        pass

    def counted(function, last):
        def call(*args, **given):
            nonlocal calls
            calls += 1
            if calls == last:
                raise Killed
            return function(*args, **given)

        call.__name__ = function.__name__
        return call

    settings = config(tmp_path / "killed", 3)
    functions = [counted(share, 2)] if place == "rewards" else [share]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if place == "generation":
            patch.setattr(Engine, "step", counted(Engine.step, 14))
        if place == "update":
            patch.setattr(Optimizer, "step", counted(Optimizer.step, 2))
        trained(tmp_path / "killed", device, settings, functions=functions)
    assert [f.name for f in checkpoint_folders(tmp_path / "killed" / "run")] == ["step-1"]
    model, _ = trained(tmp_path / "killed", device, settings, resume=True)
    state = model.adapter_state_dict()
    assert all(np.array_equal(expected[name], state[name]) for name in expected)


@pytest.mark.slow
def test_a_constant_reward_changes_nothing(device, tmp_path):
    settings = config(tmp_path, 3, beta=0.0)
    model = opened(tmp_path, device)
    before = model.adapter_state_dict()
    flat = [lambda completions, **_: [2.0] * len(completions)]
    Trainer(model, settings, reward_funcs=flat).train(ROWS)
    after = model.adapter_state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **_: [float("nan")] * len(completions), "not a finite number"),
        (lambda completions, **_: [1.0], "returned 1 rewards for 8 completions"),
        (lambda completions, **_: 1 / 0, r"ZeroDivisionError.*on the completion '"),
    ],
)
def test_a_failing_reward_ends_the_run_with_its_completion(device, tmp_path, function, message):
    with pytest.raises(RewardError, match=message) as caught:
        trained(tmp_path, device, config(tmp_path), functions=[function])
    assert "the run is saved after step 0" in str(caught.value)


@pytest.mark.slow
def test_what_a_run_refuses(device, tmp_path):
    settings = config(tmp_path)
    with pytest.raises(ConfigError, match="requires reward functions"):
        trained(tmp_path, device, settings, functions=())
    with pytest.raises(DataError, match="requires prompts"):
        trained(tmp_path, device, settings, rows=[{"input_ids": [1, 2, 3]}])
    with pytest.raises(DataError, match="requires rows with a 'prompt'"):
        trained(tmp_path, device, settings, rows=[{"question": "a"}])
    with pytest.raises(ConfigError, match="exceeds the model's maximum of 256"):
        trained(tmp_path, device, config(tmp_path, max_completion_length=255))
    code = config(tmp_path, reward_funcs=["rewards.py:mine"])
    with pytest.raises(ConfigError, match="pass allow_code=True"):
        trained(tmp_path, device, code)
