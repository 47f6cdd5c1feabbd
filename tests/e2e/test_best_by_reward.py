"""Runs whose best adapter is not that with the lowest loss: another figure says which is."""

import json
import math

import pytest
from safetensors.numpy import load_file
from support.observing import observed

import qlora_wgpu
from e2e.stopped_runs import Kill, Killed
from e2e.test_preference_runs import config
from e2e.test_preference_runs import folder as folder
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training import Observer


class Told(Observer):
    """Keeps what is said, and stops where it is told to."""

    def __init__(self, stop_after=None):
        self.texts, self._after = [], stop_after

    def warning(self, text):
        self.texts.append(text)

    note = warning

    def step(self, row):
        if row["step"] == self._after:
            self.stop_run()


LEAST = {
    "load_best_model_at_end": True, "metric_for_best_model": "eval_rewards/rejected",
    "greater_is_better": False,
}  # fmt: skip


def run(folder, name, settings, observer=None, data=None, optim=None, **how):
    made = config(folder, name, "kto", data, max_steps=6)
    made["eval"] = {"eval_steps": 1, **settings}
    made["optim"] |= {"learning_rate": 3e-2, **(optim or {})}
    made["output"]["save_steps"] = 3
    result = qlora_wgpu.train(made, callbacks=observed(observer or Told()), **how)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return result, [row for row in map(json.loads, lines) if "eval_loss" in row]


def adapter(result):
    return load_file(result.adapter_dir / "adapter_model.safetensors")


def test_the_best_adapter_has_the_best_reward(folder):
    result, told = run(folder, "best", LEAST)
    best = min(told, key=lambda row: row["eval_rewards/rejected"])
    by_loss = min(told, key=lambda row: row["eval_loss"])
    assert best["step"] not in (0, by_loss["step"], told[-1]["step"])
    assert (result.best_step, result.best_eval_loss) == (best["step"], best["eval_loss"])
    assert result.best_metric == best["eval_rewards/rejected"]
    found = qlora_wgpu.evaluate(str(folder / "best")).adapter
    assert found.metrics["rewards/rejected"] == pytest.approx(result.best_metric, rel=1e-3)

    run(folder, "parts", LEAST, Told(stop_after=best["step"] + 1))
    again, parts = run(folder, "parts", LEAST, resume=True)
    assert parts == told and again.best_step == result.best_step
    assert all((adapter(again)[name] == array).all() for name, array in adapter(result).items())


@pytest.mark.full
def test_a_reward_that_does_not_rise_ends_the_run(folder):
    settings = {"metric_for_best_model": "rewards/rejected", "early_stopping_patience": 2}
    observer = Told()
    result, told = run(folder, "early", settings, observer)
    assert result.stopped_early and result.steps == 2 and result.best_step == 0
    assert told[2]["eval_loss"] < told[1]["eval_loss"] < told[0]["eval_loss"]
    assert (
        "after step 2: the held-out rewards/rejected no longer rises, for 2" in observer.texts[-1]
    )
    again, _ = run(folder, "early", settings, resume=True)
    assert again.was_finished and again.best_step == 0
    again, _ = run(folder, "early", settings | {"metric_for_best_model": "loss"}, resume=True)
    assert again.steps == 6 and again.best_eval_loss == again.best_metric


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5, "cooldown": 1},
}


def rates_of(folder, name):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row["learning_rate"] for row in map(json.loads, lines) if "learning_rate" in row]


@pytest.mark.full
@pytest.mark.cover(at=[4])
@pytest.mark.parametrize("at", [2, 4, 5])
def test_a_plateau_by_a_reward_goes_on_with_what_it_knows(folder, at):
    by_reward = {"metric_for_best_model": "rewards/rejected"}
    name = f"plateau-{at}"
    result, told = run(folder, name, by_reward, optim=PLATEAU)
    rewards = [row["eval_rewards/rejected"] for row in told]
    rate, best, bad, cooldown, expected = 3e-2, -math.inf, 0, 0, []
    for reward in rewards[1:]:
        expected.append(rate)
        # As torch has it: a share more than a negative figure is below it.
        bad = 0 if reward > best * (1 + 1e-4) else bad + 1
        best = reward if bad == 0 else best
        if cooldown:
            cooldown, bad = cooldown - 1, 0
        if bad > 1:
            rate, cooldown, bad = rate / 2, 1, 0
    rates = rates_of(folder, name)
    assert rates == expected and len(set(rates)) > 1, (rates, rewards)
    run(folder, f"loss-{at}", {}, optim=PLATEAU)
    assert rates_of(folder, f"loss-{at}") != rates
    with pytest.raises(Killed):
        run(folder, f"killed-{at}", by_reward, Kill(at), optim=PLATEAU)
    again, rows = run(folder, f"killed-{at}", by_reward, optim=PLATEAU, resume=True)
    assert rows == told and rates_of(folder, f"killed-{at}") == rates
    assert all((adapter(again)[name] == array).all() for name, array in adapter(result).items())


@pytest.mark.full
def test_another_figure_is_looked_for_anew(folder):
    """Of the steps before, it is not known which adapter was its best."""
    observer = Told()
    run(folder, "another", {"load_best_model_at_end": True}, Told(stop_after=3))
    result, told = run(folder, "another", LEAST, observer, resume=True)
    assert any("the lowest rewards/rejected, not the lowest loss" in t for t in observer.texts)
    after = [row for row in told if row["step"] > 3]
    best = min(after, key=lambda row: row["eval_rewards/rejected"])
    assert (result.best_step, result.best_eval_loss) == (best["step"], best["eval_loss"])
    again, _ = run(folder, "another", {"load_best_model_at_end": True}, resume=True)
    assert again.was_finished and again.best_step == result.best_step
    assert again.metric_for_best_model == "rewards/rejected"


def test_a_figure_that_the_rows_do_not_give_is_told_before_the_first_step(folder):
    pair = json.loads((folder / "pairs.jsonl").read_text().splitlines()[0])
    good = {"prompt": pair["prompt"], "completion": pair["rejected"], "label": True}
    (folder / "good.jsonl").write_text(json.dumps(good) + "\n")
    data = {"eval": str(folder / "good.jsonl"), "eval_split": None}
    with pytest.raises(
        ConfigError, match=r"is rewards/margins, but the held-out rows have no undesirable"
    ):
        run(folder, "good", {"metric_for_best_model": "rewards/margins"}, data=data)
    assert not (folder / "good").exists()
