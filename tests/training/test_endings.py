"""What a run does at its end and at evaluations, told by what it does to others, without a run."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CallbackError, CheckpointError, ConfigError, QLoRAError
from qlora_wgpu.training import evaluation, finish
from qlora_wgpu.training.checkpoints import BestAdapter, RunState
from qlora_wgpu.training.evaluation import (
    Evaluator,
    SampleLogger,
    plateau_message,
    steps_between,
)

BEST = BestAdapter(2, 1.5, 2.5, "lowest loss", np.full(3, 2.0, np.float32))
LAST = np.full(3, 1.0, np.float32)


class Noted:
    """Keeps the calls of all its methods in a list, under its name."""

    def __init__(self, name, calls, **own):
        self.__dict__.update(own, _name=name, _calls=calls)

    def __getattr__(self, what):
        return lambda *given, **more: self._calls.append((f"{self._name}.{what}", *given))


@pytest.fixture
def run(tmp_path):
    """A run whose last step was 4; what it does is in ``calls``."""
    calls = []
    state = RunState(step=4, total_steps=8)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "a", "eval": "b"}})

    class Model(Noted):
        values = LAST

        def read_flat(self, vector):
            return self.values

        def write_parameters(self, values):
            self._calls.append(("write", values[0]))

        def save_adapter(self, folder):
            self._calls.append(("adapter", str(folder.name)))

    adapter = SimpleNamespace(parameters="parameters")
    paths = {name: tmp_path / "run" / name for name in ("adapter", "checkpoints")}
    log = Noted("log", calls)
    made = SimpleNamespace(
        calls=calls, state=state, config=config, best=None, saved_at=4, keeps_best=False,
        model=Model("model", calls, adapter=adapter), events=Noted("events", calls),
        folder=Noted("folder", calls, path=tmp_path / "run", log=log, texts=log, **paths),
        saves=iter(()), rollouts=None, held_out=None, held_out_answers=None, total_steps=8,
        stop=SimpleNamespace(requested=False, number=None), images=None, executor=None, longest=64,
        throughput=SimpleNamespace(paused=nullcontext),
    )  # fmt: skip

    def save():
        calls.append(("save", state.finished))
        return next(made.saves, True)

    made.save = save
    made.save_best = lambda: calls.append(("save best",))
    made.tidy = lambda: calls.append(("tidy",))
    made.wrote = lambda folder: calls.append(("wrote", folder.name))
    made.logged = made.evaluated = lambda row: calls.append(("row", row))
    made.failure = made.failure_at_start = QLoRAError
    made.failure_at_start = lambda text: QLoRAError(f"at start: {text}")
    return made


def names(calls):
    return [call[0] for call in calls]


def set_eval(run, **settings):
    changed = run.config.eval.model_copy(update=settings)
    run.config = run.config.model_copy(update={"eval": changed})


# ---- the end -------------------------------------------------------------------------------------


@pytest.fixture
def plain_end(monkeypatch):
    monkeypatch.setattr(finish, "log_window", lambda run: run.calls.append(("logged",)))
    monkeypatch.setattr(finish, "recover", lambda folder: None)
    monkeypatch.setattr(finish, "forget_rescued", lambda path: [])


def end(run, *, is_pending=False):
    evaluator = SimpleNamespace(
        is_pending=is_pending, measure=lambda step: run.calls.append(("measured", step))
    )
    finish.finish(run, evaluator)
    return [call for call in run.calls if not call[0].startswith("folder.")]


def test_a_run_that_ends_writes_its_adapter_and_then_that_it_has_ended(run, plain_end):
    assert end(run) == [
        ("logged",), ("adapter", "adapter"), ("tidy",), ("wrote", "adapter"), ("write", 1.0),
        ("save", True),
    ]  # fmt: skip
    assert run.state.finished and ("folder.require_own",) in run.calls


def test_what_is_not_yet_saved_or_measured_is(run, plain_end):
    run.saved_at = 3
    assert end(run, is_pending=True)[:3] == [("logged",), ("save", False), ("measured", 4)]


def test_a_run_whose_end_cannot_be_saved_has_not_ended(run, plain_end, monkeypatch):
    monkeypatch.setattr(finish, "forget_rescued", None)
    run.saves = iter([False])
    end(run)
    assert not run.state.finished


def test_an_adapter_that_was_rescued_before_goes(run, plain_end, monkeypatch):
    monkeypatch.setattr(finish, "forget_rescued", lambda path: [path / "old"])
    told = [call[1] for call in end(run) if call[0] == "events.note"]
    assert len(told) == 1 and f"{run.folder.path / 'old'} is removed" in told[0]


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("best_step", [0, 2])
@pytest.mark.cover("all")
def test_the_best_adapter_is_the_final_one_if_asked(run, plain_end, at_end, best_step):
    set_eval(run, load_best_model_at_end=at_end)
    run.best = BestAdapter(best_step, 1.5, 2.5, "lowest loss", BEST.parameters)
    calls = end(run)
    written = [call[1] for call in calls if call[0] == "write"]
    assert written == ([2.0, 1.0, 2.0] if at_end else [1.0])
    state = run.state
    found = (state.best_loss, state.best_figure, state.best_step)
    assert found == ((1.5, 2.5, best_step) if at_end else (None, None, -1))
    told = [call[1] for call in calls if call[0] == "events.warning"]
    assert len(told) == (at_end and best_step == 0)
    if told:
        assert "the final adapter is the initial one" in told[0]


@pytest.mark.parametrize(("loss", "step", "is_told"), [(1.0, 3, True), (1.0, 4, False),
                                                       (None, 3, False)])  # fmt: skip
@pytest.mark.cover("all")
def test_a_best_adapter_that_was_not_kept_is_told(run, plain_end, loss, step, is_told):
    set_eval(run, load_best_model_at_end=True)
    run.state.best_loss, run.state.best_step = loss, step
    told = [call[1] for call in end(run) if call[0] == "events.warning"]
    assert len(told) == is_told and all("was not kept" in text for text in told)


def test_an_adapter_that_cannot_be_written_is_rescued(run, plain_end, monkeypatch, tmp_path):
    def lost():
        raise CheckpointError("out is gone")

    run.folder.require_own = lost
    for place, told in ((tmp_path / "cache", "is in "), (None, "could not be saved anywhere")):
        monkeypatch.setattr(finish, "save_elsewhere", lambda path, save, to=place: to)
        with pytest.raises(CheckpointError, match=f"out is gone; the adapter after step 4 {told}"):
            finish._save_adapter(run)
    assert "tidy" not in names(run.calls)


@pytest.mark.parametrize(("saved_at", "saves", "is_told"), [(4, [], False), (3, [True], False),
                                                            (3, [False], True)])  # fmt: skip
@pytest.mark.cover("all")
def test_a_run_that_is_stopped_keeps_its_state_and_adapter(
    run, plain_end, saved_at, saves, is_told
):
    run.saved_at, run.saves = saved_at, iter(saves)
    if is_told:
        with pytest.raises(CheckpointError, match="was stopped after step 4, but its state could"):
            finish.interrupt(run)
    else:
        finish.interrupt(run)
    assert names(run.calls)[0] == "model.zero_gradient" and ("adapter", "adapter") in run.calls
    assert names(run.calls).count("save") == (saved_at != 4)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_run_that_has_ended_is_only_opened(run, plain_end, monkeypatch, damaged):
    def load(folder):
        if damaged:
            raise CheckpointError("damaged")

    monkeypatch.setattr(finish, "load_adapter", load)
    set_eval(run, load_best_model_at_end=True)
    run.best = BEST
    finish.reopen_finished(run)
    assert "is finished after 4 steps" in run.calls[0][1]
    assert (("adapter", "adapter") in run.calls) == damaged
    assert run.calls[-1] == ("write", 2.0)


@pytest.mark.parametrize("finished", [True, False])
def test_who_failed_at_the_end_is_told_where_the_run_is(run, finished):
    finish.check_ended(run, None)
    run.state.finished = finished
    failure = CallbackError("Mine.step failed")
    failure.__cause__ = ValueError("no")
    state = "finished, and its adapter is in" if finished else "saved after step 4, and resume"
    with pytest.raises(CallbackError, match=f"Mine.step failed; the run is {state}") as told:
        finish.check_ended(run, failure)
    assert told.value.__cause__ is failure.__cause__


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.cover("all")
def test_a_result_tells_how_a_run_ended(run, stopped, step):
    state = run.state
    state.step, state.eval_step, state.eval_loss, state.best_step = step, 8, 2.0, step - 4
    run.stop = SimpleNamespace(requested=stopped, number=15 if stopped else None)
    run.events = SimpleNamespace(stop_reason="enough")
    run.model.device = SimpleNamespace(memory=SimpleNamespace(peak=9))
    result = finish.result_of(run, was_finished=False)
    assert (result.steps, result.eval_loss) == (step, 2.0 if step == 8 else None)
    assert (result.interrupted, result.stopped_early) == (stopped, not stopped and step < 8)
    assert (result.stop_reason, result.stop_signal) == (("enough", 15) if stopped else (None, None))
    assert (result.best_step, result.metric_for_best_model) == (step - 4, "loss")
    state.best_step = -1
    assert finish.result_of(run, was_finished=True).best_step is None


@pytest.mark.parametrize("was_finished", [True, False])
@pytest.mark.parametrize("has_prompt", [True, False])
@pytest.mark.cover("all")
def test_the_prompt_of_a_finished_run_stays(monkeypatch, tmp_path, was_finished, has_prompt):
    told, saved = [], []
    if has_prompt:
        (tmp_path / finish.PROMPT_FORMAT).write_text("{}")
    result = SimpleNamespace(adapter_dir=tmp_path, was_finished=was_finished)
    observer = SimpleNamespace(warning=told.append)
    monkeypatch.setattr(finish, "save_prompt", lambda *given: saved.append(given[-1]))
    finish.keep_prompt(None, Path(), None, result, observer)
    assert saved == [tmp_path] * (not (was_finished and has_prompt)) and not told

    def failing(*given):
        raise CheckpointError("no room")

    monkeypatch.setattr(finish, "save_prompt", failing)
    result.was_finished = False
    finish.keep_prompt(None, Path(), None, result, observer)
    assert told == ["the adapter was saved, but its prompt format was not: no room"]


def test_adapters_are_rescued_where_there_is_room_and_go_with_their_run(monkeypatch, tmp_path):
    places = [tmp_path / name for name in ("none", "full", "free", "last")]
    for place in places[1:]:
        place.mkdir()
    monkeypatch.setattr(finish, "_PLACES", tuple(lambda place=place: place for place in places))
    run = tmp_path / "out*"

    def save(folder):
        if folder.parent.name == "full":
            raise CheckpointError("no room")
        (folder / "adapter").write_text("adapter")

    saved = finish.save_elsewhere(run, save)
    assert saved.parent.name == "free" and (saved / "adapter").read_text() == "adapter"
    other = finish.save_elsewhere(tmp_path / "more" / "out*", save)
    unlike = finish.save_elsewhere(tmp_path / "outside", save)
    assert finish.forget_rescued(run) == [saved] and not saved.exists()
    assert other.exists() and unlike.exists() and finish.forget_rescued(run) == []
    monkeypatch.setattr(finish.os, "getuid", lambda: -1)
    assert finish.forget_rescued(tmp_path / "outside") == [] and unlike.exists()
    monkeypatch.setattr(finish, "_PLACES", (lambda: places[0],))
    assert finish.save_elsewhere(run, save) is None


# ---- evaluations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "total", "steps"),
    [(0, 9, 0), (1, 9, 1), (7.0, 9, 7), (0.5, 9, 4), (0.25, 8, 2), (0.01, 9, 1), (0.99, 100, 99)],
)
def test_evaluations_come_after_so_many_steps_or_a_share_of_them(asked, total, steps):
    assert steps_between(asked, total) == steps and isinstance(steps_between(asked, total), int)


def test_evaluations_are_due_where_there_is_something_to_measure(run):
    set_eval(run, eval_steps=3)
    run.state.eval_step = 4
    none = Evaluator(run)
    assert not none.is_due(3) and not none.is_pending and none.measure(3) is None
    run.held_out = "rows"
    some = Evaluator(run)
    assert [step for step in range(1, 9) if some.is_due(step)] == [3, 6]
    assert not some.is_pending
    run.state.eval_step = 3
    assert some.is_pending
    set_eval(run, eval_steps=0)
    assert not Evaluator(run).is_due(4)


@pytest.mark.parametrize(
    ("patience", "without", "aim", "stalled"),
    [(None, 9, "lowest loss", False), (3, 3, "lowest loss", True), (3, 2, "lowest loss", False),
     (3, 4, "lowest loss", True), (3, 4, "highest f", False)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_a_run_stalls_after_as_many_evaluations_as_it_has_patience(
    run, patience, without, aim, stalled
):
    set_eval(run, early_stopping_patience=patience)
    run.state.without_gain, run.state.aim = without, aim
    assert Evaluator(run).has_stalled == stalled


def measured(run, monkeypatch, step=4, loss=6.0, tokens=4.0, correct=1.0):
    run.held_out = "rows"
    sums = SimpleNamespace(loss=loss, tokens=tokens, correct=correct)
    asked = []
    monkeypatch.setattr(evaluation, "held_out_loss", lambda *how: asked.append(how) or sums)
    found = Evaluator(run).measure(step)
    assert asked[0][:2] == (None, "rows") and asked[0][3] == 64
    return found


def test_an_evaluation_is_logged_and_the_best_is_kept(run, monkeypatch):
    run.keeps_best = True
    assert measured(run, monkeypatch) == 1.5
    row = {"step": 4, "eval_loss": 1.5, "eval_mean_token_accuracy": 0.25}
    assert ("log.append", row) in run.calls and run.calls[-1] == ("row", row)
    assert (run.best.step, run.best.loss, run.best.metric) == (4, 1.5, 1.5)
    assert run.best.parameters.tolist() == LAST.tolist() and run.best.parameters is not LAST
    assert ("save best",) in run.calls and ("events.activity", "") in run.calls
    assert measured(run, monkeypatch, step=5, loss=7.0) == 1.75 and run.best.step == 4
    run.keeps_best = False
    assert measured(run, monkeypatch, step=6, loss=1.0) == 0.25 and run.best.step == 4
    assert run.state.best_step == 6


def test_a_best_adapter_that_cannot_be_written_stays_in_memory(run, monkeypatch):
    def full():
        raise CheckpointError("no room")

    run.keeps_best, run.save_best = True, full
    measured(run, monkeypatch)
    told = [call[1] for call in run.calls if call[0] == "events.warning"]
    assert run.best.step == 4 and "is in memory only: no room" in told[0]


def test_another_metric_may_say_what_is_best(run, monkeypatch):
    set_eval(run, metric_for_best_model="mean_token_accuracy")
    run.keeps_best = True
    measured(run, monkeypatch)
    assert (run.best.loss, run.best.metric) == (1.5, 0.25)
    asked = SimpleNamespace(**{**dict(run.config.eval), "metric_for_best_model": "f1"})
    run.config = SimpleNamespace(eval=asked, train=run.config.train)
    with pytest.raises(ConfigError, match=r"f1 is not a metric .*: it has loss, mean_token_acc"):
        measured(run, monkeypatch)


@pytest.mark.parametrize(
    ("step", "told"), [(0, "at start: the held-out loss"), (1, "^the held-out .* after step 1")]
)
def test_a_loss_that_is_no_number_ends_the_run(run, monkeypatch, step, told):
    with pytest.raises(QLoRAError, match=told):
        measured(run, monkeypatch, step=step, loss=math.nan)
    assert "log.append" not in names(run.calls)


def test_a_figure_that_is_no_number_ends_the_run(run, monkeypatch):
    set_eval(run, metric_for_best_model="mean_token_accuracy")
    with pytest.raises(QLoRAError, match="the held-out mean_token_accuracy is not finite after"):
        measured(run, monkeypatch, correct=math.inf)


@pytest.mark.parametrize(("reward", "found"), [(2.0, {"eval_loss": -2.0, "eval_reward": 2.0}),
                                               (math.nan, None)])  # fmt: skip
def test_rewards_are_losses_below_zero(run, reward, found):
    run.held_out = "rows"
    run.rollouts = SimpleNamespace(evaluate=lambda step: {"reward": reward, "other": math.inf})
    if found is None:
        with pytest.raises(QLoRAError, match="no reward function gives a reward"):
            Evaluator(run).measure(4)
    else:
        assert Evaluator(run).measure(4) == -2.0
        assert run.calls[-1] == ("row", {"step": 4, **found})


@pytest.mark.parametrize(
    ("step", "fell", "told"), [(3, True, 1), (3, False, 0), (4, True, 0), (0, True, 0)]
)
@pytest.mark.cover("all")
def test_a_plateau_is_followed_where_evaluations_are_due(run, monkeypatch, step, fell, told):
    class Plateau:
        rate = 0.5

        def measured(self, metric, optim, *, more_is_better):
            assert metric == 1.5 and more_is_better is False
            self.rate = 0.25
            return fell

    set_eval(run, eval_steps=3)
    run.state.plateau = Plateau()
    measured(run, monkeypatch, step=step)
    notes = [call[1] for call in run.calls if call[0] == "events.note"]
    assert len(notes) == told and (run.state.plateau.rate == 0.5) == (step in (0, 4))
    assert all(note.endswith("the learning rate is reduced from 0.5 to 0.25") for note in notes)


def test_a_plateau_in_words():
    settings = Config.model_validate({"model": {"path": "m"}}).eval
    assert plateau_message(settings) == "the held-out loss no longer falls"
    for more, word in ((True, "rises"), (False, "falls")):
        named = settings.model_copy(
            update={"metric_for_best_model": "f1", "greater_is_better": more}
        )
        assert plateau_message(named) == f"the held-out f1 no longer {word}"


# ---- sample texts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "due"), [(2, [2, 4, 6, 8]), (0, []), (0.5, [4, 8]), ("at evaluations", [3, 6])]
)
def test_texts_are_due_by_themselves_or_with_evaluations(run, every, due):
    given = evaluation.AT_EVALUATIONS if isinstance(every, str) else every
    set_eval(run, sample_steps=given)
    evaluator = SimpleNamespace(is_due=lambda step: step % 3 == 0)
    texts = SampleLogger(run, SimpleNamespace(first=()), evaluator)
    assert [step for step in range(1, 9) if texts.is_due(step)] == due
    none = SampleLogger(run, None, evaluator)
    assert not any(none.is_due(step) for step in range(1, 9)) and none.keep_first() is None


@pytest.mark.parametrize("stops", [True, False])
def test_texts_are_logged_together_or_not_at_all(run, monkeypatch, stops):
    logged = []
    monkeypatch.setattr(
        evaluation, "log_texts", lambda log, step, made: logged.append((step, made))
    )

    def write():
        for number in range(3):
            run.stop.requested = stops and number == 1
            yield number

    texts = SampleLogger(run, SimpleNamespace(first=[7], write=write), None)
    texts.keep_first()
    texts.write(4)
    assert logged == ([(0, [7])] if stops else [(0, [7]), (4, [0, 1, 2])])
    activities = [call[1] for call in run.calls if call[0] == "events.activity"]
    assert activities == ["generating samples", ""]
