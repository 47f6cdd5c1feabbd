"""``init``: what it makes of long chats, of documents, and of names."""

import json
import os

import pytest
import yaml
from click.testing import CliRunner
from e2e.tiny import write_model

from qlora_wgpu import load_config
from qlora_wgpu.cli.init import init
from qlora_wgpu.data import PreprocessConfig, Tokenizer, load_dataset
from qlora_wgpu.errors import ConfigError, on_command_line
from qlora_wgpu.runs.recommend import MemoryBudget, recommend_config
from qlora_wgpu.runs.workload import DeviceSpec


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init")
    write_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "long").mkdir()
    for file in (folder / "model").glob("*.json"):
        (folder / "long" / file.name).write_bytes(file.read_bytes())
    config["max_position_embeddings"] = 16384
    (folder / "long" / "config.json").write_text(json.dumps(config))
    return folder


def fitted(place, model, data, out="run.yaml", more=()):
    args = ["--model", place / model, "--data", place / data, "--out", place / out, "--overwrite"]
    done = CliRunner().invoke(init, [*map(str, args), *more])
    assert done.exit_code == 0, done.output
    text = (place / out).read_text()
    return text, yaml.safe_load(text)["data"]


def used(place, model, data):
    how = PreprocessConfig(data["max_seq_length"], truncation=data.get("truncation", "keep_start"))
    tokenizer = Tokenizer.from_folder(place / model)
    return load_dataset(data["train"], tokenizer, data["max_seq_length"], how=how)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "length"), [("long", 8192), ("model", 256)])
