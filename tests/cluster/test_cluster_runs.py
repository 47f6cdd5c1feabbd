"""Whole runs on worker processes: the bits of one device, whatever happens to the workers."""

import json
import multiprocessing
import os
import signal

import pytest
from e2e.tiny import write_chats, write_model

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs import train
from qlora_wgpu.training import Observer

pytest.importorskip("distributed")

RANDOM = {
    "lora": {"r": 4, "lora_dropout": 0.1},
    "train": {"neftune_noise_alpha": 5.0},
    "data": {"packing": True},
}
DORA = {"lora": {"r": 4, "use_dora": True}}
LOCAL = {"scheduler": "local", "workers": 2, "patience": 120.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl", 40)
    write_chats(folder / "eval.jsonl", 6, seed=1)
    return folder


class Told(Observer):
    """Keeps what was told, and does something after a step."""

    def __init__(self, after=None, do=lambda told: None):
        self.after, self.do, self.has_acted = after, do, False
        self.texts, self.rows = [], []

    def warning(self, text):
        self.texts.append(text)

    def step(self, row):
        self.rows.append(row)
        if row["step"] == self.after:
            self.do(self)
            self.has_acted = True


def run(place, name, told=None, *, resume=False, cluster=None, **sections):
    given = {
        "model": {"path": str(place / "model")},
        "data": {
            "train": str(place / "train.jsonl"),
            "eval": str(place / "eval.jsonl"),
            "max_seq_length": 48,
        },
        "train": {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
        },
        "optim": {"learning_rate": 1e-2},
        "eval": {"eval_steps": 3},
        "output": {"dir": str(place / name), "save_steps": 2},
        "cluster": cluster or {},
    }
    for section, values in sections.items():
        given[section] = {**given.get(section, {}), **values}
    return train(given, told or Told(), resume=resume)


def traces(place, name):
    """All that a run leaves and that must be the same bits."""
    folder = place / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("tokens_per_second", None)
        row.pop("workers", None)
    files = ("adapter/adapter_model.safetensors", "checkpoints/step-6/optimizer.safetensors")
    return rows, [(folder / file).read_bytes() for file in files]


def kill_one(told):
    workers = sorted(multiprocessing.active_children(), key=lambda p: p.pid)
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)


def test_two_workers_give_the_bits_of_one_device_though_one_is_killed(place):
    own = run(place, "own", **RANDOM)
    told = Told(after=1, do=kill_one)
    result = run(place, "two", told, cluster=LOCAL, **RANDOM)
    assert traces(place, "two") == traces(place, "own")
    assert result.samples[0].after == own.samples[0].after
    assert told.has_acted
    shares = [sum(w["share"] for w in row["workers"].values()) for row in told.rows]
    assert shares == pytest.approx([1.0] * 6)
    assert max(w["share"] for w in told.rows[-1]["workers"].values()) == 1.0  # one is gone
    assert "share of worker 0" in (place / "two" / "report.html").read_text()
    assert not multiprocessing.active_children()


def test_a_run_goes_on_with_another_number_of_workers(place):
    run(place, "whole", **DORA)
    told = Told(after=2, do=lambda told: told.stop_run("enough"))
    cluster = {**LOCAL, "workers": 1, "division": "fixed"}
    assert run(place, "parts", told, cluster=cluster, **DORA).interrupted
    assert not run(place, "parts", resume=True, **DORA).interrupted
    assert traces(place, "parts") == traces(place, "whole")


def test_a_scheduler_elsewhere_needs_tls(place):
    with pytest.raises(ConfigError, match="plain TCP to another machine"):
        run(place, "plain", cluster={"scheduler": "tcp://192.0.2.1:8786"})
