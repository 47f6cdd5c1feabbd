"""What a run that is begun again asks of its folder and its settings, without a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.training import run_folder, start
from qlora_wgpu.training.checkpoints import RunState
from qlora_wgpu.training.run_folder import (
    RunFingerprint,
    RunFolder,
    adapter_fingerprint,
    exclusive,
    refuse_other_settings,
)
from qlora_wgpu.training.start import (
    check_output,
    check_resumable,
    note_total_steps,
    refuse_both,
    refuse_fewer_steps,
    reset_best_metric,
)


class Told:
    """An observer that keeps what it is told, by kind."""

    def __init__(self):
        self.all = []

    def __getattr__(self, kind):
        return lambda *what: self.all.append((kind, *what))


def config_of(**sections):
    return Config.model_validate({"model": {"path": "base"}, "data": {"train": "a"}, **sections})


def run_of(path="out", *, total=10, saved_at=-1, best=None, keeps_best=False, state=None, **given):
    return SimpleNamespace(
        config=config_of(**given), state=state or RunState(), total_steps=total, best=best,
        saved_at=saved_at, keeps_best=keeps_best, events=Told(), rollouts=None,
        folder=SimpleNamespace(path=path, best="best"),
    )  # fmt: skip


def test_a_run_is_replaced_or_resumed_and_not_both():
    for one in (True, False):
        refuse_both(overwrite=one, resume=False)
        refuse_both(overwrite=False, resume=one)
    with pytest.raises(ConfigError, match="mutually exclusive"):
        refuse_both(overwrite=True, resume=True)


# ---- the folder ----------------------------------------------------------------------------------


def written(path, config, *parts):
    path.mkdir()
    if config is not None:
        (path / "config.yaml").write_text(config.to_yaml())
    for part in parts:
        (path / part).mkdir(parents=True)
    return path


def test_a_folder_may_have_a_run_to_go_on_with(tmp_path):
    config = config_of()
    assert not check_resumable(tmp_path, config)
    begun = written(tmp_path / "begun", config)
    assert check_resumable(begun, config) is False
    saved = written(tmp_path / "saved", config, "checkpoints/step-0", "adapter")
    assert check_resumable(saved, config) is True


@pytest.mark.parametrize(
    ("has_config", "parts", "told"),
    [
        (False, ["checkpoints/step-3"], "a run without its config.yaml"),
        (False, ["adapter"], "a run without its config.yaml"),
        (True, ["adapter"], "an adapter, but no checkpoint to resume from"),
    ],
)
def test_what_cannot_be_gone_on_with_is_told(tmp_path, has_config, parts, told):
    config = config_of()
    path = written(tmp_path / "run", config if has_config else None, *parts)
    with pytest.raises(ConfigError, match=told):
        check_resumable(path, config)


def test_settings_of_training_stay_as_they_were(tmp_path):
    path = written(tmp_path / "run", config_of(lora={"r": 4}))
    with pytest.raises(ConfigError, match=r"with lora\.r = 4, now it is 8"):
        check_resumable(path, config_of(lora={"r": 8}))
    assert check_resumable(path, config_of(lora={"r": 4}, log={"logging_steps": 3})) is False
    refuse_other_settings({}, {"new": 1}, "out")  # an older version had no such setting
    with pytest.raises(ConfigError, match="the run in out was started with a = None, now it is 0"):
        refuse_other_settings({"a": None}, {"a": 0}, "out")


def test_a_run_is_looked_for_before_anything_takes_time(tmp_path):
    config = config_of(output={"dir": str(tmp_path / "run")})
    check_output(config, overwrite=False, resume=False)
    path = written(tmp_path / "run", None, "checkpoints/step-3", "adapter")
    with pytest.raises(ConfigError, match="already contains a run"):
        check_output(config, overwrite=False, resume=False)
    check_output(config, overwrite=True, resume=False)
    with pytest.raises(ConfigError, match=r"a run without its config\.yaml"):
        check_output(config, overwrite=False, resume=True)
    # A run whose replacement never began is put back first.
    (path / "replaced").mkdir()
    (path / "replaced" / "config.yaml").write_text(config.to_yaml())
    check_output(config, overwrite=False, resume=True)
    assert (path / "config.yaml").exists() and not (path / "replaced").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_output(
            config_of(output={"dir": str(tmp_path / "file")}), overwrite=True, resume=False
        )


# ---- steps and metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize(("done", "is_told"), [(9, False), (10, False), (11, True)])
def test_a_run_has_no_fewer_steps_than_it_has_done(done, is_told):
    run = run_of(state=RunState(step=done))
    if is_told:
        with pytest.raises(ConfigError, match="has done 11 steps, more than the 10"):
            refuse_fewer_steps(run)
    else:
        refuse_fewer_steps(run)


def steps_noted(before=8, **given):
    state = RunState(step=4, total_steps=before, rate_factor=0.5)
    run = run_of(saved_at=given.pop("saved_at", 4), state=state, **given)
    note_total_steps(run)
    assert run.state.total_steps == run.total_steps
    return run.events.all


def test_another_number_of_steps_is_told_with_the_rate_from_here_on():
    linear = {"lr_scheduler_type": "linear", "learning_rate": 0.5, "warmup_ratio": 0.0}
    ((kind, told),) = steps_noted(optim=linear)
    assert kind == "note" and told == (
        "the run now has 10 steps instead of 8: after step 4 the learning rate continues at 0.15 "
        "(linear over 10 steps)"
    )
    constant = {"lr_scheduler_type": "constant", "learning_rate": 0.5}
    assert steps_noted(optim=constant)[0][1].endswith("the learning rate continues at 0.25")
    warmed = {**constant, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    assert steps_noted(optim=warmed)[0][1].endswith("the learning rate continues at 0.25")
    for same in ({"before": 10}, {"before": 0}, {"saved_at": -1}):
        assert steps_noted(optim=constant, **same) == []
    assert steps_noted(optim=constant, saved_at=0)


def test_a_rate_that_a_plateau_has_lowered_goes_on():
    run = run_of(saved_at=4, state=RunState(step=4, total_steps=8, rate_factor=0.5),
                 optim={"lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.5},
                 eval={"eval_steps": 2}, data={"train": "a", "eval": "b"})  # fmt: skip
    run.state.plateau = SimpleNamespace(rate=0.25, best=1.0, bad=3)
    note_total_steps(run)
    ((_, told),) = run.events.all
    assert told.endswith("the learning rate continues at 0.12")


@pytest.mark.parametrize(("warmup", "is_told"), [(9, False), (10, True), (11, True)])
def test_a_warm_up_that_never_ends_is_told(warmup, is_told):
    optim = {"lr_scheduler_type": "linear", "learning_rate": 0.5, "warmup_steps": warmup}
    run = run_of(optim=optim)
    note_total_steps(run)
    assert [kind for kind, _ in run.events.all] == ["warning"] * is_told
    if warmup == 10:
        told = run.events.all[0][1]
        assert f"warm-up takes {warmup} of the run's 10 steps, and the last has 0.45" in told


@pytest.mark.parametrize(
    ("aim", "keeps_best", "has_plateau", "words"),
    [("lowest loss", True, True, 0), ("highest f", False, False, 0), ("highest f", True, False, 1),
     ("highest f", False, True, 1)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_another_metric_begins_anew(aim, keeps_best, has_plateau, words):
    state = RunState(aim=aim, best_loss=1.0, best_step=3, best_figure=2.0)
    state.plateau = SimpleNamespace(best=1.0, bad=2, rate=0.5) if has_plateau else None
    run = run_of(state=state, best="adapter", keeps_best=keeps_best)
    reset_best_metric(run)
    is_same = aim == "lowest loss"
    assert (run.best, state.best_loss) == (("adapter", 1.0) if is_same else (None, None))
    assert state.aim == "lowest loss"
    assert len(run.events.all) == words
    if has_plateau:
        assert (state.plateau.best, state.plateau.bad) == ((1.0, 2) if is_same else (None, 0))


@pytest.mark.parametrize(
    ("kept", "finished", "outcome"),
    [
        (3, False, "taken"),
        (5, False, "taken"),  # of an evaluation that is repeated
        (2, False, "should contain the best adapter so far, of step 3: restore"),
        (4, False, "should contain the best adapter so far, of step 3: restore"),
        (2, True, "warning"),
        (None, False, "warning"),
        (None, True, "nothing"),
    ],
)
@pytest.mark.cover("all")
def test_the_best_adapter_is_looked_for(monkeypatch, kept, finished, outcome):
    found = None if kept is None else SimpleNamespace(step=kept)
    monkeypatch.setattr(start, "load_best", lambda folder, model, aim: found)
    state = RunState(step=4, best_loss=1.0, best_step=3, finished=finished)
    run = run_of(state=state, keeps_best=True)
    run.model = None
    if "restore" in outcome:
        with pytest.raises(CheckpointError, match=outcome):
            start._load_best(run)
        return
    start._load_best(run)
    assert run.best is (found if outcome == "taken" else None)
    assert [kind for kind, _ in run.events.all] == ["warning"] * (outcome == "warning")
    assert (state.best_loss is None) == (kept is None and not finished)


@pytest.mark.parametrize(("keeps_best", "best_loss"), [(False, 1.0), (True, None)])
def test_no_best_adapter_is_looked_for_where_there_is_none(monkeypatch, keeps_best, best_loss):
    monkeypatch.setattr(start, "load_best", None)
    run = run_of(state=RunState(best_loss=best_loss), keeps_best=keeps_best)
    start._load_best(run)
    assert run.best is None and not run.events.all


@pytest.mark.parametrize("digest", [None, "right", "wrong"])
@pytest.mark.parametrize("rollouts", [None, "some"])
def test_a_run_goes_on_from_its_newest_checkpoint(monkeypatch, tmp_path, digest, rollouts):
    folder = RunFolder(tmp_path / "run", "old")
    for step in (1, 2, 5):
        folder.log.append({"step": step})
        folder.checkpoint_folder(step).mkdir()
    folder.log.keep(lambda row: row["step"] <= 2)
    state = RunState(step=2, logged_step=2, eval_step=0)
    state.log_digest = folder.log.digest if digest == "right" else digest
    run = run_of(state=RunState())
    run.folder, run.model = folder, "model"
    run.identity = SimpleNamespace(refuse_other=lambda *what: run.events.asked(*what))
    run.rollouts = rollouts and SimpleNamespace(restore=run.events.restored)

    def newest(folders, model, refuse):
        assert [each.name for each in folders] == ["step-1", "step-2", "step-5"]
        refuse({"manifest": 1})
        return folders[1], state, ["step-5 is damaged"]

    monkeypatch.setattr(start, "load_newest", newest)
    monkeypatch.setattr(start, "load_rollout", lambda checkpoint: checkpoint.name)
    monkeypatch.setattr(start, "_load_best", lambda run: run.events.looked(run.saved_at))
    if digest is None:
        folder.config.unlink()
        folder.config.mkdir()  # which cannot be replaced
    start.load_run(run)
    assert run.state is state and run.saved_at == 2
    assert ("asked", {"manifest": 1}, str(folder.path)) in run.events.all
    assert ("looked", 2) in run.events.all
    assert (("restored", 2, "step-2") in run.events.all) == (rollouts is not None)
    assert run.events.all[-1] == ("resumed", folder.checkpoint_folder(2), 2)
    first, *told = [text for kind, text, *_ in run.events.all if kind == "warning"]
    assert first == "step-5 is damaged" and len(told) == (digest != "right")
    if digest == "wrong":
        assert "were changed since the run wrote" in told[0]
    if digest is None:
        assert told[0].endswith("; it is unchanged")
    assert [each.name for each in run_folder.checkpoint_folders(folder.path)] == [
        "step-1", "step-2"
    ]  # fmt: skip
    assert digest is None or folder.config.read_text() == run.config.to_yaml()
    folder.close()


# ---- who a run is --------------------------------------------------------------------------------


def fingerprint(monkeypatch, *, base="w", data="d", held_out=None, init=None, values=1, **given):
    array = np.full((2, 3), values, np.float32)
    monkeypatch.setattr(run_folder, "load_adapter", lambda path: ({"b": array, "a": array}, None))
    finished = []
    folder = SimpleNamespace(
        fingerprint={"weights": base, "config": given.pop("shape", "c")},
        finish_fingerprint=lambda: finished.append(1),
    )
    references = given.pop("references", None)
    config = config_of(lora={"init_from": init}, **given)
    adapter = SimpleNamespace(config=config.lora, forms=SimpleNamespace(gradient="float32"))
    model = SimpleNamespace(
        folder=folder, adapter=adapter, quant=config.quant, compute_dtype="bfloat16"
    )
    named = [None if each is None else SimpleNamespace(fingerprint=each) for each in
             (data, held_out)]  # fmt: skip
    made = RunFingerprint(model, config, *named, references)
    assert finished == [1]
    return made


def test_a_run_knows_itself(monkeypatch):
    one = fingerprint(monkeypatch, held_out="h", init="a", references="r")
    record = one.record
    assert record["settings"]["train.compute_dtype"] == "bfloat16"
    assert record["settings"]["train.gradient_dtype"] == "float32"
    assert (record["data"], record["held_out_data"], record["references"]) == ("d", "h", "r")
    assert record["sources"]["train"] == "a" and len(record["begun_from"]) == 16
    one.refuse_other(record, "out")
    one.refuse_other({"settings": {}}, "out")  # of an older version
    with pytest.raises(ConfigError, match=r"train\.compute_dtype = 'float32'"):
        one.refuse_other({"settings": {"train.compute_dtype": "float32"}}, "out")
    plain = fingerprint(monkeypatch)
    assert plain.record["begun_from"] is None and plain.record["held_out_data"] is None


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({"data": "other"}, "with other training data: resume it with the same data"),
        ({"held_out": "h"}, "with other held-out data: resume it with the same data"),
        ({"base": "other"}, "with other base weights: resume it with the same base"),
        ({"shape": "other"}, "with other values in the base's config.json: resume it with the"),
        ({"references": "r"}, "other log probabilities of the reference model"),
        ({"init": "a"}, "with other values of the adapter in lora.init_from"),
        ({"data": "other", "sources": True}, r"other training data \(data.train was 'b', now .*'a"),
    ],
)
def test_another_run_is_refused_with_what_differs(monkeypatch, before, told):
    sources = before.pop("sources", False)
    kept = dict(fingerprint(monkeypatch, **before).record)
    kept["settings"] = {}
    if sources:
        kept["sources"] = {**kept["sources"], "train": "b", "gone": 1}
    with pytest.raises(ConfigError, match=told) as error:
        fingerprint(monkeypatch).refuse_other(kept, "out")
    assert ("data.train was" in str(error.value)) == sources and "gone" not in str(error.value)


def test_an_adapter_is_known_by_its_names_and_values(monkeypatch):
    def found(**tensors):
        monkeypatch.setattr(run_folder, "load_adapter", lambda path: (tensors, None))
        return adapter_fingerprint("folder")

    one, two = np.arange(3, dtype=np.float32), np.arange(6, dtype=np.float32)[::2] / 2
    assert found(a=one, b=two) == found(b=two.copy(), a=one) and len(found(a=one)) == 16
    assert len({found(a=one), found(b=one), found(a=one + 1), found(a=one, b=one)}) == 4


def test_a_model_is_in_one_run_at_a_time():
    class Model:
        pass

    model, other = Model(), Model()
    with exclusive(model, "first"), exclusive(other, "other"):
        with pytest.raises(ConfigError, match="the run in first is training this model"):
            exclusive(model, "second").__enter__()
        with pytest.raises(ConfigError, match="the run in first is"):
            exclusive(model, "second").__enter__()
    with exclusive(model, "third"):
        pass
