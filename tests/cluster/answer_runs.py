"""Runs over answers, alone and on a cluster, that must leave the same bits."""

import json
from contextlib import contextmanager

import pytest
from e2e.tiny import write_model, write_pairs

from qlora_wgpu.checkpoint import read_manifest
from qlora_wgpu.selfcheck import results
from qlora_wgpu.training import Observer

FILES = ("adapter/adapter_model.safetensors", "checkpoints/step-3/optimizer.safetensors")


@contextmanager
def answers_in(folder):
    """Model and answers, the last step's and the last block's fewer than the others'."""
    write_model(folder / "model")
    write_pairs(folder / "train.jsonl", rows=13)
    write_pairs(folder / "eval.jsonl", rows=5, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(results, "check_launches", lambda *given: [])
        yield folder


def settings_of(place, name, objective, loss, workers=0, **sections):
    given = {
        "model": {"path": str(place / "model")},
        "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        "data": {
            "train": str(place / "train.jsonl"), "eval": str(place / "eval.jsonl"),
            "max_seq_length": 64, "cache": False,
        },
        "train": {
            "objective": objective, "loss_type": loss, "max_steps": 3,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
            "compute_dtype": "float32",
        },
        "optim": {"learning_rate": 5e-3, "warmup_ratio": 0.0},
        "eval": {"eval_steps": 2},
        "output": {"dir": str(place / name), "save_steps": 1},
        "cluster": {},
    }  # fmt: skip
    if workers:
        given["cluster"] = {"scheduler": "local", "workers": workers, "patience": 120.0}
    if loss in ("robust", "exo_pair"):
        given["train"]["label_smoothing"] = 0.1
    if objective == "kto":  # all answers become likelier, so that the divergence is above 0
        given["train"] |= {"desirable_weight": 4.0, "undesirable_weight": 0.1, "beta": 1.0}
        given["optim"]["learning_rate"] = 5e-2
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    return given


def traces(place, name):
    """All that a run leaves and that must be the same bits."""
    folder = place / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("tokens_per_second", None)
        row.pop("workers", None)
    asked = read_manifest(folder / "checkpoints/step-3")["references"]
    return rows, asked, [(folder / file).read_bytes() for file in FILES]


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
