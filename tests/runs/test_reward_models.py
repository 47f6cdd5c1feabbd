"""Trained reward models as rewards of GRPO."""

import json

import numpy as np
import pytest
from e2e.tiny import write_model, write_pairs, write_tokenizer
from support.observing import observed

from qlora_wgpu import (
    Config,
    LoraConfig,
    QLoRAModel,
    QuantConfig,
    Trainer,
    estimate,
    open_adapter,
    train,
)  # fmt: skip
from qlora_wgpu.config import DeviceConfig
from qlora_wgpu.config.loading import load_config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.grpo.reward_set import RewardSet
from qlora_wgpu.runs.rewards import RewardModel, reward_model, reward_models
from qlora_wgpu.runs.workload import DeviceSpec
from qlora_wgpu.training import Observer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    """The run of a reward model."""
    place = tmp_path_factory.mktemp("judge")
    rows = write_pairs(place / "pairs.jsonl")
    given = {"train": {"objective": "reward"}, "data": {"train": str(rows)}}
    train(settings(folder, place / "careful", **given))
    return place / "careful"


def settings(folder, out, train, **sections):
    sizes = {"max_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    return Config(
        model={"path": str(folder)}, quant={"scheme": "none"}, lora={"r": 4},
        train={"compute_dtype": "float32", **sizes, **train}, output={"dir": str(out)}, **sections,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_is_rewarded_by_a_model(folder, judge, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("what is 1?", "and 2?")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(
        folder, tmp_path / "run", {"objective": "grpo"},
        data={"train": str(tmp_path / "rows.jsonl"), "max_seq_length": 64},
        grpo={
            "reward_funcs": [{"reward_model": str(judge)}, {"length": {"target": 4}}],
            "num_generations": 4, "max_completion_length": 6, "log_completions": True,
        },
    )  # fmt: skip
    plans = Plans()
    train(config, callbacks=observed(plans))
    assert plans.memory["reward models"] == estimate(config).memory["reward models"] > 0
    logged = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, logged) if "rewards/careful/mean" in row]
    samples = [json.loads(s) for s in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    samples = [row for row in samples if "rewards" in row]
    assert len(steps) == 2 and len(samples) == 8
    by_text = {row["prompt"]: row for row in samples}
    assert len(by_text) == 2
    questions = {
        text: own for text in by_text for own in rows if own["prompt"][0]["content"] in text
    }
    scored = reward_model(judge)([
        [*questions[row["prompt"]]["prompt"], {"role": "assistant", "content": row["text"]}]
        for row in samples
    ])  # fmt: skip
    assert np.allclose([row["rewards"]["careful"] for row in samples], scored, rtol=1e-5, atol=1e-6)
    assert np.unique(scored).size > 1
    for number, step in enumerate(steps):
        mean = scored[4 * number : 4 * number + 4].mean()
        assert step["rewards/careful/mean"] == pytest.approx(mean, rel=1e-5, abs=1e-6)


class Plans(Observer):
    def planned(self, memory):
        self.memory = memory


@pytest.mark.slow
def test_the_planned_memory_is_what_it_takes(judge):
    model = open_adapter(judge)
    model.score(["what is it? " * 50] * 8, batch_size=8, max_length=64)
    planned = RewardModel(str(judge), 8, 64, None, DeviceConfig())
    assert planned.nbytes(DeviceSpec.of(model.device), 200) == model.device.memory.peak


@pytest.mark.parametrize("written", ["judge", "{path: judge, max_length: 64}"])
def test_a_path_is_relative_to_its_file(tmp_path, written):
    (tmp_path / "judge").mkdir()
    (tmp_path / "run.yaml").write_text(
        "model: {path: none}\ntrain: {objective: grpo}\n"
        f"grpo: {{reward_funcs: [{{reward_model: {written}}}]}}\n"
    )
    (given,) = load_config(tmp_path / "run.yaml").grpo.reward_funcs
    assert given["reward_model"]["path"] == str(tmp_path / "judge")


@pytest.mark.parametrize(
    ("function", "match"),
    [
        ({"regex": "a"}, "must have options for regex"),
        ("reward_model", "must have the path of a reward model"),
        ({"reward_model": 3}, "grpo.reward_funcs"),
    ],
)
def test_entries_without_options(tmp_path, function, match):
    text = f"model: {{path: x}}\ntrain: {{objective: grpo}}\ngrpo: {{reward_funcs: {[function]}}}\n"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_config(tmp_path / "run.yaml")


def grpo(*functions):
    return Config(
        model={"path": "x"}, train={"objective": "grpo"}, grpo={"reward_funcs": list(functions)}
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"path": "nowhere"}, "no run, adapter or model in nowhere"),
        ({}, "reward_model needs path"),
        (
            {"path": "x", "size": 3},
            "reward_model has no option 'size' .known: path, b",
        ),
    ],
)
def test_what_is_no_reward_model(options, match):
    config = grpo({"reward_model": options})
    opened = reward_models(config.device)
    with pytest.raises(ConfigError, match=match):
        RewardSet.of(config, allow_code=False, reward_model=opened)


def test_trainer_opens_no_reward_model(folder, device):
    lora = LoraConfig(r=4)
    model = QLoRAModel.from_pretrained(folder, lora, QuantConfig(scheme="none"), "float32", device)
    with pytest.raises(ConfigError, match="reward_model is not supported by Trainer"):
        Trainer(model, grpo({"reward_model": "x"})).train([{"prompt": "a"}])
