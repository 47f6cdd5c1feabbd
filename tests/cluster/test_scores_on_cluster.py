"""Reward models and classifiers on a cluster: the losses, metrics, head and bits of one device."""

import json

import numpy as np
import pytest
from cluster.answer_runs import Told, answers_in, settings_of, traces
from cluster.dying_worker import FOLDER, METHODS, DyingWorker
from safetensors.numpy import load_file

from qlora_wgpu.cluster import owner
from qlora_wgpu.runs import train

HEAD = "base_model.model.score.weight"
KINDS = {
    "reward": {"objective": "reward", "center_rewards_coefficient": 0.1},
    "single": {"objective": "classification", "class_weights": [0.3, 1.7, 1.1]},
    "multi": {"objective": "classification", "problem_type": "multi_label_classification"},
    "regression": {"objective": "classification", "problem_type": "regression"},
}
LABELS = {"single": "abc", "multi": (["a"], ["b", "c"], []), "regression": (0.5, -1.0, 2.0)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with answers_in(tmp_path_factory.mktemp("scores")) as folder:
        for kind, labels in LABELS.items():
            rows = [{"text": "abc de."[: 2 + n % 5], "label": labels[n % 3]} for n in range(13)]
            (folder / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        yield folder


def run(place, name, kind, count, told=None, **sections):
    sections["train"] = KINDS[kind] | sections.get("train", {})
    if kind in LABELS:
        file = str(place / f"{kind}.jsonl")
        sections["data"] = {"train": file, "eval": file}
    given = settings_of(place, name, KINDS[kind]["objective"], None, count, **sections)
    given["train"].pop("loss_type")
    return train(given, told)


@pytest.mark.slow
@pytest.mark.cover(kind=["single"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_the_bits_of_one_device(place, clusters, monkeypatch, kind):
    monkeypatch.setattr(owner, "_AT_ONCE", 2)
    for count in (0, 2):
        run(place, f"{kind}-{count}", kind, count, lora={"lora_dropout": 0.2})
    alone, shared = (traces(place, f"{kind}-{count}") for count in (0, 2))
    assert shared == alone
    measured = [row for row in shared[0] if "eval_loss" in row]
    name = "mae" if kind == "regression" else "accuracy"
    assert len(measured) == 3 and all(f"eval_{name}" in row for row in measured)
    assert ("eval_confusion" in measured[0]) is (kind == "single")
    (cluster,) = clusters
    assert {method for method, _ in cluster.asked} == {"gradient", "scores"}
    assert ("scores", 2) in cluster.asked  # some at a time


@pytest.mark.full
def test_the_head_of_a_classifier_is_continued_and_learns(place, clusters):
    run(place, "before", "single", 0)
    lora = {"init_from": str(place / "before" / "adapter")}
    for count in (0, 2):
        run(place, f"after-{count}", "single", count, lora=lora)
    assert traces(place, "after-2") == traces(place, "after-0")
    before, after = (
        load_file(place / name / "adapter/adapter_model.safetensors")[HEAD]
        for name in ("before", "after-2")
    )
    assert before.shape == after.shape == (3, before.shape[1])
    assert not np.array_equal(before, after)


@pytest.mark.full
def test_a_worker_that_is_lost_changes_nothing(place, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("qlora_wgpu.runs.cluster.Worker", DyingWorker)
    told = Told()
    for count in (0, 2):
        run(place, f"lost-{count}", "reward", count, told)
    assert traces(place, "lost-2") == traces(place, "lost-0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gradient", "scores"]
    assert set(METHODS) > {"gradient", "scores"}
    assert any("its blocks go to other workers" in text for text in told.texts)
