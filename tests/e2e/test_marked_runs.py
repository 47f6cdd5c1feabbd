"""Runs on chats in which turns say that they are not learnt."""

import json

import pytest
from support.commands import run_here

from e2e.test_cli import CONFIG, run
from e2e.tiny import write_model


def turns(number, **marks):
    return [
        {"role": "user", "content": f"what is {number}?"},
        {"role": "assistant", "content": f"{number}.", **marks},
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same conversations three times: with marks, with their ends alone as answers, plain."""
    folder = tmp_path_factory.mktemp("marked")
    write_model(folder / "model")
    (folder / "run.yaml").write_text(CONFIG)
    for name, numbers in (("train", range(20)), ("eval", range(20, 26))):
        marked = [turns(n, weight=0) + turns(n + 1, weight=1) for n in numbers]
        write(folder / f"{name}.jsonl", [{"messages": messages} for messages in marked])
        plain = [turns(n) + turns(n + 1) for n in numbers]
        write(folder / f"plain-{name}.jsonl", [{"messages": messages} for messages in plain])
        ends = [{"prompt": messages[:3], "completion": messages[3:]} for messages in plain]
        write(folder / f"ends-{name}.jsonl", ends)
    return folder


def trained(place, name, data):
    done = run(
        "train", "run.yaml", f"data.train={data}train.jsonl", f"data.eval={data}eval.jsonl",
        "data.packing=true", f"output.dir={name}", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    losses = [row[key] for row in rows for key in ("loss", "eval_loss") if key in row]
    return losses, (place / name / "adapter/adapter_model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_learns_and_measures_what_is_left(place):
    marked = trained(place, "marked", "")
    assert marked == trained(place, "ends", "ends-")
    assert marked != trained(place, "plain", "plain-")
    # It goes on with the same marks alone.
    given = ("train", "run.yaml", "data.packing=true", "output.dir=marked", "train.max_steps=5")
    other = run(*given, "--resume", "data.train=plain-train.jsonl", cwd=place)
    assert other.returncode == 2 and "other training data" in other.stderr
    same = run(*given, "--resume", cwd=place)
    assert same.returncode == 0, same.stderr


@pytest.mark.quick
def test_what_is_shown_is_what_is_learnt(place):
    shown = run_here("data", "run.yaml", "--samples", 1, cwd=place)
    assert shown.returncode == 0, shown.stderr
    sample = shown.stdout.partition("tokens in {+ +} are trained on")[0]
    assert sample.count("{+") == 1 and "{+1." in sample
    assert "weight 0" not in shown.stdout + shown.stderr


@pytest.mark.quick
def test_other_weights_are_refused(place):
    write(place / "odd.jsonl", [{"messages": turns(1)}, {"messages": turns(1, weight=0.5)}])
    for command in ("data", "train"):
        done = run_here(command, "run.yaml", "data.train=odd.jsonl", cwd=place)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: odd.jsonl line 2: message 2 has the weight 0.5, but")
