"""Held-out data of a run: splits of a folder, rows that are split off, and what is told of them."""

import json
from copy import deepcopy

import pytest
from click.testing import CliRunner

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import cli, load_config, runs
from qlora_wgpu.data import rows_in_both
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs.data import read_run_data
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.training import Observer
from qlora_wgpu.training.data import warn_of_other_split

CONFIG = """\
model: {path: model}
lora: {r: 2, lora_alpha: 4}
data: {train: chats, max_seq_length: 64}
train: {max_steps: 1, gradient_accumulation_steps: 1}
output: {save_steps: 1}
device: {tune: never}
"""


class Warned(Observer):
    def __init__(self):
        self.texts = []

    def warning(self, text):
        self.texts.append(text)

    def about(self, words):
        return [text for text in self.texts if words in text]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held-out")
    write_model(folder / "model")
    (folder / "chats").mkdir()
    write_chats(folder / "chats" / "train.jsonl")
    write_chats(folder / "chats" / "valid.jsonl", 6, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def prepared(place, *overrides, held_out=False):
    warned = Warned()
    data = runs.prepare(place / "run.yaml", warned, held_out=held_out, overrides=overrides)
    return data.dataset, warned


@pytest.mark.quick
def test_a_folder_of_splits_is_not_read_whole(place, monkeypatch):
    monkeypatch.chdir(place)
    dataset, warned = prepared(place)
    assert dataset.counts.rows == 24
    assert warned.about(
        "files of other splits are not trained on: valid.jsonl; data.eval: chats:validation"
    )
    dataset, warned = prepared(place, f"data.eval={place / 'chats'}", held_out=True)
    assert dataset.counts.rows == 6 and not warned.about("by their names")
    assert not prepared(place, f"data.eval={place / 'chats'}")[1].about("by their names")


def test_rows_that_are_split_off_are_the_same_for_training_resuming_and_measuring(place):
    overrides = ["data.eval_split=0.25", f"output.dir={place / 'run'}"]
    train, held_out = (prepared(place, *overrides, held_out=h)[0] for h in (False, True))
    assert (len(train), len(held_out)) == (18, 6) and rows_in_both(train, held_out) == 0
    yaml = place / "run.yaml"
    done = qlora_wgpu.train(yaml, overrides=overrides)
    warned = Warned()
    measured = qlora_wgpu.evaluate(yaml, warned, overrides=overrides)
    assert not warned.about("holds out other rows")
    assert measured.adapter.loss == pytest.approx(done.eval_loss, abs=1e-6)
    assert measured.adapter.tokens == held_out.num_label_tokens
    rest = runs.prepare(place / "run" / "config.yaml", held_out=True).dataset
    assert rest.fingerprint == held_out.fingerprint
    with pytest.raises(ConfigError, match=r"data\.eval_split = 0\.25, now it is 0\.5"):
        qlora_wgpu.train(yaml, overrides=[*overrides, "data.eval_split=0.5"], resume=True)
    qlora_wgpu.train(yaml, overrides=overrides, resume=True)
    others, _ = prepared(place, *overrides, "train.seed=5", held_out=True)
    warn_of_other_split(str(place / "run" / "adapter"), others, warned)
    assert warned.about("holds out other rows than when the adapter was trained")


def told_of_a_run(place, *overrides):
    warned = Warned()
    settings = load_config(place / "run.yaml", overrides)
    read_run_data(settings, OpenedModel.open(str(place / "model")), warned)
    return warned


@pytest.mark.quick
def test_rows_that_are_learnt_and_measured_are_told(place):
    lines = (place / "chats" / "train.jsonl").read_text().splitlines(keepends=True)
    others = (place / "chats" / "valid.jsonl").read_text().replace("what is", "name")
    (place / "both.jsonl").write_text("".join(lines[:2]) + others)
    warned = told_of_a_run(place, f"data.eval={place / 'both.jsonl'}")
    assert warned.about("2 of 8 rows of data.eval are also in data.train")
    warned = told_of_a_run(place, f"data.eval={place / 'chats:train'}")
    assert warned.about("all rows of data.eval are also in data.train")


@pytest.mark.quick
def test_pairs_that_are_learnt_and_measured_are_told(place):
    """Each is two examples, and one row."""
    pairs = [{"prompt": f"{i}?", "chosen": f"{i}.", "rejected": "no"} for i in range(6)]
    for name, rows in (("pairs", pairs), ("some", [*pairs[:2], pairs[0] | {"prompt": "new?"}])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (place / f"{name}.jsonl").write_text(text)
    given = "train.objective=dpo", f"data.train={place / 'pairs.jsonl'}"
    warned = told_of_a_run(place, *given, f"data.eval={place / 'some.jsonl'}")
    assert warned.about("2 of 3 rows of data.eval are also in data.train")
    warned = told_of_a_run(place, *given, f"data.eval={place / 'pairs.jsonl'}")
    assert warned.about("all rows of data.eval are also in data.train")


@pytest.mark.quick
def test_windows_that_are_learnt_and_measured_are_told(place):
    """Two texts that differ may begin alike."""
    texts = [f"{i % 2}" * 15 + "abcd"[i] for i in range(4)]
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    given = [
        f"data.train={place / 'texts.jsonl'}", "data.truncation=windows", "data.eval_split=1",
        "data.max_seq_length=8",
    ]  # fmt: skip
    warned = told_of_a_run(place, *given)
    assert warned.about(
        "1 of the 2 windows that data.eval_split holds out are also in other documents"
    )
    assert not told_of_a_run(place, *given[:-1], "data.max_seq_length=64").about("are also in")


@pytest.mark.quick
def test_rows_beyond_the_model_are_told(place):
    text = json.dumps({"text": "a b c d e f " * 30}) + "\n"
    (place / "long.jsonl").write_text(text + '{"text": "ab"}\n')
    overrides = [f"data.train={place / 'long.jsonl'}", "data.max_seq_length=512"]
    assert prepared(place, *overrides)[1].about(
        "1 of 2 rows are longer than the model's maximum of 256 tokens"
    )
    assert not prepared(place, *overrides, "data.max_seq_length=256")[1].about("maximum of")


@pytest.mark.quick
def test_no_held_out_data_names_both_ways(place):
    with pytest.raises(ConfigError, match=r"data\.eval is not set: .* data\.eval_split"):
        prepared(place, held_out=True)


@pytest.mark.quick
def test_data_counts_what_it_holds_out_and_pads_no_lines_of_a_pipe(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = CliRunner().invoke(deepcopy(cli.commands), ["data", "run.yaml", "data.eval_split=0.25"])
    assert shown.exit_code == 0, shown.output
    assert "24 read, 18 used, 6 held out" in shown.output
    assert max(map(len, shown.output.splitlines())) < 300
    shown = CliRunner().invoke(
        deepcopy(cli.commands), ["data", "run.yaml", "data.eval_split=0.25", "--eval"]
    )
    assert "6 read, 6 used" in shown.output and "used, " not in shown.output
