"""Reward models and classifiers against recorded transformers, PEFT and TRL."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from references import reward_cases
from references.projections import distance, whole_projections
from references.score_cases import (
    ALPHA,
    CASES,
    CENTER,
    CLASS_WEIGHTS,
    PADDING,
    R,
    inputs,
    targets,
)
from safetensors.numpy import load_file, save_file
from support.recorded_models import (
    MOST_APART,
    difference,
    expected_gradients,
    recorded_base,
    start,
)

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.exporting.merge import merge
from qlora_wgpu.lora.scoring_files import to_metadata
from qlora_wgpu.model.batch_encoding import pooled_rows
from qlora_wgpu.model.steps import ScoreInputs, TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import STATS_METRICS
from qlora_wgpu.ops.score import Scoring, means
from qlora_wgpu.training.optimizer import Optimizer

FOLDER = Path(__file__).parents[1] / "references" / "scores"
LOOPS = dict(np.load(FOLDER / "loops.npz"))
PLAIN = QuantConfig(scheme="none")
PROBLEMS = {"multi": "multi_label_classification", "regression": "regression"}


def scoring(case):
    *_, classes, kind = CASES[case]
    if kind.startswith("reward"):
        return Scoring("reward", center=CENTER if kind == "reward-margin" else 0.0)
    weights = CLASS_WEIGHTS if kind == "weighted" else ()
    problem = PROBLEMS.get(kind, "single_label_classification")
    return Scoring("classification", classes, problem, weights)


def opened(case, folder, device, dtype="float32"):
    lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=CASES[case][2])
    classes = CASES[case][3]
    model = QLoRAModel.from_pretrained(folder, lora, PLAIN, dtype, device, num_labels=classes)
    model.options = TrainingOptions(objective=Objective(scoring=scoring(case)))
    return model


def batch(case):
    ids, mask = inputs()
    rows = pooled_rows(ids, mask, PADDING)
    return ids, np.full(ids.shape, -100), mask, ScoreInputs(rows, targets(case).astype(np.float32))


def cut(given, size):
    """A micro-batch as several of ``size`` rows."""
    ids, labels, mask, samples = given
    for first in range(0, len(ids), size):
        part = slice(first, first + size)
        rows = samples.rows[part] - first * ids.shape[1]
        yield ids[part], labels[part], mask[part], ScoreInputs(rows, samples.targets[part])


@pytest.mark.parametrize("case", CASES)
def test_against_transformers(device, tmp_path, case):
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    model = opened(case, folder, device)
    model.load_adapter(start(recorded))
    ids, _, mask, samples = batch(case)
    scores = model.scores(ids, mask, samples)
    assert np.abs(scores - recorded["scores"]).max() <= 1e-5 * np.abs(recorded["scores"]).max()
    optim = OptimConfig(
        learning_rate=5e-3, lr_scheduler_type="constant", weight_decay=0.01, warmup_ratio=0.0
    )
    optimizer = Optimizer(model, optim, 3)
    model.zero_gradient()
    size = 2 if case == "reward" else len(ids)
    for step, theirs in enumerate(json.loads(str(recorded["metrics"]))):
        for *arrays, each in cut(batch(case), size):
            model.accumulate(*arrays, samples=each)
        stats = model.read_stats()
        assert stats[0] / stats[1] == pytest.approx(recorded["losses"][step], rel=1e-5)
        found = means(stats[STATS_METRICS:].tolist(), scoring(case))
        if size == len(ids):  # else the largest and the smallest are of each micro-batch
            for name, value in theirs.items():
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        if step == 0:
            gradient = model.adapter.split(model.read_flat(model.adapter.gradient) / stats[1])
            expected = expected_gradients(recorded)
            assert set(gradient) == set(expected)
            apart = {n: difference(gradient[n], array) for n, array in expected.items()}
            assert max(apart.values()) <= MOST_APART, apart
        optimizer.step(step + 1)
        model.zero_stats()
    for name, array in model.adapter_state_dict().items():
        assert difference(array, recorded[f"after:{name}"]) <= 1e-4, name
    model.save_adapter(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/adapter_model.safetensors")
    assert {n: list(a.shape) for n, a in saved.items()} == json.loads(str(recorded["names"]))
    config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]


@pytest.fixture(scope="module")
def reward_model(device, tmp_path_factory):
    folder, recorded = recorded_base(FOLDER / "reward.npz", tmp_path_factory.mktemp("reward"))
    return opened("reward", folder, device), start(recorded)


@pytest.mark.parametrize("case", reward_cases.CASES)
def test_steps_of_trl_s_own_loop(reward_model, case):
    """Pairs in their order, with margins and centering, in one micro-batch or two."""
    model, adapter = reward_model
    given, number = reward_cases.CASES[case], list(reward_cases.CASES).index(case)
    model.load_adapter(adapter)
    scored = Scoring("reward", center=given["center"])
    model.options = TrainingOptions(objective=Objective(scoring=scored))
    optim = OptimConfig(
        learning_rate=reward_cases.RATE, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=0.0, adam_epsilon=reward_cases.ADAM_EPSILON,
    )  # fmt: skip
    optimizer = Optimizer(model, optim, reward_cases.STEPS)
    model.zero_gradient()
    rows, margins = reward_cases.pairs()
    blocks = iter(range(0, len(rows), given["batch"]))
    losses, norms, told, metrics = (
        LOOPS[name][number] for name in ("losses", "norms", "projections", "metrics")
    )
    for step in range(reward_cases.STEPS):
        for _ in range(given["accumulation"]):
            first = next(blocks)
            own = range(first, first + given["batch"])
            sequences = [ids for pair in own for ids in rows[pair]]
            ids, mask = np.zeros((2, len(sequences), 24), np.int64)
            for row, sequence in enumerate(sequences):
                ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
            targets = np.zeros((len(sequences), 1), np.float32)
            targets[::2, 0] = [margins[pair] if given["margins"] else 0.0 for pair in own]
            samples = ScoreInputs(pooled_rows(ids, mask, PADDING), targets)
            model.accumulate(ids, np.full(ids.shape, -100), mask, samples=samples)
        stats = model.read_stats()
        assert stats[0] / stats[1] == pytest.approx(losses[step], rel=1e-5)
        gradient = model.adapter.split(model.read_flat(model.adapter.gradient) / stats[1])
        assert distance(whole_projections(gradient), told[step]) <= 1e-5 * norms[step]
        expected = dict(zip(LOOPS["names"].tolist(), metrics[step].tolist(), strict=True))
        found = means(stats[STATS_METRICS:].tolist(), scored)
        assert found == pytest.approx(expected, rel=1e-5, abs=2e-6)
        optimizer.step(step + 1)
        model.zero_stats()
    last = model.adapter_state_dict()
    norm = np.linalg.norm([np.linalg.norm(array) for array in last.values()])
    assert distance(whole_projections(last), told[reward_cases.STEPS]) <= 1e-5 * norm


@pytest.mark.quick
def test_what_peft_saved_is_opened(device, tmp_path):
    folder, recorded = recorded_base(FOLDER / "single-gemma2.npz", tmp_path)
    place = tmp_path / "adapter"
    place.mkdir()
    save_file(start(recorded), place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(str(recorded["adapter_config"]))
    model = QLoRAModel.from_pretrained(folder, None, PLAIN, "float32", device, adapter=place)
    model.options = TrainingOptions(objective=Objective(scoring=scoring("single-gemma2")))
    ids, _, mask, samples = batch("single-gemma2")
    scores = model.scores(ids, mask, samples)
    assert np.abs(scores - recorded["scores"]).max() <= 1e-5 * np.abs(recorded["scores"]).max()
    with pytest.raises(ConfigError, match="has no lm_head"):
        model.logits(ids)


@pytest.mark.parametrize("case", ["single-gemma2", "multi-gpt_neox"])
def test_a_merged_folder_has_the_scores_of_its_adapter(device, tmp_path, case):
    """It has the head instead of lm_head, and transformers' names of labels."""
    folder, recorded = recorded_base(FOLDER / f"{case}.npz", tmp_path)
    place, merged = tmp_path / "adapter", tmp_path / "merged"
    named = replace(scoring(case), labels=("bad", "fair", "good"))
    place.mkdir()
    save_file(start(recorded), place / "adapter_model.safetensors", to_metadata(named))
    (place / "adapter_config.json").write_text(str(recorded["adapter_config"]))
    merge(folder, place, merged)
    config = json.loads((merged / "config.json").read_text())
    (name,) = config["architectures"]
    assert name.count("For") == 1 and name.endswith("ForSequenceClassification")
    assert config["id2label"] == {"0": "bad", "1": "fair", "2": "good"}
    assert config["label2id"] == {"bad": 0, "fair": 1, "good": 2}
    assert (config["problem_type"], config["pad_token_id"]) == (named.problem_type, PADDING)
    model = QLoRAModel.from_pretrained(merged, LoraConfig(r=4), PLAIN, "float32", device)
    model.options = TrainingOptions(objective=Objective(scoring=scoring(case)))
    ids, _, mask, samples = batch(case)
    scores = model.scores(ids, mask, samples)
    assert np.abs(scores - recorded["scores"]).max() <= 1e-5 * np.abs(recorded["scores"]).max()
    assert not {"lm_head.weight", "embed_out.weight"} & set(load_file(merged / "model.safetensors"))


def test_bfloat16_is_near(device, tmp_path):
    folder, recorded = recorded_base(FOLDER / "weighted-qwen2.npz", tmp_path)
    model = opened("weighted-qwen2", folder, device, "bfloat16")
    model.load_adapter(start(recorded))
    ids, _, mask, samples = batch("weighted-qwen2")
    scores = model.scores(ids, mask, samples)
    assert np.abs(scores - recorded["scores"]).max() <= 0.03 * np.abs(recorded["scores"]).max()


@pytest.mark.quick
def test_a_new_head_is_small_and_of_the_seed(device, tmp_path):
    folder, _ = recorded_base(FOLDER / "reward.npz", tmp_path)
    lora = LoraConfig(r=R, target_modules=["q_proj"])
    heads = [
        QLoRAModel.from_pretrained(
            folder, lora, PLAIN, "float32", device, num_labels=4, seed=seed
        ).adapter_state_dict()["base_model.model.score.weight"]
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(heads[0], heads[1]) and not np.array_equal(heads[0], heads[2])
    assert heads[0].std() == pytest.approx(0.02, rel=0.2)
