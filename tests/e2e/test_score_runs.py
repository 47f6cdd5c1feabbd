"""Runs of reward models and classifiers, from rows to the adapter."""

import copy
import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.commands import run_here

from e2e.tiny import write_model, write_pairs
from qlora_wgpu import Config, QLoRAModel, Trainer, TrainerCallback, open_adapter, train
from qlora_wgpu.config.loading import config_of_run
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.runs.rewards import reward_model


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def settings(folder, rows, objective, out, **more):
    train_section = {
        "objective": objective, "max_steps": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1, "compute_dtype": "float32", **more.pop("train", {}),
    }  # fmt: skip
    return Config(
        model={"path": str(folder)}, quant={"scheme": "none"},
        lora={"r": 4, "target_modules": ["q_proj"]},
        data={"train": str(rows), "max_seq_length": 64, **more.pop("data", {})},
        train=train_section,
        optim={"learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_ratio": 0},
        output={"dir": str(out), "save_steps": 2}, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Text whose label follows from its first letter."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(24):
        first = "abc"[random.integers(3)]
        rest = "".join(random.choice(list("defgh"), random.integers(3, 9)))
        rows.append({"text": first + rest, "label": {"a": "one", "b": "two", "c": "three"}[first]})
    path = tmp_path_factory.mktemp("data") / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_classifier_learns(folder, labelled, tmp_path):
    config = settings(
        folder, labelled, "classification", tmp_path / "run", data={"eval_split": 6},
        train={"max_steps": 12},
        eval={"eval_steps": 4, "metric_for_best_model": "macro_f1", "load_best_model_at_end": True},
    )  # fmt: skip
    result = train(config)
    logged = rows_of(tmp_path / "run/metrics.jsonl")
    steps = [row for row in logged if "loss" in row]
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"] and "accuracy" in steps[0]
    evaluated = [row for row in logged if "eval_loss" in row]
    assert {"eval_accuracy", "eval_macro_f1"} <= set(evaluated[0])
    assert result.sample is None
    counts = evaluated[-1]["eval_confusion"]
    assert sum(sum(row.values()) for row in counts.values()) == 6
    assert sum(counts[name][name] for name in counts) == 6 * evaluated[-1]["eval_accuracy"]
    assert "Confusion matrix" in (tmp_path / "run/report.html").read_text()
    assert "labels: [one, three, two]" in (tmp_path / "run/config.yaml").read_text()


def test_a_reward_model_resumes_bit_exactly(folder, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    rows = rows_of(pairs)
    pairs.write_text("".join(json.dumps({**row, "margin": 0.5}) + "\n" for row in rows))
    given = {
        "train": {"center_rewards_coefficient": 0.01, "per_device_train_batch_size": 2},
        "eval": {"eval_steps": 2, "early_stopping_patience": 5, "metric_for_best_model": "margin"},
        "data": {"eval_split": 4},
    }
    whole = settings(folder, pairs, "reward", tmp_path / "whole", **copy.deepcopy(given))
    train(whole)
    logged = rows_of(tmp_path / "whole/metrics.jsonl")
    names = {"accuracy", "margin", "mean_reward", "min_reward", "max_reward"}
    assert names <= set(next(row for row in logged if "loss" in row))
    assert {f"eval_{name}" for name in names} <= set(next(r for r in logged if "eval_loss" in r))

    class Stop(TrainerCallback):
        def on_step_end(self, step):
            if step.step == 2:
                step.stop()

    part = settings(folder, pairs, "reward", tmp_path / "part", **copy.deepcopy(given))
    assert train(part, callbacks=[Stop()]).interrupted
    train(part, resume=True)
    one, other = (
        load_file(tmp_path / run / "adapter/adapter_model.safetensors") for run in ("whole", "part")
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert "base_model.model.score.weight" in one
    page = (tmp_path / "whole/report.html").read_text()
    assert "reward margin" in page and "perplexity" not in page
    rewards = reward_model(tmp_path / "whole")(["ab", [{"role": "user", "content": "cd"}]])
    assert rewards.shape == (2,) and np.isfinite(rewards).all()


def test_trained_classifiers_are_opened(folder, labelled, tmp_path):
    config = settings(folder, labelled, "classification", tmp_path / "run")
    train(config)
    model = open_adapter(tmp_path / "run")
    texts = ["ade", "bdefgh", "cd", "c"]
    found = model.classify(texts, batch_size=3)
    assert [each.label for each in found] == [
        max(each.probabilities, key=each.probabilities.get) for each in found
    ]
    assert set(found[0].scores) == {"one", "two", "three"}
    assert sum(found[0].probabilities.values()) == pytest.approx(1.0)
    scores = model.score(texts)
    assert scores.shape == (4, 3)
    assert np.allclose(model.score(texts[1]), scores[1], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="has no lm_head"):
        model.generate("a")
    # Training continues from the adapter.
    again = settings(folder, labelled, "classification", tmp_path / "again")
    again = again.model_copy(
        update={"lora": again.lora.model_copy(update={"init_from": str(tmp_path / "run/adapter")})}
    )
    train(again)
    first, second = (
        next(row for row in rows_of(tmp_path / run / "metrics.jsonl") if "loss" in row)["loss"]
        for run in ("run", "again")
    )
    assert second < first


def called(*arguments):
    made = run_here(*arguments, cwd="/")
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_commands_on_a_classifier(folder, labelled, tmp_path):
    run = tmp_path / "run"
    train(settings(folder, labelled, "classification", run, data={"eval_split": 6}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "ade", "id": 7}\n{"text": "bdef"}\n')
    lines = [json.loads(line) for line in called("classify", run, "--rows", rows).splitlines()]
    assert [set(line) for line in lines] == [
        {"text", "id", "label", "probabilities", "scores"},
        {"text", "label", "probabilities", "scores"},
    ]
    model = open_adapter(run)
    assert lines[0]["scores"] == pytest.approx(model.classify("ade").scores)
    one = json.loads(called("classify", run, "--text", "ade"))
    assert one["scores"] == pytest.approx(lines[0]["scores"], rel=1e-5)
    # Texts are cut as the run's own were, unless another length is asked for.
    length = config_of_run(run).data.max_seq_length
    cut, as_long, whole = (
        json.loads(called("classify", run, "--text", "ade" * length, *options))["scores"]
        for options in ((), ("--max-length", length), ("--max-length", 2 * length))
    )
    assert cut == as_long != whole
    found = json.loads(called("eval", run / "config.yaml", "--json"))["adapter"]
    assert np.sum(found["confusion_matrix"]) == 6 and found["labels"] == ["one", "three", "two"]
    assert found["accuracy"] == np.trace(found["confusion_matrix"]) / 6
    shown = called("eval", run / "config.yaml")
    assert "macro_f1" in shown and "true label by row" in shown
    for command in (("export", run), ("generate", run, "--prompt", "a")):
        made = run_here(*command, cwd=tmp_path)
        assert made.returncode and "reward model or classifier" in made.stderr, made.stderr


def test_a_trainer_trains_given_rows(folder, labelled, device, tmp_path):
    config = settings(folder, labelled, "classification", tmp_path / "run")
    lora = config.lora
    rows = rows_of(labelled)
    model = QLoRAModel.from_pretrained(folder, lora, config.quant, "float32", device, num_labels=3)
    result = Trainer(model, config).train(iter(rows))
    assert result.steps == 4
    assert model.classify("ab").label in ("one", "two", "three")
    other = QLoRAModel.from_pretrained(folder, lora, config.quant, "float32", device, num_labels=2)
    config = settings(folder, labelled, "classification", tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"requires num_labels=3 .*but the model has a head with num_labels=2"
    ):
        Trainer(other, config).train(rows)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "label": "none"}, "'label' must be one of train.labels .one, three, two"),
        ({"text": "a", "label": ["one"]}, "'label' is a list: set train.problem_type: multi"),
        ({"text": "a", "label": 3}, "a number below 3, got 3"),
    ],
)
def test_labels_that_are_refused(folder, tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "ab", "label": "one"}) + "\n" + json.dumps(row) + "\n")
    config = settings(
        folder, file, "classification", tmp_path / "run", train={"labels": ["one", "three", "two"]}
    )
    with pytest.raises(DataError, match=f"rows.jsonl line 2: .*{message}"):
        train(config)


def test_several_labels_and_numbers(folder, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"text": "ab", "label": [0, 2]}, {"text": "cd", "label": []}, {"text": "e", "label": 1}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    several = {"problem_type": "multi_label_classification", "max_steps": 1}
    train(settings(folder, file, "classification", tmp_path / "run", train=several))
    found = open_adapter(tmp_path / "run").classify("ab")
    assert isinstance(found.label, list) and set(found.probabilities) == {"0", "1", "2"}
    file.write_text('{"text": "ab", "label": 0.5}\n{"text": "cd", "label": -1}\n' * 2)
    numbers = {"problem_type": "regression", "max_steps": 1}
    train(settings(folder, file, "classification", tmp_path / "numbers", train=numbers))
    model = open_adapter(tmp_path / "numbers")
    assert model.classify("ab").label is None and isinstance(model.score("ab"), float)
