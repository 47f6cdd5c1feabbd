"""Texts that are written while a run goes on: when, where they are kept, and that nothing else is
changed by them."""

import json

import pytest
from support.observing import observed

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import Trainer
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training import Observer

PROMPTS = ["what is cat", "name dog"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 4, seed=1)
    return folder


class Told(Observer):
    """Keeps what is written, and stops after a step."""

    def __init__(self, last=99):
        self.steps, self.last = [], last

    def written(self, step, texts):
        self.steps.append(step)

    def step(self, row):
        if row["step"] == self.last:
            self.stop_run()


def settings_of(place, name):
    return {
        "model": {"path": str(place / "model")},
        "lora": {"r": 4, "lora_dropout": 0.1},
        "data": {"train": str(place / "train.jsonl"), "eval": str(place / "eval.jsonl"),
                 "max_seq_length": 64},
        "train": {"max_steps": 6, "gradient_accumulation_steps": 1},
        "eval": {"eval_steps": 3, "sample_max_new_tokens": 3},
        "output": {"dir": str(place / name), "save_steps": 2},
        "device": {"tune": "never"},
    }  # fmt: skip


def train(place, name, observer=None, **settings):
    config = settings_of(place, name)
    return qlora_wgpu.train(config, callbacks=observed(observer), quiet=True, **settings)


def rows(place, name):
    lines = (place / name / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def adapter(result):
    return (result.adapter_dir / "adapter_model.safetensors").read_bytes()


def test_they_come_when_they_are_asked_for_and_change_nothing(place):
    plain, told = train(place, "plain"), Told()
    own = {"sample_prompts": PROMPTS, "sample_steps": 2}
    result = train(place, "own", told, **own)
    assert adapter(result) == adapter(plain)
    assert told.steps == [2, 4]
    written = rows(place, "own")
    assert [row["step"] for row in written] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert all(PROMPTS[i % 2] in row["prompt"] for i, row in enumerate(written))
    assert [(s.before, s.after) for s in result.samples] == [
        (before["text"], after["text"])
        for before, after in zip(written[:2], written[-2:], strict=True)
    ]
    page = (place / "own" / "report.html").read_text()
    assert [f"<dt>after step {n}<" in page for n in (2, 4, 6)] == [True, True, False]
    assert {row["step"] for row in rows(place, "plain")} == {0, 6}

    stopped = train(place, "stopped", Told(last=4), **own)
    assert stopped.interrupted and {row["step"] for row in rows(place, "stopped")} == {0, 2, 4}
    torn = place / "stopped" / "checkpoints" / "step-4" / "manifest.json"
    torn.write_text("")  # so that the fourth step is done again
    gone_on = train(place, "stopped", resume=True, **own)
    assert adapter(gone_on) == adapter(plain) and rows(place, "stopped") == written


def test_with_each_evaluation(place):
    told = Told()
    train(place, "evaluated", told, sample_prompts=PROMPTS[:1], sample_steps="eval")
    assert told.steps == [3]


def test_wrong_settings(place):
    with pytest.raises(ConfigError, match=r"prompt 2 has [\d,]+ tokens; with the 3 of an"):
        train(place, "long", sample_prompts=["short", "long " * 5000])
    with pytest.raises(ConfigError, match="eval for every evaluation"):
        train(place, "steps", sample_steps="often")


def test_a_trainer_says_that_it_writes_none(place):
    notes = []

    class Notes(Observer):
        def note(self, text):
            notes.append(text)

    own = settings_of(place, "own rows")
    own["eval"]["sample_steps"], own["train"]["max_steps"] = 2, 1
    config = qlora_wgpu.Config(**own)
    with qlora_wgpu.QLoRAModel.from_pretrained(place / "model", config.lora) as model:
        Trainer(model, config, callbacks=observed(Notes())).train()
    assert "are ignored by a Trainer" in notes[0]
