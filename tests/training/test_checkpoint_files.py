"""What a checkpoint and the best adapter keep, of a model that is only arrays."""

from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from qlora_wgpu.config import EvalConfig
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.training import checkpoints
from qlora_wgpu.training.checkpoints import (
    BestAdapter,
    RunState,
    load_best,
    load_checkpoint,
    load_newest,
    load_rollout,
    save_best,
    save_checkpoint,
)


class Model:
    """Parameters and two moments, by their names."""

    def __init__(self, value):
        self.values = {name: np.full(3, value + n, np.float32)
                       for n, name in enumerate(("parameters", "first", "second"))}  # fmt: skip
        moments = SimpleNamespace(
            vectors=("first", "second"),
            split=lambda flats: dict(zip(("first", "second"), flats, strict=True)),
            join=lambda tensors: [tensors["first"], tensors["second"]],
        )
        self.adapter = SimpleNamespace(
            parameters="parameters", moments=moments, join=lambda tensors: tensors["a"]
        )

    def read_flat(self, name):
        return self.values[name]

    def write_flat(self, name, values):
        self.values[name] = np.array(values)

    def write_parameters(self, values):
        self.write_flat("parameters", values)

    def save_adapter(self, folder):
        save_file({"a": self.values["parameters"]}, folder / "adapter_model.safetensors")

    def told(self):
        return [float(self.values[name][0]) for name in ("parameters", "first", "second")]


@pytest.fixture(autouse=True)
def plain_adapters(monkeypatch):
    def load(folder):
        path = folder / "adapter_model.safetensors"
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        with checkpoints.SafetensorsFile(path) as file:
            return {name: file.raw(name).copy() for name in file.names()}, None

    monkeypatch.setattr(checkpoints, "load_adapter", load)
    monkeypatch.setattr(
        checkpoints, "read_started", lambda folder, tensors, stored, adapter: (tensors, None)
    )


def test_a_checkpoint_brings_everything_back(tmp_path):
    folder, asked = tmp_path / "step-3", []
    state = RunState(step=3, num_tokens=7, window=[(0.1, 2.0, None, 0.0)])
    save_checkpoint(folder, Model(1.0), state, {"base": "b"}, {"ids": np.arange(4)})
    model = Model(9.0)
    assert load_checkpoint(folder, model, lambda kept: asked.append(kept["base"])) == state
    assert model.told() == [1.0, 2.0, 3.0] and asked == ["b"]
    assert load_rollout(folder)["ids"].tolist() == [0, 1, 2, 3]
    save_checkpoint(tmp_path / "step-4", Model(1.0), RunState(step=4), {})
    assert load_rollout(tmp_path / "step-4") == {}


