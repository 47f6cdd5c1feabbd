"""A run that is stopped anywhere and goes on is the run that was never stopped."""

import shutil
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from e2e.test_training import Warnings, config, metrics, opened, rows
from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, Trainer, load_config
from qlora_wgpu.errors import CheckpointError, ConfigError, TrainingError
from qlora_wgpu.training import Observer
from qlora_wgpu.training.divergence import Divergence

SETTINGS = {
    "train": {"num_train_epochs": 3, "max_steps": -1},
    "log": {"logging_steps": 2},
    "output": {"save_steps": 3, "save_total_limit": None},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


def run(folder, device, out, *, observer=None, resume=False, dataset=None, **sections):
    settings = config(folder, out, **{**SETTINGS, **sections})
    model = opened(folder, device, lora_dropout=0.1)
    dataset = rows() if dataset is None else dataset
    return Trainer(model, settings, observer, resume=resume).train(dataset, rows(4, seed=1))


def adapter(out):
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def logged(out):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics(out)]


@pytest.fixture(scope="module")
def whole(folder, device, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder, device, out).steps == 9
    return out


class Killed(BaseException):
    """Nothing that is watched for, as a power cut is not."""


class Kill(Observer):
    """Ends the process' work at once, as a power cut does, when a step's figures arrive."""

    def __init__(self, at):
        self.at = at

    def step(self, row):
        if row["step"] >= self.at:
            raise Killed


class Stop(Observer):
    """Sends a signal while a step's micro-batches are being submitted."""

    def __init__(self, number, block):
        self.number, self.left = number, block

    def count(self, accumulate):
        def counted(*args, **options):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(self.number)
            return accumulate(*args, **options)

        return counted


@pytest.mark.parametrize("at", [4, 6, 8])
@pytest.mark.parametrize("packing", [False, True])
def test_killed_and_resumed(folder, device, tmp_path, whole, at, packing):
    data = {"data": {"packing": packing}}
    train = {"train": {**SETTINGS["train"], "per_device_train_batch_size": 1}} if packing else {}
    reference = whole
    if packing:
        reference = tmp_path / "whole"
        run(folder, device, reference, **data, **train)
    with pytest.raises(Killed):
        run(folder, device, tmp_path / "r", observer=Kill(at), **data, **train)
    result = run(folder, device, tmp_path / "r", resume=True, **data, **train)
    assert adapter(tmp_path / "r") == adapter(reference)
    assert logged(tmp_path / "r") == logged(reference)
    assert result.eval_loss_before == metrics(reference)[0]["eval_loss"]


PLATEAU = {
    "optim": {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        # An improvement by half is none that a run has here: rates fall after the second and third.
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 0.5},
    },
    "eval": {"eval_steps": 2},
}


@pytest.mark.parametrize("at", [4, 5, 7])
def test_a_plateau_goes_on_with_what_it_knows(folder, device, tmp_path, at):
    run(folder, device, tmp_path / "whole", **PLATEAU)
    rates = [row["learning_rate"] for row in metrics(tmp_path / "whole") if "learning_rate" in row]
    assert rates == [1e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3]  # of steps 2, 4, 6, 8, 9
    with pytest.raises(Killed):
        run(folder, device, tmp_path / "r", observer=Kill(at), **PLATEAU)
    run(folder, device, tmp_path / "r", resume=True, **PLATEAU)
    assert adapter(tmp_path / "r") == adapter(tmp_path / "whole")
    assert logged(tmp_path / "r") == logged(tmp_path / "whole")


@pytest.mark.parametrize("every", [0, 2])
def test_a_plateau_needs_evaluations(folder, device, tmp_path, every):
    settings = config(folder, tmp_path / "r", **{**PLATEAU, "eval": {"eval_steps": every}})
    trainer = Trainer(opened(folder, device), settings)
    needed = "eval_steps above 0" if every == 0 else r"data\.eval or data\.eval_split"
    with pytest.raises(ConfigError, match=f"goes by held-out losses: set .*{needed}"):
        trainer.train(rows(), rows(4, seed=1) if every == 0 else None)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("block", [1, 4, 7, 12])  # of two a step: in the middle of some
