"""``init --from``: files of other trainers become runs that train."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
from click.testing import CliRunner

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import load_config
from qlora_wgpu.cli import commands
from qlora_wgpu.runs.data import read_run_data
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.training import Observer

FILES = Path(__file__).parents[1] / "config" / "dialects"
SMALL = (
    "train.max_steps=1",
    "train.per_device_train_batch_size=1",
    "train.gradient_accumulation_steps=1",
    "optim.warmup_steps=0",
    "data.max_seq_length=256",
    "data.chat_template=null",
    "device.tune=never",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    for folder, names in (("chats", ("train", "test")), ("mlxdata", ("train", "valid", "test"))):
        (tmp_path / folder).mkdir()
        for seed, name in enumerate(names):
            write_chats(tmp_path / folder / f"{name}.jsonl", 8, seed=seed)
    rows = [{"instruction": f"say {n}", "input": "", "output": str(n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data").mkdir()
    names = {"question": "instruction", "context": "input", "answer": "output"}
    mine = [{theirs: row[ours] for theirs, ours in names.items()} for row in rows]
    (tmp_path / "data" / "mine.json").write_text(json.dumps(mine))
    columns = {"prompt": "question", "query": "context", "response": "answer"}
    info = {"mine": {"file_name": "mine.json", "columns": columns}}
    info["identity"] = {"file_name": "identity.json"}
    others = [{**row, "instruction": f"who is {row['output']}?"} for row in rows[:4]]
    (tmp_path / "data" / "identity.json").write_text(json.dumps(others))
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def init(*args):
    return CliRunner().invoke(deepcopy(commands), ["init", *map(str, args)])


@pytest.mark.parametrize(
    ("name", "rows", "held_out"),
    [
        ("axolotl.yml", 11, 1),
        ("trl.yaml", 8, 8),
        ("llama_factory.yaml", 14, 2),
        ("mlx_lm.yaml", 8, 8),
    ],
)
def test_files_become_runs_with_their_data(place, name, rows, held_out):
    done = init("--from", FILES / name)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "settings were converted" in told and "run.yaml written" in told
    settings = load_config("run.yaml", SMALL)
    data = read_run_data(settings, OpenedModel.open(settings.model.path), Observer())
    assert (len(data.train), len(data.held_out)) == (rows, held_out)


def test_such_a_run_trains(place):
    assert init("--from", FILES / "mlx_lm.yaml").exit_code == 0
    result = qlora_wgpu.train("run.yaml", overrides=[*SMALL, "data.max_seq_length=64"])
    assert result.steps == 1 and result.eval_loss is not None
    assert result.adapter_dir.as_posix() == "adapters/adapter"


@pytest.mark.quick
def test_options_complete_a_file(place):
    (place / "theirs.json").write_text(json.dumps({"sequence_len": 64, "micro_batch_size": 2}))
    done = init("--from", "theirs.json")
    assert "names no model: set it with --model" in str(done.exception)
    done = init("--from", "theirs.json", "--model", "model", "--data", "rows.jsonl")
    assert done.exit_code == 0, done.output
    data = load_config("run.yaml").data
    assert (data.train, data.max_seq_length) == (str(place / "rows.jsonl"), 64)


@pytest.mark.quick
def test_model_and_data_are_needed_without_a_file(place):
    done = init("--model", "model")
    assert done.exit_code == 2 and "--data" in done.output


@pytest.mark.quick
@pytest.mark.parametrize(("data", "template"), [("chats", "plain"), ("rows.jsonl", None)])
def test_a_base_without_a_template_gets_one_for_chats(place, data, template):
    config = place / "model" / "tokenizer_config.json"
    kept = json.loads(config.read_text())
    kept.pop("chat_template")
    config.write_text(json.dumps(kept))
    (place / "theirs.json").write_text(json.dumps({"sequence_len": 64, "micro_batch_size": 2}))
    done = init("--from", "theirs.json", "--model", "model", "--data", data)
    assert done.exit_code == 0, done.output
    assert load_config("run.yaml").data.chat_template == template