def test_long_chats_are_not_cut_to_what_teaches_nothing(place, model, length):
    chat = [{"role": "user", "content": "a " * 2500}, {"role": "assistant", "content": "b"}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    text, data = fitted(place, model, "chats.jsonl")
    assert data["max_seq_length"] == length and "on 4 rows of" in text
    assert ("truncation" in data) == (model == "model")
    dataset = used(place, model, data)
    assert len(dataset) == 4 and dataset.num_label_tokens >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["bad", "good"], {"objective": "classification"}),
        ([0.5, 2.0], {"objective": "classification", "problem_type": "regression"}),
        (
            [["a"], ["a", "b"]],
            {"objective": "classification", "problem_type": "multi_label_classification"},
        ),
        (["bad", "bad"], {}),
        (["bad", 3], {}),
    ],
)
def test_rows_with_labels_are_for_a_classifier(place, labels, expected):
    rows = [{"review": "a film", "label": label} for label in labels for _ in range(4)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, data = fitted(place, "model", "rows.jsonl", more=["--columns", "text=review"])
    train = yaml.safe_load(text)["train"]
    kept = {key: train[key] for key in ("objective", "problem_type") if key in train}
    assert kept == expected and (data["packing"] is False or not expected)
    load_config(place / "run.yaml")


def test_documents_are_cut_into_windows(place):
    (place / "long.txt").write_text("the quick brown fox. " * 1000)
    text, data = fitted(place, "long", "long.txt")
    assert data["max_seq_length"] == 1024 and "truncation" not in data
    assert f"on {len(used(place, 'long', data))} rows of" in text


@pytest.mark.slow
@pytest.mark.parametrize(("repeats", "length"), [(400, 1024), (4, 128)])
def test_long_texts_of_rows_are_cut_into_windows(place, repeats, length):
    """A row in fifty is longer than the rest, or all are longer than what a step should have."""
    rows = [{"text": "the quick brown fox. " * repeats}] * 98
    rows += [{"text": "the quick brown fox. " * 4 * repeats}]
    (place / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, data = fitted(place, "long", "texts.jsonl")
    dataset = used(place, "long", data)
    assert (data["truncation"], dataset.counts.truncated) == ("windows", 0)
    assert data["max_seq_length"] == length or data["packing"]
    assert f"on {len(dataset):,} rows of" in text
    (place / "short.jsonl").write_text('{"text": "ab"}\n')
    assert "truncation" not in fitted(place, "long", "short.jsonl")[1]


@pytest.mark.parametrize(
    ("names", "held_out"), [(("train", "valid"), True), (("train", "test"), False)]
)
def test_a_folder_with_validation_data_is_measured_on(place, names, held_out):
    folder = place / "-".join(names)
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    _, data = fitted(place, "model", folder.name)
    assert data["train"] == str(folder) and data.get("eval") == (str(folder) if held_out else None)


def test_a_name_that_looks_like_an_option(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "rows.jsonl").write_text('{"text": "once upon a time"}\n' * 3)
    args = ["--model", "model", "--data", "rows.jsonl", "--out", "-r.yaml"]
    done = CliRunner().invoke(init, args)
    assert "train with `qlora-wgpu train ./-r.yaml`" in done.output


def test_a_name_cannot_write_into_the_file(place):
    name = os.fsdecode("a\nlora: {r: 9}\n#\x1b[2J\u202e.jsonl".encode())
    (place / name).write_text('{"text": "abc"}\n')
    text, data = fitted(place, "model", name)
    assert data["train"] == str(place / name) and yaml.safe_load(text)["lora"]["r"] == 16
    assert "\x1b" not in text and "\u202e" not in text


def test_a_run_that_is_there_keeps_its_folder(place, monkeypatch):
    monkeypatch.chdir(place)
    row = {"text": "a text to learn"}
    (place / "few.jsonl").write_text(json.dumps(row) + "\n")
    for folder in ("runs/model", "runs/model-2"):
        fitted(place, "model", "few.jsonl")
        assert load_config(place / "run.yaml").output.dir == folder
        (place / folder).mkdir(parents=True)
        (place / folder / "metrics.jsonl").write_text("")


@pytest.mark.slow
def test_the_file_is_what_trains_and_says_why(place):
    hi = {"role": "user", "content": "hi"}
    answers = [{"role": "assistant", "content": "yes " * n} for n in range(1, 7)]
    rows = [{"messages": [hi, answer]} for answer in answers]
    (place / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 400))
    text, data = fitted(place, "model", "short.jsonl")
    settings = load_config(place / "run.yaml")
    assert data["packing"] is True and data["max_seq_length"] == 256
    train = settings.train
    assert not train.gradient_checkpointing and train.num_train_epochs == 2
    assert settings.optim.learning_rate == 5e-3
    for section in yaml.safe_load(text).values():
        assert isinstance(section, dict)
    reasons = ("share a row", "steps", "activations fit", "examples", "width 36", "memory")
    for reason in reasons:
        assert reason in text, reason
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.slow
def test_a_card_without_room_gets_checkpointing(place, monkeypatch):
    (place / "long.jsonl").write_text(
        (json.dumps({"prompt": "a " * 60, "completion": "b " * 60}) + "\n") * 2000
    )
    model, data = str(place / "model"), str(place / "long.jsonl")
    target, totals = DeviceSpec(), {}
    for room in (10**9, 2_100_000, 1000):
        _, settings = recommend_config(model, data, None, MemoryBudget(target, room, "it"))
        totals[room] = {setting.key: setting for setting in settings}
    checkpointing = [t["train.gradient_checkpointing"].value for t in totals.values()]
    rows = [t["train.per_device_train_batch_size"] for t in totals.values()]
    assert checkpointing == [False, True, True]
    assert rows[0].value > rows[1].value > rows[2].value == 1
    assert rows[1].why == "fits into it" and rows[2].why.startswith("needs more than it")


@pytest.mark.parametrize(("told", "is_bounded"), [(None, False), (1 << 30, True)])
def test_it_is_known_whether_training_will_know_the_memory(monkeypatch, told, is_bounded):
    monkeypatch.setattr("qlora_wgpu.gpu.memory.room", lambda device: told)
    assert MemoryBudget.here().is_bounded is is_bounded


@pytest.mark.slow
def test_a_card_that_tells_its_memory_keeps_as_many_layers_as_fit(place):
    (place / "long.jsonl").write_text(
        (json.dumps({"prompt": "a " * 60, "completion": "b " * 60}) + "\n") * 2000
    )
    told = MemoryBudget(DeviceSpec(), 2_100_000, "it", is_bounded=True)
    _, settings = recommend_config(str(place / "model"), str(place / "long.jsonl"), None, told)
    written = {setting.key: setting for setting in settings}
    checkpointing = written["train.gradient_checkpointing"]
    assert checkpointing.value is False and checkpointing.why.startswith("layers that fit are kept")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "plain"),
        ({"instruction": "a", "output": "b"}, None),
        ({"text": "a b"}, None),
    ],
)  # fmt: skip
def test_a_template_for_a_tokenizer_that_has_none(place, row, template):
    """It is one that the tokenizer knows, so that nothing is to be warned of."""
    write_model(place / "bare")
    config = place / "bare" / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (place / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    _, data = fitted(place, "bare", "rows.jsonl")
    assert data.get("chat_template") == template
    how = PreprocessConfig(256, data.get("chat_template"))
    dataset = load_dataset(data["train"], Tokenizer.from_folder(place / "bare"), 256, how=how)
    assert not dataset.warnings


def rows_of(place, name, rows):
    (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "objective"),
    [
        ({"prompt": "a b", "chosen": " c d", "rejected": " d"}, "dpo"),
        ({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]},
         "dpo"),
        ({"prompt": "a b", "completion": " c d", "label": True}, "kto"),
        ({"prompt": "a b", "completion": " c d"}, None),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "label": 1}, None),
    ],
)  # fmt: skip
def test_rows_that_compare_answers_get_their_objective(place, row, objective):
    name = rows_of(place, "answers.jsonl", [row] * 64)
    text, _ = fitted(place, "model", name)
    settings = load_config(place / "run.yaml")
    assert settings.train.objective == (objective or "sft")
    assert settings.optim.learning_rate == (5e-4 if objective else 5e-3)
    assert "on 64 rows of answers.jsonl" in text
    if objective:
        assert settings.data.packing is False and settings.train.beta == 0.1


