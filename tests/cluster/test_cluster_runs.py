"""Whole runs on worker processes: the bits of one device, whatever happens to the workers."""

import json
import multiprocessing
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from cluster.answer_runs import Told
from e2e.tiny import write_chats, write_model
from safetensors.numpy import load_file

from qlora_wgpu.cluster.blocks import WorkerInfo
from qlora_wgpu.cluster.owner import Cluster
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs import train
from qlora_wgpu.runs.cluster import note_workers
from qlora_wgpu.selfcheck import results

pytest.importorskip("distributed")

# Noise is made by the micro-batch's key, as dropout is; DoRA and trained rows begin with what a
# worker tells.
SETTINGS = {
    "lora": {"r": 4, "use_dora": True, "trainable_token_indices": [82, 1]},
    "train": {"neftune_noise_alpha": 5.0},
    "data": {"packing": True},
}
LOCAL = {"scheduler": "local", "workers": 2, "patience": 120.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Model and data.

    What checks of the driver have to say is told elsewhere: here they pass, in a cache of its own
    that workers share.
    """
    folder = tmp_path_factory.mktemp("cluster")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl", 40)
    write_chats(folder / "eval.jsonl", 6, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(results, "check_launches", lambda *given: [])
        yield folder


@pytest.fixture(scope="module")
def own(place):
    """A run without a cluster."""
    return run(place, "own")


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
    for section, values in [*SETTINGS.items(), *sections.items()]:
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


def trained_file(place, name):
    return place / name / "adapter/adapter_model.safetensors"


def kill_one(told):
    workers = sorted(multiprocessing.active_children(), key=lambda p: p.pid)
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)


@pytest.mark.full
def test_two_workers_give_the_bits_of_one_device_though_one_is_killed(place, own):
    told = Told(after=1, do=kill_one)
    result = run(place, "two", told, cluster=LOCAL)
    assert traces(place, "two") == traces(place, "own")
    assert result.samples[0].after == own.samples[0].after
    assert told.has_acted
    shares = [sum(w["share"] for w in row["workers"].values()) for row in told.rows]
    assert shares == pytest.approx([1.0] * 6)
    assert max(w["share"] for w in told.rows[-1]["workers"].values()) == 1.0  # one is gone
    assert "share of worker 0" in (place / "two" / "report.html").read_text()
    assert not multiprocessing.active_children()


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_workers(place, own):
    told = Told(after=2, do=lambda told: told.stop_run("enough"))
    cluster = {**LOCAL, "workers": 1, "division": "fixed"}
    assert run(place, "parts", told, cluster=cluster).interrupted
    assert not run(place, "parts", resume=True).interrupted
    assert traces(place, "parts") == traces(place, "own")


@pytest.mark.parametrize("link", ["http://127.0.0.1:8787/status", None])
def test_the_dashboard_is_told_where_there_is_one(link):
    notes, cluster = [], object.__new__(Cluster)
    cluster._connection = SimpleNamespace(dashboard=link)
    identity = WorkerInfo("a GPU", "driver", "kernels", 0, "1", {}, {})
    note_workers({"0": identity}, 2, cluster, SimpleNamespace(note=notes.append))
    assert [note for note in notes if "dashboard" in note] == (
        [f"Dask's dashboard is at {link}"] if link else []
    )


@pytest.mark.parametrize(("names", "idle"), [("01", False), ("012", True)])
def test_workers_without_a_micro_batch_are_told(names, idle):
    notes = []
    identity = WorkerInfo("a GPU", "driver", "kernels", 0, "1", {}, {})
    told = SimpleNamespace(note=notes.append)
    cluster = SimpleNamespace(dashboard=None)
    note_workers(dict.fromkeys(names, identity), 2, cluster, told)
    assert notes[0] == f"{len(names)} workers: {', '.join(names)} on a GPU"
    assert ("fewer micro-batches (2) than there are workers" in notes[-1]) is idle


def test_a_scheduler_elsewhere_needs_tls(place):
    with pytest.raises(ConfigError, match="plain TCP to another machine"):
        run(place, "plain", cluster={"scheduler": "tcp://192.0.2.1:8786"})


@pytest.mark.full
def test_a_pair_on_the_embedding_and_a_whole_head_have_the_same_bits(place):
    write_model(place / "untied", tie_word_embeddings=False)
    sections = {
        "model": {"path": str(place / "untied")},
        "lora": {
            "use_dora": False,
            "trainable_token_indices": None,
            "target_modules": ["q_proj", "embed_tokens"],
            "modules_to_save": ["lm_head"],
        },
        "train": {"max_steps": 2},
    }
    for name, cluster in (("ends", {}), ("ends on a worker", {**LOCAL, "workers": 1})):
        run(place, name, cluster=cluster, **sections)
    files = [trained_file(place, name).read_bytes() for name in ("ends", "ends on a worker")]
    assert files[0] == files[1]
    saved = load_file(trained_file(place, "ends"))
    assert "base_model.model.lm_head.weight" in saved
    assert np.abs(saved["base_model.model.model.embed_tokens.lora_embedding_A"]).max() > 1e-3
