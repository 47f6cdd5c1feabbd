"""What programs read of a run: ``--json``, ``--quiet``, warnings on stderr, and result.json."""

import json

import pytest
from support.commands import run_here

from e2e.tiny import write_chats, write_model
from qlora_wgpu.cli.train import runs

CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: eval.jsonl, max_seq_length: 64}
train: {max_steps: 2, per_device_train_batch_size: 2}
device: {tune: never}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("output")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 4, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def kept(place, run):
    return json.loads((place / run / "result.json").read_text("utf-8"))


@pytest.mark.slow
def test_events_and_the_result_are_lines_of_json(place):
    done = run_here("train", "run.yaml", "output.dir=lines", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    told = [row["event"] for row in rows]
    assert {"setup", "started", "step", "evaluation", "saved", "reported"} <= set(told)
    assert [row["step"] for row in rows if row["event"] == "step"][-1] == 2
    assert told[-1] == "result" and told.count("result") == 1 and "finished" not in told
    result = kept(place, "lines")
    assert rows[-1] == {"event": "result", **result}
    assert (result["steps"], result["interrupted"], result["run_dir"]) == (2, False, "lines")
    assert result["sample"]["after"] and result["reports"]
    again = run_here("train", "run.yaml", "output.dir=lines", "--json", "--resume", cwd=place)
    assert json.loads(again.stdout.splitlines()[-1])["was_finished"]
    assert kept(place, "lines") == result  # of the run that has trained


@pytest.mark.slow
def test_a_result_is_there_once_a_run_has_ended(place, monkeypatch):
    overrides = ("output.dir=kept", "train.max_steps=1", "output.save_steps=1")
    run_here("train", "run.yaml", *overrides, "--quiet", cwd=place)
    assert kept(place, "kept")["steps"] == 1

    def fails(*_, **__):
        assert not (place / "kept" / "result.json").exists()
        raise RuntimeError("in the middle of a step")

    monkeypatch.setattr("qlora_wgpu.training.executor.LocalExecutor.accumulate", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        run_here("train", "run.yaml", *overrides[::2], "--resume", "--quiet", cwd=place)
    assert not (place / "kept" / "result.json").exists()


@pytest.mark.quick
def test_warnings_are_on_stderr_and_quiet_prints_nothing_else(place, monkeypatch):
    def train(settings, events, **options):
        events.note("for people who look")
        events.warning("a text was cut")
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", train)
    shown = run_here("train", "run.yaml", "output.dir=none", cwd=place)
    assert "for people" in shown.stdout and "cut" not in shown.stdout
    assert "warning: a text was cut\n" in shown.stderr
    quiet = run_here("train", "run.yaml", "output.dir=none", "--quiet", cwd=place)
    assert quiet.stdout == "" and "for people" not in quiet.stderr
    assert "warning: a text was cut\n" in quiet.stderr and "starts the run" in quiet.stderr
    lines = run_here("train", "run.yaml", "output.dir=none", "--json", cwd=place)
    assert [json.loads(line) for line in lines.stdout.splitlines()] == [
        {"event": "note", "text": "for people who look"},
        {"event": "warning", "text": "a text was cut"},
    ]
    assert "warning: a text was cut\n" in lines.stderr
    both = run_here("train", "run.yaml", "--json", "--quiet", cwd=place)
    assert both.returncode == 2 and "--json and --quiet are mutually exclusive" in both.stderr