def test_stopped_and_resumed(folder, device, tmp_path, whole, monkeypatch, number, block):
    stop = Stop(number, block)
    from qlora_wgpu import QLoRAModel

    original = QLoRAModel.accumulate
    monkeypatch.setattr(QLoRAModel, "accumulate", stop.count(original))
    before = signal.getsignal(number)
    first = run(folder, device, tmp_path / "r", observer=stop)
    monkeypatch.undo()
    assert first.interrupted and first.steps == block // 2 and signal.getsignal(number) is before
    second = run(folder, device, tmp_path / "r", resume=True)
    assert not second.interrupted and second.steps == 9
    assert adapter(tmp_path / "r") == adapter(whole)
    assert logged(tmp_path / "r") == logged(whole)


def test_a_thread_cannot_take_signals_and_trains_all_the_same(folder, device, tmp_path, whole):
    thread = threading.Thread(target=run, args=(folder, device, tmp_path / "r"))
    thread.start()
    thread.join()
    assert adapter(tmp_path / "r") == adapter(whole)


def test_a_damaged_checkpoint_is_passed_over(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    newest = tmp_path / "r" / "checkpoints" / "step-9"
    weights = newest / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert len(observer.texts) == 1 and observer.texts[0].startswith("step-9 is passed over")
    assert adapter(tmp_path / "r") == adapter(whole)
    for checkpoint in (tmp_path / "r" / "checkpoints").iterdir():
        (checkpoint / "trainer_state.json").write_text("{}x")
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded"):
        run(folder, device, tmp_path / "r", resume=True)


def test_another_run_is_not_continued(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    kept = logged(tmp_path / "r")
    with pytest.raises(ConfigError, match=r"optim.learning_rate = 0.01, now it is 0.02"):
        run(folder, device, tmp_path / "r", resume=True, optim={"learning_rate": 2e-2})
    with pytest.raises(ConfigError, match="other training data"):
        run(folder, device, tmp_path / "r", resume=True, dataset=rows(seed=5))
    assert logged(tmp_path / "r") == kept


def test_moments_of_8_bits_go_on(folder, device, tmp_path):
    lora = LoraConfig(r=80, lora_alpha=8, target_modules=["down_proj"])

    def run_8bit(name, observer=None, optimizer="paged_adamw_8bit", **kept):
        settings = config(
            folder, tmp_path / name, train={"max_steps": 3}, eval={"eval_steps": 0},
            optim={"name": optimizer}, output={"save_steps": 1, "save_total_limit": None},
        )  # fmt: skip
        model = QLoRAModel.from_pretrained(folder, lora, device=device)
        return Trainer(model, settings, observer, **kept).train(rows())

    run_8bit("whole")
    with pytest.raises(Killed):
        run_8bit("r", Kill(2))
    state = load_file(tmp_path / "r" / "checkpoints" / "step-1" / "optimizer.safetensors")
    layer = "base_model.model.model.layers.0.mlp.down_proj"
    codes, scales = (state[f"{part}.{layer}.lora_A.weight"] for part in ("state1", "absmax1"))
    assert codes.dtype == np.uint8 and codes.shape == (80 * 52,) and scales.shape == (17,)
    assert state[f"state2.{layer}.lora_B.weight"].dtype == np.float32  # 36 · 80 are few
    assert run_8bit("r", resume=True).steps == 3
    assert adapter(tmp_path / "r") == adapter(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"optim.name = 'adamw_8bit', now it is 'adamw': go on"):
        run_8bit("r", optimizer="adamw", resume=True)


def test_lions_moment_goes_on(folder, device, tmp_path):
    def run_lion(name, observer=None, **kept):
        settings = config(
            folder, tmp_path / name, train={"max_steps": 4}, eval={"eval_steps": 0},
            optim={"name": "paged_lion_32bit", "learning_rate": 1e-3, "weight_decay": 0.1},
            output={"save_steps": 1, "save_total_limit": None},
        )  # fmt: skip
        model = QLoRAModel.from_pretrained(folder, LoraConfig(r=3), device=device)
        return Trainer(model, settings, observer, **kept).train(rows())

    run_lion("whole")
    with pytest.raises(Killed):
        run_lion("r", Kill(2))
    state = load_file(tmp_path / "r" / "checkpoints" / "step-1" / "optimizer.safetensors")
    assert state and all(name.startswith("exp_avg.") for name in state)
    assert any(array.any() for array in state.values())
    assert run_lion("r", resume=True).steps == 4
    assert adapter(tmp_path / "r") == adapter(tmp_path / "whole")


def test_resume_where_there_is_nothing_begins(folder, device, tmp_path, whole):
    run(folder, device, tmp_path / "r", resume=True)
    assert adapter(tmp_path / "r") == adapter(whole)


def test_the_best_adapter_is_kept_and_no_gain_ends_the_run(folder, device, tmp_path):
    # A rate that soon does harm.
    settings = {
        "train": {"max_steps": 30},
        "optim": {"learning_rate": 5e-2, "lr_scheduler_type": "constant"},
        "eval": {
            "eval_steps": 2, "early_stopping_patience": 2, "load_best_model_at_end": True,
        },
    }  # fmt: skip
    result = run(folder, device, tmp_path / "r", **settings)
    held_out = {r["step"]: r["eval_loss"] for r in metrics(tmp_path / "r") if "eval_loss" in r}
    best = min(held_out, key=lambda step: held_out[step])
    assert (result.best_step, result.best_eval_loss) == (best, held_out[best])
    assert result.stopped_early and result.steps == best + 4
    again = opened(folder, device)
    again.load_adapter(tmp_path / "r" / "adapter")
    batches = [([r["input_ids"]], [r["labels"]], None) for r in rows(4, seed=1)]
    loss, count, _ = again.summed_loss(batches)
    assert loss / count == pytest.approx(held_out[best], abs=1e-4)


def test_a_loss_that_diverges_ends_the_run(folder, device, tmp_path, monkeypatch):
    watch = Divergence()
    assert not any(map(watch.diverged, [2.0, 2.2, 1.8, 2.0, 2.0, 9.0, *[3.6] * 3, 3.4, *[3.6] * 9]))
    assert watch.diverged(3.6)
    monkeypatch.setattr("qlora_wgpu.training.divergence._WORSE", -3.0)  # any loss is too high
    with pytest.raises(TrainingError, match=r"diverged: .* at step 10.*checkpoints.*learning_rate"):
        run(folder, device, tmp_path / "r", train={"max_steps": 20})
    kept = {p.name for p in (tmp_path / "r" / "checkpoints").iterdir()}
    assert kept == {"step-3", "step-6", "step-9"} and len(metrics(tmp_path / "r")) > 4


class Told(Warnings):
    def __init__(self):
        super().__init__()
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def files(out):
    return {
        str(p.relative_to(out)): p.read_bytes()
        for p in out.rglob("*")
        if p.is_file() and p.name not in (".lock", "config.yaml")
    }


def test_a_finished_run_is_left_as_it_is(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    observer = Told()
    result = run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert result.was_finished and result.steps == 9 and not result.interrupted
    assert observer.notes == [
        f"the run in {tmp_path / 'r'} is finished, after 9 steps: nothing is left to train"
    ]
    assert files(tmp_path / "r") == files(whole)
    shutil.rmtree(tmp_path / "r" / "adapter")
    run(folder, device, tmp_path / "r", resume=True)
    assert files(tmp_path / "r") == files(whole)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_goes_on_with_more_epochs(folder, device, tmp_path, schedule):
    """With a constant rate bit by bit as if that had been asked for from the first."""
    optim = {"learning_rate": 1e-2, "lr_scheduler_type": schedule}
    out, observer = tmp_path / "r", Told()

    def epochs(number):
        return {"train": {"num_train_epochs": number, "max_steps": -1}, "optim": optim}

    run(folder, device, tmp_path / "whole", **epochs(3))
    first = run(folder, device, out, **epochs(2))
    second = run(folder, device, out, observer=observer, resume=True, **epochs(3))
    assert (first.steps, second.steps) == (6, 9) and not second.was_finished
    assert (adapter(out) == adapter(tmp_path / "whole")) == (schedule == "constant")
    rates = [row["learning_rate"] for row in metrics(out) if "loss" in row]
    whole = [row["learning_rate"] for row in metrics(tmp_path / "whole") if "loss" in row]
    assert rates[-2:] == whole[-2:]
    [note] = observer.notes
    assert "has 9 steps now, where it had 6: after step 6" in note
    assert ("cosine, of 9 steps from the first" in note) == (schedule == "cosine")
    # All parts count.
    assert second.num_tokens == metrics(out)[-2]["num_tokens"] > first.num_tokens
    assert second.seconds > first.seconds > 0
    again = run(folder, device, out, resume=True, **epochs(3))
    assert again.was_finished and again.seconds == second.seconds
    with pytest.raises(ConfigError, match="has done 9 steps, more than the 6 of"):
        run(folder, device, out, resume=True, **epochs(2))


def test_a_run_shorter_than_save_steps_is_known_as_finished(folder, device, tmp_path):
    settings = {"train": {"max_steps": 2}, "output": {"save_steps": 50}}
    out = tmp_path / "r"
    run(folder, device, out, **settings)
    before = files(out)
    assert run(folder, device, out, resume=True, **settings).was_finished
    with pytest.raises(ConfigError, match=r"optim.learning_rate = 0.01, now it is 0.02"):
        run(folder, device, out, resume=True, optim={"learning_rate": 2e-2}, **settings)
    assert files(out) == before
    shutil.rmtree(out / "checkpoints")  # as older versions left it
    before = files(out)
    with pytest.raises(ConfigError, match="has an adapter, but no checkpoint to go on from"):
        run(folder, device, out, resume=True, **settings)
    (out / "config.yaml").rename(out / "else.yaml")
    with pytest.raises(ConfigError, match=r"without its config\.yaml"):
        run(folder, device, out, resume=True, **settings)
    assert {k: v for k, v in files(out).items() if k != "else.yaml"} == before


def test_all_steps_are_logged_and_the_rest_only_once(folder, device, tmp_path):
    settings = {"log": {"logging_steps": 4}, "eval": {"eval_steps": 4}}
    out, again = tmp_path / "whole", tmp_path / "r"
    run(folder, device, out, **settings)
    rows_of = [r["step"] for r in metrics(out) if "loss" in r]
    evaluated = [r["step"] for r in metrics(out) if "eval_loss" in r]
    assert rows_of == [4, 8, 9] and evaluated == [0, 4, 8, 9]

    class KillAtEnd(Observer):
        def evaluation(self, row):
            if row["step"] == 9:
                raise Killed

    with pytest.raises(Killed):
        run(folder, device, again, observer=KillAtEnd(), **settings)
    run(folder, device, again, resume=True, **settings)
    assert logged(again) == logged(out) and adapter(again) == adapter(out)


HARM = {
    "train": {"max_steps": 30},
    "optim": {"learning_rate": 5e-2, "lr_scheduler_type": "constant"},
    "eval": {"eval_steps": 2, "early_stopping_patience": 2},
}


def test_an_early_stopped_run_does_not_go_on(folder, device, tmp_path):
    out = tmp_path / "r"
    first = run(folder, device, out, **HARM)
    before = files(out)
    assert first.stopped_early
    for _ in range(2):
        again = run(folder, device, out, resume=True, **HARM)
        assert again.was_finished and again.stopped_early and again.steps == first.steps
    assert files(out) == before
    patient = {**HARM, "eval": {**HARM["eval"], "early_stopping_patience": 3}}
    longer = run(folder, device, out, resume=True, **patient)
    assert longer.steps == first.steps + 2 and longer.stopped_early


def test_the_adapter_of_step_0_may_be_the_best(folder, device, tmp_path):
    """Numbers go up in training, and down in what is held out."""
    held_out = [{"input_ids": row["input_ids"][::-1]} for row in rows(4, seed=1)]
    settings = config(
        folder,
        tmp_path / "r",
        optim={"learning_rate": 5e-2, "lr_scheduler_type": "constant"},
        eval={"eval_steps": 1, "load_best_model_at_end": True},
    )
    observer, model = Told(), opened(folder, device)
    fresh = model.adapter_state_dict()
    result = Trainer(model, settings, observer).train(rows(), held_out)
    assert result.best_step == 0 and result.best_eval_loss == result.eval_loss_before
    assert any("no evaluation was better than the one before" in text for text in observer.texts)
    kept = load_file(tmp_path / "r" / "adapter" / "adapter_model.safetensors")
    assert all((kept[name] == array).all() for name, array in fresh.items())


def test_a_best_adapter_that_cannot_be_written_is_tried_again(
    folder, device, tmp_path, monkeypatch
):
    from qlora_wgpu.training import run as run_module

    save, failures = run_module.save_best, []

    def full(folder, *args):
        if len(failures) < 2:  # when it is measured, and at the next checkpoint
            failures.append(folder)
            raise CheckpointError(f"{folder} cannot be written: No space left on device")
        return save(folder, *args)

    best = {"eval": {"eval_steps": 2, "load_best_model_at_end": True}, "output": {"save_steps": 1}}
    run(folder, device, tmp_path / "whole", **best)
    monkeypatch.setattr(run_module, "save_best", full)
    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, **best)
    assert len(failures) == 2 and "is in memory only" in observer.texts[0]
    assert "was not saved" in observer.texts[1]
    for name in ("adapter", "best"):
        path = f"{name}/adapter_model.safetensors"
        assert (tmp_path / "r" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()


def test_what_cannot_change_the_result_may_change(folder, device, tmp_path, whole):
    """Among it gradient checkpointing, whose bits are the same."""
    out = tmp_path / "r"
    with pytest.raises(Killed):
        run(folder, device, out, observer=Kill(4))
    model = opened(folder, device, lora_dropout=0.1)
    changed = {
        "data": {"cache": False},
        "train": {**SETTINGS["train"], "gradient_checkpointing": False},
        "eval": {"eval_steps": 0},
        "log": {"logging_steps": 1},
        "output": {"save_steps": 2},
    }
    settings = config(folder, out, **{**SETTINGS, **changed})
    Trainer(model, settings, resume=True).train(rows(), rows(4, seed=1))
    assert adapter(out) == adapter(whole)
    assert load_config(out / "config.yaml") == settings


def test_another_base_under_the_same_path_is_refused(folder, device, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    run(base, device, tmp_path / "r", resume=True)  # the same elsewhere is the same
    before = files(tmp_path / "r")
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] *= 1.01
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(ConfigError, match="begun with other base weights"):
        run(base, device, tmp_path / "r", resume=True)
    shutil.copytree(folder, base, dirs_exist_ok=True)
    text = (base / "config.json").read_text()
    (base / "config.json").write_text(text.replace("1e-05", "1e-06"))
    with pytest.raises(ConfigError, match=r"other values in the base's config\.json"):
        run(base, device, tmp_path / "r", resume=True)
    assert files(tmp_path / "r") == before


@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json"],
)
def test_files_of_another_step_are_noticed(folder, device, tmp_path, whole, name):
    shutil.copytree(whole, tmp_path / "r")
    checkpoints = tmp_path / "r" / "checkpoints"
    shutil.copy(checkpoints / "step-6" / name, checkpoints / "step-9" / name)
    observer = Warnings()
    run(folder, device, tmp_path / "r", observer=observer, resume=True)
    assert len(observer.texts) == 1 and observer.texts[0].startswith("step-9 is passed over")
    assert adapter(tmp_path / "r") == adapter(whole)
    assert logged(tmp_path / "r") == logged(whole)


def test_a_checkpoint_that_cannot_be_written_does_not_end_a_run(
    folder, device, tmp_path, whole, monkeypatch
):
    from qlora_wgpu.training import run as run_module

    save = run_module.save_checkpoint

    def full(folder, model, state, identity):
        if state.step in (3, 9):
            raise CheckpointError(f"{folder} cannot be written: No space left on device")
        save(folder, model, state, identity)

    monkeypatch.setattr(run_module, "save_checkpoint", full)
    observer = Warnings()
    out = tmp_path / "r"
    run(folder, device, out, observer=observer)
    assert [t.split(":")[0] for t in observer.texts] == [
        "the state after step 3 was not saved",
        "the state after step 9 was not saved",
        "the state after step 9 was not saved",
    ]
    assert "step-6 is kept" in observer.texts[-1]
    assert adapter(out) == adapter(whole)
    monkeypatch.undo()
    run(folder, device, out, resume=True)
    assert adapter(out) == adapter(whole) and logged(out) == logged(whole)


class Lose(Observer):
    """Takes the run's folder away after a step."""

    def __init__(self, out):
        self.out, self.texts = out, []

    def step(self, row):
        if row["step"] == 4:
            shutil.rmtree(self.out)

    def warning(self, text):
        self.texts.append(text)


def test_a_run_whose_folder_is_lost_saves_its_adapter_elsewhere(
    folder, device, tmp_path, whole, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    observer = Lose(tmp_path / "r")
    with pytest.raises(CheckpointError, match=r"removed or replaced; the adapter after step 9 is"):
        run(folder, device, tmp_path / "r", observer=observer)
    [saved] = (tmp_path / "cache" / "qlora-wgpu" / "rescued").iterdir()
    name = "adapter_model.safetensors"
    assert (saved / name).read_bytes() == (whole / "adapter" / name).read_bytes()
    assert not (tmp_path / "r").exists()
    assert sum("metrics.jsonl cannot be written" in text for text in observer.texts) == 1


def test_two_runs_do_not_share_a_folder(folder, device, tmp_path):
    class Second(Observer):
        refused = 0

        def step(self, row):
            for options in ({"overwrite": True}, {"resume": True}):
                settings = config(folder, tmp_path / "r", **SETTINGS)
                with pytest.raises(ConfigError, match="another run is writing"):
                    Trainer(model, settings, **options).train(rows(), rows(4, seed=1))
                self.refused += 1

    model, observer = opened(folder, device, lora_dropout=0.1), Second()
    run(folder, device, tmp_path / "r", observer=observer, train={"max_steps": 2})
    assert observer.refused == 2


def test_the_replaced_run_stays_until_the_new_one_has_a_checkpoint(
    folder, device, tmp_path, whole, monkeypatch
):
    shutil.copytree(whole, tmp_path / "r")
    settings = config(folder, tmp_path / "r", **SETTINGS)
    model = opened(folder, device, lora_dropout=0.1)
    with pytest.raises(Killed):
        Trainer(model, settings, Kill(2), overwrite=True).train(rows(), rows(4, seed=1))
    assert adapter(tmp_path / "r" / "replaced") == adapter(whole)
    with pytest.raises(Killed):
        Trainer(model, settings, Kill(4), overwrite=True).train(rows(), rows(4, seed=1))
    assert not (tmp_path / "r" / "replaced").exists()