def test_a_checkpoint_is_of_the_step_that_it_is_named_after(tmp_path):
    folder = tmp_path / "step-3"
    save_checkpoint(folder, Model(1.0), RunState(step=4), {})
    with pytest.raises(CheckpointError, match="contains the state after step 4"):
        load_checkpoint(folder, Model(9.0), lambda kept: None)
    save_checkpoint(tmp_path / "step-5", Model(1.0), RunState(step=5), {"step": 6})
    with pytest.raises(CheckpointError, match="contains the state after step 5"):
        load_checkpoint(tmp_path / "step-5", Model(9.0), lambda kept: None)
    (tmp_path / "step-5" / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        load_checkpoint(tmp_path / "step-5", Model(9.0), lambda kept: None)


def test_the_newest_checkpoint_that_is_whole_is_loaded(tmp_path):
    folders = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
    for step, folder in enumerate(folders, 1):
        save_checkpoint(folder, Model(step), RunState(step=step), {})
    (folders[2] / "adapter_model.safetensors").unlink()
    model = Model(9.0)
    found, state, skipped = load_newest(folders, model, lambda kept: None)
    assert (found, state.step, model.told()[0]) == (folders[1], 2, 2.0)
    assert len(skipped) == 1 and skipped[0].startswith("step-3 is skipped: ")
    with pytest.raises(CheckpointError, match=r"can be loaded \(step-3 is skipped"):
        load_newest(folders[2:], model, lambda kept: None)
    with pytest.raises(CheckpointError, match="there is none"):
        load_newest([], model, lambda kept: None)


def test_the_best_adapter_is_written_beside_the_current_one(tmp_path):
    model, folder = Model(1.0), tmp_path / "best"
    best = BestAdapter(3, 1.5, 2.5, "lowest loss", np.full(3, 7.0, np.float32))
    assert load_best(folder, model, "lowest loss") is None
    saved = save_best(folder, model, best)
    assert saved.is_saved and not best.is_saved and model.told()[0] == 1.0
    found = load_best(folder, model, "lowest loss")
    assert (found.step, found.loss, found.metric, found.is_saved) == (3, 1.5, 2.5, True)
    assert found.parameters.tolist() == [7.0] * 3
    assert load_best(folder, model, "highest f1") is None


def test_a_best_adapter_of_an_older_version_goes_by_its_loss(tmp_path, monkeypatch):
    save_best(tmp_path / "best", Model(1.0), BestAdapter(3, 1.5, 2.5, "x", np.zeros(3)))
    for manifest, told in (({"step": 3, "eval_loss": 1.5}, 1.5), ({"step": 3}, None),
                           ({"step": "a", "eval_loss": 1}, None)):  # fmt: skip
        monkeypatch.setattr(checkpoints, "read_manifest", lambda folder, m=manifest: m)
        if told is None:
            with pytest.raises(CheckpointError, match="does not describe a best adapter"):
                load_best(tmp_path / "best", Model(1.0), EvalConfig().aim)
        else:
            assert load_best(tmp_path / "best", Model(1.0), EvalConfig().aim).metric == told


# ---- the state -----------------------------------------------------------------------------------


def test_a_new_state_has_done_nothing():
    state = RunState()
    assert (state.step, state.num_tokens, state.logged_step, state.total_steps) == (0, 0, 0, 0)
    assert (state.learning_rate, state.grad_norm, state.seconds) == (0.0, 0.0, 0.0)
    assert (state.eval_step, state.best_step, state.rate_factor) == (-1, -1, 1.0)
    assert state.without_gain == 0 and state.finished is False
    assert RunState.from_json(state.to_json(), "x") == state
    with pytest.raises(CheckpointError, match="x is damaged: step -1"):
        RunState.from_json('{"step": -1}', "x")


def test_averages_are_of_numbers_and_metrics_are_sums():
    state = RunState()
    state.add_averages({"a": 1.0, "b": float("nan")})
    state.add_averages({"a": 3.0, "c": 2.0, "d": float("inf")})
    assert state.averages == {"a": [4.0, 2], "c": [2.0, 1]}
    state.add_metrics([1.0, 2.0])
    state.add_metrics([3.0, 4.0, 5.0])
    assert state.metrics == [4.0, 6.0, 5.0]


def test_forgetting_the_best_makes_the_next_one_it():
    state = RunState(best_loss=1.0, best_figure=2.0, best_step=3, without_gain=4)
    state.forget_best()
    found = (state.best_loss, state.best_figure, state.best_step, state.without_gain)
    assert found == (None, None, -1, 0)
    assert state.evaluated(9.0, 9.0, 5, EvalConfig()) and state.best_step == 5


@pytest.mark.parametrize(("gain", "without"), [(0.25, 1), (0.2500001, 0), (0.3, 0), (0.0, 1)])
@pytest.mark.parametrize("more", [True, False])
@pytest.mark.cover("all")
def test_a_gain_counts_above_the_threshold(gain, without, more):
    settings = EvalConfig(
        metric_for_best_model="eval_x" if more else "loss", greater_is_better=more,
        early_stopping_threshold=0.25,
    )  # fmt: skip
    state = RunState(best_figure=1.0, best_loss=1.0)
    better = 1.0 + gain if more else 1.0 - gain
    assert state.evaluated(better, better, 5, settings) == (gain > 0)
    assert state.without_gain == without
