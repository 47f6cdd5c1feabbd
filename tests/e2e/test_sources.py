"""Runs on several sources: each read by its own format, counted, and gone on with bit by bit."""

import json

import pytest
from support.commands import run_here
from support.observing import observed

from e2e.tiny import write_chats, write_model
from qlora_wgpu import QLoRAModel, Trainer, load_config, train
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.training import Observer

pytestmark = pytest.mark.quick

CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data:
  max_seq_length: 64
  sources:
    - {path: chats.jsonl, weight: 3}
    - {path: pairs.jsonl, columns: {prompt: q, completion: a}, weight: 1}
train: {num_train_epochs: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
optim: {learning_rate: 1e-2}
device: {tune: never}
log: {logging_steps: 3}
output: {save_steps: 4}
"""


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    write_model(folder / "model")
    write_chats(folder / "chats.jsonl", 6)
    write_rows(folder / "pairs.jsonl", [{"q": f"{i} and 1?", "a": f" {i + 1}"} for i in range(9)])
    (folder / "run.yaml").write_text(CONFIG)
    return folder


class Notes(Observer):
    def __init__(self):
        self.notes, self.given = [], None

    def note(self, text):
        self.notes.append(text)

    def setup(self, setup):
        self.given = setup


class Killed(BaseException):
    """Nothing that is watched for, as a power cut is not."""


class Kill(Observer):
    def step(self, row):
        if row["step"] >= 6:
            raise Killed


def run(place, name, observer=None, *overrides, **options):
    changes = [f"output.dir={place / name}", *overrides]
    return train(place / "run.yaml", callbacks=observed(observer), overrides=changes, **options)


def logged(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def adapter(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_mixture_is_told_logged_and_gone_on_with(place):
    notes = Notes()
    run(place, "whole", notes)
    assert [(s.name, s.rows, s.of) for s in notes.given.sources] == [
        ("chats.jsonl", 6, 6),
        ("pairs.jsonl", 2, 9),
    ]
    rows = logged(place / "whole")
    assert sum(rows[0]["sources"].values()) == 6  # three steps of two
    assert rows[-1]["sources"] == {"chats.jsonl": 12, "pairs.jsonl": 4}
    kind = json.loads((place / "whole/adapter/prompt_format.json").read_text())["prompt_format"]
    assert kind == "chat"

    with pytest.raises(Killed):
        run(place, "r", Kill())
    run(place, "r", resume=True)
    assert adapter(place / "r") == adapter(place / "whole")
    assert logged(place / "r") == rows

    pairs = "path: pairs.jsonl, columns: {prompt: q, completion: a}"
    others = f"data.sources=[{{path: chats.jsonl, weight: 1}}, {{{pairs}, weight: 1}}]"
    with pytest.raises(ConfigError, match="started with other training data"):
        run(place, "r", None, others, resume=True)


@pytest.mark.slow
def test_a_source_that_runs_out_is_repeated_and_told(place):
    notes = Notes()
    run(place, "all", notes, "data.stopping_strategy=all_exhausted", "train.max_steps=2")
    assert [s.rows for s in notes.given.sources] == [27, 9]
    told = "chats.jsonl has 6 rows and gives 27 per epoch: they are trained on 4.5 times"
    assert told in notes.notes


@pytest.mark.slow
def test_a_trainer_reads_the_sources_of_its_configuration(place, device):
    settings = load_config(place / "run.yaml", [f"output.dir={place / 'own'}", "train.max_steps=3"])
    model = QLoRAModel.from_pretrained(place / "model", settings.lora, device=device)
    Trainer(model, settings).train()
    assert sum(logged(place / "own")[-1]["sources"].values()) == 6


def test_data_shows_the_mixture(place):
    done = run_here("data", "run.yaml", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "chats.jsonl: 6 of 6 (75.0 %)" in done.stdout
    assert "pairs.jsonl: 2 of 9 (25.0 %)" in done.stdout
    lines = run_here("data", "run.yaml", "--json", cwd=place).stdout.splitlines()
    assert len(lines) == 8 and sum("and 1?" in json.loads(line)["text"] for line in lines) == 2
    held_out = run_here("data", "run.yaml", "--json", "--eval", "data.eval_split=3", cwd=place)
    assert len(held_out.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[]", "data.sources .*must not be empty"),
        ("[{path: chats.jsonl, weight: 0}]", r"data.sources.0.weight .* must be a number above 0"),
        ("[{path: chats.jsonl, weight: .nan}]", r"weight .* must be a"),
        ("[{path: chats.jsonl, weight: -1}]", r"weight .* must be a number above 0"),
        ("[{path: chats.jsonl, rows: 1.5}]", r"rows .* must be a fraction between 0 and 1, an int"),
        ("[{path: chats.jsonl, rows: 0}]", r"rows .* must be a fraction between 0 and 1, an int"),
        (
            "[{path: chats.jsonl, weight: 1}, {path: pairs.jsonl}]",
            "must have a weight for every source, or",
        ),
        ("[{path: chats.jsonl, weight: 1, rows: 3}]", "must have either weights or rows, not both"),
        ("[{paht: chats.jsonl}]", r"unknown key 'data.sources.0.paht'.*did you mean 'path'\?"),
        ("[chats.jsonl]", r"data.sources.0 .* must be a section of keys"),
        ("chats.jsonl", r"data.sources .* must be a list"),
        ("[{path: ''}]", r"data.sources.0.path .* must not be empty"),
        ("[{path: chats.jsonl, format: chat}]", r"data.sources.0.format .* must be one of"),
    ],
)
def test_sources_that_are_refused(place, sources, message):
    with pytest.raises(ConfigError, match=message):
        load_config(place / "run.yaml", [f"data.sources={sources}"])


def test_train_and_sources_are_mutually_exclusive(place):
    with pytest.raises(ConfigError, match=r"and data\.train are mutually exclusive"):
        load_config(place / "run.yaml", ["data.train=chats.jsonl"])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("empty.jsonl", "", "empty.jsonl is empty"),
        ("nothing.jsonl", '{"q": null, "a": null}\n', "nothing.jsonl"),
        ("missing.jsonl", None, "missing.jsonl does not exist"),
        ("odd.jsonl", '{"q": 5, "a": "x"}\n', "odd.jsonl line 1: 'prompt' must be text"),
    ],
)
def test_a_source_with_nothing_in_it_is_named(place, name, contents, message):
    if contents is not None:
        (place / name).write_text(contents)
    columns = "columns: {prompt: q, completion: a}"
    given = f"data.sources=[{{path: chats.jsonl}}, {{path: {name}, {columns}}}]"
    with pytest.raises(DataError, match=message):
        run(place, "bad", None, given)
