"""Runs from Python: settings, what is shown, rows of any format, observers that stop."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.observing import observed

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import QLoRAModel, Tokenizer, Trainer, TrainerCallback, load_config, load_dataset
from qlora_wgpu.api import _refuse_other_arguments
from qlora_wgpu.config.schema import sections
from qlora_wgpu.errors import CallbackError, ConfigError, DataError, DeviceLostError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.training import Observer

CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: eval.jsonl, max_seq_length: 64}
train: {max_steps: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
device: {tune: never}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 4, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def model(place):
    with QLoRAModel.from_pretrained(place / "model", lora=qlora_wgpu.LoraConfig(r=4)) as model:
        yield model


def test_it_shows_what_the_command_shows(place, tmp_path, capfd):
    result = qlora_wgpu.train(place / "run.yaml", dir=tmp_path / "run", max_steps=1)
    shown = capfd.readouterr().out.replace("\n", "")  # paths may be broken over lines
    assert result.steps == 1 and result.run_dir == tmp_path / "run"
    for part in ("device memory", "held-out loss", "step     1", "report.html"):
        assert part in shown, shown
    again = qlora_wgpu.train(
        place / "run.yaml", overwrite=True, quiet=True, output={"dir": tmp_path / "run"},
        **{"train.max_steps": 1},
    )  # fmt: skip
    assert again.eval_loss == result.eval_loss
    assert capfd.readouterr().out == ""


def test_messages_name_what_a_python_call_gives(place, tmp_path):
    out = {"dir": tmp_path / "run", "quiet": True, "max_steps": 1}
    qlora_wgpu.train(place / "run.yaml", **out)
    with pytest.raises(ConfigError, match=r"with resume=True .* or with overwrite=True"):
        qlora_wgpu.train(place / "run.yaml", **out)


def test_a_model_of_a_run_answers_as_it_was_trained(place, tmp_path):
    rows = [{"instruction": "say", "output": "one"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"train": tmp_path / "rows.jsonl", "eval": None, "max_steps": 1, "quiet": True}
    qlora_wgpu.train(place / "run.yaml", dir=tmp_path / "run", max_seq_length=256, **settings)
    message = [{"role": "user", "content": "say"}]
    with qlora_wgpu.open_adapter(tmp_path / "run") as model:
        assert model.prompts.kind == "alpaca"
        answer = model.generate(message, max_new_tokens=3)
        ids = model.prompts.ids(message)
        assert answer == model.tokenizer.decode(model.generate(ids, max_new_tokens=3)).lstrip()
    base = place / "model"
    with QLoRAModel.from_pretrained(base, adapter=tmp_path / "run" / "adapter") as model:
        assert (
            model.prompts.kind == "alpaca" and model.generate(message, max_new_tokens=3) == answer
        )
    with QLoRAModel.from_pretrained(base) as model:
        assert model.prompts.kind == "chat"


class Enough(TrainerCallback):
    """Stops at a step."""

    def __init__(self, at):
        self.at = at

    def on_log(self, step, logs):
        if logs["step"] == self.at:
            step.stop("that is enough")


@pytest.mark.parametrize("shown", [True, False])
def test_a_callback_stops_a_run_that_can_go_on(place, tmp_path, shown):
    settings = {"dir": tmp_path / "run", "max_steps": 6, "quiet": not shown, "eval": None}
    watch = Enough(at=2)
    stopped = qlora_wgpu.train(place / "run.yaml", callbacks=[watch], **settings)
    assert stopped.interrupted and stopped.stop_reason == "that is enough"
    assert 2 <= stopped.steps < 6
    assert (stopped.run_dir / "checkpoints" / f"step-{stopped.steps}").is_dir()
    whole = qlora_wgpu.train(place / "run.yaml", callbacks=[watch], resume=True, **settings)
    assert whole.steps == 6 and not whole.interrupted and whole.stop_reason is None
    straight = qlora_wgpu.train(place / "run.yaml", **{**settings, "dir": tmp_path / "straight"})
    assert adapter(whole.adapter_dir) == adapter(straight.adapter_dir)


def adapter(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def test_a_stop_that_comes_with_the_last_step_changes_nothing(place, tmp_path):
    result = qlora_wgpu.train(
        place / "run.yaml", callbacks=[Enough(at=2)], dir=tmp_path / "run", quiet=True
    )
    assert result.steps == 2 and not result.interrupted and result.stop_reason is None


CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": word}]}
    for word in ("one", "two", "three")
]
ANY_ROWS = {
    "chats": CHATS,
    "prompt": [{"prompt": "hi ", "completion": "one"}] * 3,
    "text": [{"text": "a text"}] * 3,
    "tokens": [{"input_ids": [4, 5, 6, 7]}] * 3,
}


@pytest.mark.parametrize("rows", ANY_ROWS.values(), ids=ANY_ROWS)
def test_a_trainer_takes_rows_of_any_format(place, model, tmp_path, rows):
    config = load_config(place / "run.yaml", {"dir": tmp_path / "run", "max_steps": 1})
    assert Trainer(model, config).train(rows, rows[:1]).eval_loss is not None


def test_a_trainer_takes_a_path_or_a_data_set(place, model, tmp_path):
    losses = []
    data = load_dataset(place / "train.jsonl", Tokenizer.from_folder(place / "model"), 64)
    assert load_dataset(place / "train.jsonl", place / "model", 64).fingerprint == data.fingerprint
    lines = (place / "train.jsonl").read_text().splitlines()
    for number, rows in enumerate((place / "train.jsonl", data, [json.loads(x) for x in lines])):
        config = load_config(place / "run.yaml", {"dir": tmp_path / str(number), "max_steps": 1})
        model.load_adapter({n: np.zeros_like(a) for n, a in model.adapter_state_dict().items()})
        losses.append(Trainer(model, config).train(rows).train_loss)
    assert losses[0] == losses[1] == losses[2]
    assert repr(data).startswith("Dataset(24 examples, ")


def losses_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("eval_loss")) for row in rows]


@pytest.mark.parametrize("held_out", [{}, {"eval": None, "eval_split": 0.25}])
def test_a_trainer_without_rows_does_what_a_run_does(place, tmp_path, held_out):
    given = {"data": held_out, "max_steps": 2}
    qlora_wgpu.train(place / "run.yaml", dir=tmp_path / "run", quiet=True, **given)
    config = load_config(place / "run.yaml", {"dir": tmp_path / "own", **given})
    with QLoRAModel.from_pretrained(place / "model", lora=config.lora) as own:
        assert Trainer(own, config).train().eval_loss is not None
    assert losses_of(tmp_path / "own") == losses_of(tmp_path / "run")
    kept = [
        {path.name for path in (tmp_path / run / "adapter").iterdir()} for run in ("own", "run")
    ]
    assert kept[0] == kept[1] and "prompt_format.json" in kept[0]


def test_a_trainer_holds_rows_of_its_own_out(place, model, tmp_path):
    given = {"dir": tmp_path / "run", "max_steps": 1, "data": {"eval": None, "eval_split": 1}}
    config = load_config(place / "run.yaml", given)
    assert Trainer(model, config).train(CHATS).eval_loss is not None


def test_a_trainer_writes_prompts_as_the_adapter_has_learnt_them(place, tmp_path):
    """The base knows no turns; the adapter was trained on some, and keeps them."""
    base = write_model(tmp_path / "base")
    tokens = json.loads((base / "tokenizer_config.json").read_text())
    template = tokens.pop("chat_template").replace("<|user|>", "U")
    (base / "tokenizer_config.json").write_text(json.dumps(tokens))
    given = {"model": {"path": str(base)}, "chat_template": template, "max_steps": 1}
    first = qlora_wgpu.train(place / "run.yaml", dir=tmp_path / "run", quiet=True, **given)
    with qlora_wgpu.open_adapter(first.run_dir) as adapted:
        given = {"dir": tmp_path / "more", "max_steps": 1}
        more = Trainer(adapted, load_config(place / "run.yaml", given)).train(CHATS)
    with qlora_wgpu.open_adapter(more.run_dir) as adapted:
        assert adapted.prompts.template.source == template


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "completion": "b"}, {"text": "c"}], r"train_dataset\[1\]: its format is"),
        ([{"question": "a"}], r"train_dataset\[0\]: a row must have"),
        ([{"text": "a"}, "b"], r"train_dataset\[1\] must be a mapping, got str"),
    ],
)
def test_rows_that_are_wrong_are_named(place, model, tmp_path, rows, message):
    config = load_config(place / "run.yaml", {"dir": tmp_path / "run"})
    with pytest.raises(DataError, match=message):
        Trainer(model, config).train(rows)


def test_the_spelling_of_paths_does_not_matter_to_resume(place, tmp_path, monkeypatch):
    """Relative paths, absolute ones and links name one run, from YAML or Python."""
    monkeypatch.chdir(place)
    template = Path("own.jinja")
    template.write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}")
    start = QLoRAModel.from_pretrained("model", lora=qlora_wgpu.LoraConfig(r=4, lora_alpha=8))
    start.save_adapter("begun")
    start.close()
    run = tmp_path / "run"
    settings = {"chat_template": "own.jinja", "init_from": "begun", "dir": str(run)}
    watch = {"quiet": True, "max_steps": 4, "save_steps": 1}
    qlora_wgpu.train("run.yaml", callbacks=[Enough(at=1)], **settings, **watch)
    mapping = {
        "model": {"path": "model"}, "lora": {"r": 4, "lora_alpha": 8, "init_from": "begun"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_seq_length": 64,
                 "chat_template": "./own.jinja"},
        "train": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
        "output": {"dir": os.path.relpath(run)}, "device": {"tune": "never"},
    }  # fmt: skip
    second = qlora_wgpu.train(mapping, callbacks=[Enough(at=2)], resume=True, **watch)
    assert 2 <= second.steps < 4
    for name in ("model", "begun", "own.jinja"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    moved = {"path": Path("model"), "chat_template": tmp_path / "own.jinja", "dir": "run"}
    last = qlora_wgpu.train(place / "run.yaml", resume=True, init_from="./begun", **moved, **watch)
    assert last.steps == 4
    with QLoRAModel.from_pretrained("model", adapter="begun") as other:
        values = other.adapter_state_dict()
        other.load_adapter({name: array + 1 for name, array in values.items()})
        other.save_adapter("other")
    with pytest.raises(ConfigError, match=r"started with other .*lora\.init_from"):
        qlora_wgpu.train(place / "run.yaml", resume=True, init_from="other", **moved, **watch)


def test_a_run_goes_on_by_its_folder_where_it_was_moved(place, tmp_path):
    """With the settings that it was started with, and its own model and data, or none."""
    for name in ("model", "train.jsonl", "eval.jsonl", "run.yaml"):
        copy = shutil.copytree if (place / name).is_dir() else shutil.copy
        (tmp_path / "project").mkdir(exist_ok=True)
        copy(place / name, tmp_path / "project" / name)
    settings = {"max_steps": 3, "learning_rate": 3e-3, "eval": None, "quiet": True}
    first = {"dir": tmp_path / "project" / "run", **settings}
    qlora_wgpu.train(tmp_path / "project" / "run.yaml", callbacks=[Enough(at=1)], **first)
    straight = {"dir": tmp_path / "straight", **settings}
    whole = qlora_wgpu.train(tmp_path / "project" / "run.yaml", **straight)

    moved = tmp_path / "elsewhere"
    (tmp_path / "project").rename(moved)
    rows = (moved / "train.jsonl").read_bytes()
    (moved / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"data\.train .*project/train\.jsonl, which does not"):
        qlora_wgpu.train(moved / "run", resume=True, quiet=True)
    write_chats(moved / "train.jsonl", seed=9)
    with pytest.raises(ConfigError, match=r"started with other training data \(data\.train was"):
        qlora_wgpu.train(moved / "run", resume=True, quiet=True)
    (moved / "train.jsonl").unlink()
    (moved / "renamed.jsonl").write_bytes(rows)
    last = qlora_wgpu.train(
        moved / "run", resume=True, quiet=True, data={"train": moved / "renamed.jsonl"}
    )
    assert last.steps == 3 and adapter(last.adapter_dir) == adapter(whole.adapter_dir)


def test_a_lost_device_leaves_the_last_checkpoint(place, tmp_path, monkeypatch):
    settings = {"dir": tmp_path / "run", "max_steps": 5, "save_steps": 2, "quiet": True}
    whole = qlora_wgpu.train(place / "run.yaml", **{**settings, "dir": tmp_path / "whole"})

    class Pulled(Observer):
        """The card is gone after a checkpoint: nothing can be handed to the driver any more."""

        def saved(self, folder):
            monkeypatch.setattr(Device, "submit", lost)

    def lost(self, *commands):
        with self.driver_call("submitting work"):
            raise RuntimeError("Parent device is lost")

    submit = Device.submit
    with pytest.raises(DeviceLostError, match=r"step-2 in .*run/checkpoints is kept: resume=T"):
        qlora_wgpu.train(place / "run.yaml", callbacks=observed(Pulled()), **settings)
    monkeypatch.setattr(Device, "submit", submit)
    result = qlora_wgpu.train(place / "run.yaml", resume=True, **settings)
    assert result.steps == 5 and adapter(result.adapter_dir) == adapter(whole.adapter_dir)


class StopsAt(Observer):
    """Stops in an event."""

    def __init__(self, event):
        setattr(self, event, lambda *details: self.stop_run(event))


@pytest.mark.parametrize("event", ["planned", "setup", "started"])
def test_a_stop_before_the_first_step_counts(place, tmp_path, event):
    watch = StopsAt(event)
    settings = {"dir": tmp_path / "run", "eval": None, "quiet": True}
    stopped = qlora_wgpu.train(place / "run.yaml", callbacks=observed(watch), **settings)
    assert stopped.steps == 0 and stopped.interrupted and stopped.stop_reason == event
    assert qlora_wgpu.train(place / "run.yaml", resume=True, **settings).steps == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "callbacks", "message"),
    [
        (None, [], "a configuration must be a Config, .* got None"),
        (3, [], "a configuration must be a Config, .* got 3"),
        ("run.yaml", [TrainerCallback], "callbacks must be a list of TrainerCallback objects"),
    ],
)
def test_arguments_of_another_kind_are_one_sentence(config, callbacks, message):
    with pytest.raises(ConfigError, match=message):
        qlora_wgpu.train(config, callbacks=callbacks)


@pytest.mark.quick
def test_settings_of_another_library_are_refused(place):
    with pytest.raises(ConfigError, match=r"lora must be a qlora_wgpu.LoraConfig, got dict"):
        QLoRAModel.from_pretrained(place / "model", lora={"r": 4})


@pytest.mark.quick
@pytest.mark.parametrize("prompt", [None, 5, b"text", {"role": "user", "content": "hi"}])
def test_a_prompt_of_another_kind_is_one_sentence(model, prompt):
    with pytest.raises(
        ConfigError, match="a prompt must be a string, a list of token ids, or a list of messages"
    ):
        model.generate(prompt)


def test_what_a_notebook_shows_is_a_line(place, tmp_path):
    result = qlora_wgpu.train(place / "run.yaml", dir=tmp_path / "run", max_steps=1, quiet=True)
    assert repr(result).startswith("TrainResult(1 step, ") and str(result.run_dir) in repr(result)
    shown = repr(qlora_wgpu.estimate(place / "run.yaml", seq=32))
    assert shown.startswith("Estimate(") and "2 x 32 tokens" in shown
    assert len(repr(result)) < 300 and len(shown) < 200


@pytest.mark.quick
@pytest.mark.parametrize("size", [{"seq": 0}, {"batch": -1}, {"rank": 1.5}, {"budget": "8GiB"}])
def test_sizes_of_an_estimate_are_checked(place, size):
    with pytest.raises(ConfigError, match=r"must be a positive"):
        qlora_wgpu.estimate(place / "run.yaml", **size)


def test_a_model_is_trained_again_in_the_same_folder(place, tmp_path):
    settings = load_config(place / "run.yaml", {"dir": tmp_path / "run", "max_steps": 1})
    rows = [{"prompt": "a b", "completion": "c d"}] * 4
    before = sorted(path.name for path in (place / "model").glob("tokenizer*"))
    with QLoRAModel.from_pretrained(place / "model", lora=qlora_wgpu.LoraConfig(r=4)) as own:
        for _ in range(3):
            result = Trainer(own, settings, overwrite=True).train(rows)
            assert sorted(path.name for path in result.adapter_dir.glob("tokenizer*")) == before

        class Fails(TrainerCallback):
            def on_train_begin(self, step):
                assert step.model.generate("a", max_new_tokens=1)
                raise ValueError("mine")

        with pytest.raises(CallbackError, match="mine"):
            Trainer(own, settings, callbacks=[Fails()], overwrite=True).train(rows)
        assert own.generate("a", max_new_tokens=1)
        Trainer(own, settings, overwrite=True).train(rows)


@pytest.mark.quick
def test_a_trainer_refuses_other_types(place, model):
    config = load_config(place / "run.yaml")
    for given in ("run.yaml", {"model": {"path": "m"}}, None):
        with pytest.raises(ConfigError, match="a Trainer requires a Config"):
            Trainer(model, given)
    with pytest.raises(ConfigError, match="a Trainer requires an open model"):
        Trainer("model", config)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("observer", "callbacks"), ("callback", "callbacks"), ("peft_config", "lora"),
        ("verbose", "quiet"), ("resume_from_checkpoint", "resume"), ("overwrit", "overwrite"),
    ],
)  # fmt: skip
def test_other_names_of_arguments_are_refused_with_ours(place, name, meant):
    with pytest.raises(ConfigError, match=f"unknown argument '{name}': did you mean '{meant}'"):
        qlora_wgpu.train(place / "run.yaml", **{name: True})


@pytest.mark.quick
def test_no_setting_is_taken_for_an_argument():
    for section, keys in sections().items():
        _refuse_other_arguments(dict.fromkeys((section, *keys, *(f"{section}.{k}" for k in keys))))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": "a"}, "seed must be an integer, got 'a'"),
        ({"gradient_dtype": "fp16"}, "gradient_dtype must be 'float32' or 'bfloat16', got 'fp16'"),
        ({"keep_dequantized": "yes"}, "keep_dequantized must be True, False or 'auto', got 'yes'"),
    ],
)
def test_arguments_of_from_pretrained_are_checked(place, arguments, message):
    with pytest.raises(ConfigError, match=message):
        QLoRAModel.from_pretrained(place / "model", **arguments)