@pytest.mark.parametrize(
    ("row", "named", "objective"),
    [
        ({"question": "a", "no": "b"}, {"prompt": "question", "completion": "no"}, "sft"),
        ({"ask": "a", "up": "b", "down": "c"},
         {"prompt": "ask", "chosen": "up", "rejected": "down"}, "dpo"),
    ],
)  # fmt: skip
def test_columns_of_other_names(place, row, named, objective):
    (place / "rows.jsonl").write_text((json.dumps(row) + "\n") * 3)
    given = [word for key, column in named.items() for word in ("--columns", f"{key}={column}")]
    _, data = fitted(place, "model", "rows.jsonl", more=given)
    assert data["columns"] == named
    assert load_config(place / "run.yaml").train.objective == objective


def test_columns_that_name_none(place):
    (place / "rows.jsonl").write_text(json.dumps({"a": "b"}) + "\n")
    args = ["--model", place / "model", "--data", place / "rows.jsonl", "--columns", "prompt"]
    done = CliRunner().invoke(init, [*map(str, args), "--out", str(place / "none.yaml")])
    assert "must be KEY=COLUMN" in str(done.exception)


@pytest.mark.full
def test_both_rows_of_a_pair_are_planned(place):
    words = "a " * 100
    pair = {"prompt": words, "chosen": f"{words}b", "rejected": f"{words}c"}
    judged = {"prompt": words, "completion": f"{words}b", "label": False}
    rows = {}
    for objective, row in (("dpo", pair), ("kto", judged)):
        data = str(place / rows_of(place, f"{objective}.jsonl", [row] * 2000))
        room = MemoryBudget(DeviceSpec(), 4_000_000, "it")
        _, settings = recommend_config(str(place / "model"), data, None, room)
        found = {setting.key: setting.value for setting in settings}
        rows[objective] = found["train.per_device_train_batch_size"]
    assert rows["kto"] >= 2 * rows["dpo"] > 0


def test_several_files_make_a_mixture(place):
    names = [rows_of(place, f"{n}.jsonl", [{"text": "a b c"}] * n) for n in (5, 9)]
    args = [x for name in names for x in ("--data", place / name)]
    args += ["--model", place / "model", "--out", place / "mixed.yaml", "--overwrite"]
    done = CliRunner().invoke(init, list(map(str, args)))
    assert done.exit_code == 0, done.output
    data = load_config(place / "mixed.yaml").data
    assert [source.path for source in data.sources] == [str(place / name) for name in names]
    assert (
        data.train is None
        and "on 14 rows of 5.jsonl and 9.jsonl" in (place / "mixed.yaml").read_text()
    )
    pairs = rows_of(place, "pairs.jsonl", [{"prompt": "a", "chosen": " b", "rejected": " c"}])
    refused = CliRunner().invoke(init, [*map(str, args), "--data", str(place / pairs)])
    assert "pairs.jsonl has rows for train.objective: dpo, but" in str(refused.exception)
    more = rows_of(place, "more.jsonl", [{"prompt": "b", "chosen": " d", "rejected": " e"}] * 3)
    args = [x for name in (pairs, more) for x in ("--data", place / name)]
    args += ["--model", place / "model", "--out", place / "mixed.yaml", "--overwrite"]
    done = CliRunner().invoke(init, list(map(str, args)))
    assert done.exit_code == 0, done.output
    mixed = load_config(place / "mixed.yaml")
    assert mixed.train.objective == "dpo" and len(mixed.data.sources) == 2


@pytest.mark.parametrize("option", ["--model", "--data", "--eval"])
def test_a_name_that_the_locale_cannot_read_is_refused(place, option):
    """A file's text has no half characters, which such a name's bytes become."""
    (place / "named.txt").write_text("the quick brown fox. " * 100)
    named = {"--model": place / "model", "--data": place / "named.txt"} | {
        option: place / "\udcc3\udca9.jsonl"
    }
    args = [str(part) for pair in named.items() for part in pair]
    with on_command_line("qlora-wgpu init"):
        done = CliRunner().invoke(init, [*args, "--out", str(place / "locale.yaml")])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"{option} ")
    assert "not valid text in this locale" in str(done.exception)
    assert not (place / "locale.yaml").exists()


def test_a_folder_of_mixed_rows_becomes_a_mixture_with_columns_by_file(place):
    folder = place / "mixed"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (folder / "b.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 4)
    named = ["--columns", "prompt=question", "--columns", "completion=answer"]
    text, data = fitted(place, "model", "mixed", more=named)
    assert data["sources"] == [
        {"path": str(folder / "a.jsonl")},
        {
            "path": str(folder / "b.jsonl"),
            "columns": {"prompt": "question", "completion": "answer"},
        },
    ]
    assert "on 8 rows of a.jsonl and b.jsonl" in text and "columns" not in data
    assert load_config(place / "run.yaml").data.sources is not None
