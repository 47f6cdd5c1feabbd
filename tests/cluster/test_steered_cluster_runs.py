"""Runs on workers that balance experts, write texts in between and are steered from Python."""

import json

import numpy as np
import pytest
from cluster.answer_runs import Told
from cluster.test_cluster_runs import LOCAL, traces
from e2e.tiny import write_chats, write_model
from safetensors.numpy import load_file, save_file
from support.observing import calling

from qlora_wgpu.runs import train
from qlora_wgpu.selfcheck import results

pytestmark = pytest.mark.full

pytest.importorskip("distributed")

MIXTURE = {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steered")
    write_model(folder / "model", **MIXTURE)
    tensors = load_file(folder / "model" / "model.safetensors")
    router = np.random.default_rng(5).standard_normal((4, 36)).astype(np.float32)
    tensors["model.layers.0.block_sparse_moe.gate.weight"] = router
    save_file(tensors, folder / "model" / "model.safetensors")
    write_chats(folder / "train.jsonl", 20)
    write_chats(folder / "eval.jsonl", 4, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(results, "check_launches", lambda *given: [])
        yield folder


def steer(step):
    if step.step == 2:
        step.set_learning_rate(3e-3)
        step.evaluate()
    if step.step == 3:
        step.scale_learning_rate(0.5)
        step.save()


def pause(step):
    steer(step)
    if step.step == 4:
        step.stop("a pause")


def run(place, name, on_step, *, resume=False, **cluster):
    given = {
        "model": {"path": str(place / "model")},
        "lora": {"r": 4, "lora_dropout": 0.1},
        "data": {
            "train": str(place / "train.jsonl"), "eval": str(place / "eval.jsonl"),
            "max_seq_length": 48,
        },
        "train": {
            "max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "router_aux_loss_coef": 0.5,
        },
        "optim": {"learning_rate": 1e-2, "name": "lion"},
        "eval": {
            "eval_steps": 0, "sample_prompts": ["a?", "b c"], "sample_steps": 2,
            "sample_max_new_tokens": 4,
        },
        "output": {"dir": str(place / name), "save_steps": 6, "save_total_limit": None},
        "cluster": cluster,
    }  # fmt: skip
    told = Told()
    callbacks = [calling(on_step_end=on_step)] if on_step else []
    return train(given, told, resume=resume, callbacks=callbacks), told


@pytest.fixture(scope="module")
def own(place):
    """A run without a cluster."""
    return run(place, "own", steer)[0]


def test_balance_texts_and_steering_are_those_of_one_device(place, own):
    result, told = run(place, "two", steer, **LOCAL)
    assert traces(place, "two") == traces(place, "own")
    texts = [(place / name / "samples.jsonl").read_text() for name in ("own", "two")]
    assert texts[0] == texts[1]
    assert [json.loads(line)["step"] for line in texts[1].splitlines()] == [
        step for step in (0, 2, 4, 6) for _ in range(2)
    ]
    assert result.samples == own.samples
    steps = {row["step"]: row for row in told.rows}
    assert all(row["aux_loss"] > 0 for row in steps.values())
    assert steps[3]["learning_rate"] == pytest.approx(3e-3)
    plain, slower = steps[2]["learning_rate"], steps[4]["learning_rate"]
    assert slower < 0.5 * steps[3]["learning_rate"] < plain


def test_a_pause_on_a_cluster_goes_on_on_one_device(place, own):
    paused, _ = run(place, "paused", pause, **LOCAL)
    assert paused.interrupted and paused.stop_reason == "a pause" and paused.steps == 4
    run(place, "paused", steer, resume=True)
    assert traces(place, "paused") == traces(place, "own")
