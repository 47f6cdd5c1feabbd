"""A row of the log, of the steps since the one before."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.training.observers import WorkerMetrics
from qlora_wgpu.training.step_log import log_window


def run_of(*window, balance=0.0, **more):
    """A run whose steps gave loss, labels, hits and the balance of experts."""
    told = SimpleNamespace(rows=[], workers=[])
    state = SimpleNamespace(
        window=list(window), metrics=[], averages={}, step=7, learning_rate=0.5, grad_norm=2.0,
        num_tokens=99, last_loss=None, logged_step=0,
    )  # fmt: skip
    architecture = SimpleNamespace(balance_coefficient=lambda asked: balance)
    defaults = {"saturated": 0, "sources": None, "workers": {}}
    return SimpleNamespace(
        state=state, config=SimpleNamespace(train=TrainConfig()),
        model=SimpleNamespace(architecture=architecture),
        throughput=SimpleNamespace(tokens_per_second=12.0),
        folder=SimpleNamespace(log=told.rows), told=told,
        events=SimpleNamespace(workers=told.workers.append), logged=lambda row: None,
        **(defaults | more),
    )  # fmt: skip


def test_a_row_is_the_mean_over_the_labels_of_its_steps():
    run = run_of((6.0, 2.0, 1.0, 0.5), (4.0, 8.0, 3.0, 0.5))
    log_window(run)
    (row,) = run.told.rows
    assert row == {
        "step": 7, "loss": 1.0, "mean_token_accuracy": 0.4, "learning_rate": 0.5, "grad_norm": 2.0,
        "num_tokens": 99, "tokens_per_second": 12.0,
    }  # fmt: skip
    assert not run.state.window and run.state.logged_step == 7 and run.state.last_loss == 1.0
    log_window(run)
    assert len(run.told.rows) == 1  # there is nothing new


@pytest.mark.parametrize(("window", "loss", "hits"), [
    ([(6.0, 2.0, None, 0.0)], 3.0, None),
    ([(6.0, 2.0, 1.0, 0.0), (1.0, 5.0, None, 0.0)], 1.0, None),
    ([(0.0, 0.0, 0.0, 0.0)], None, None),
])  # fmt: skip
def test_what_is_not_known_of_every_step_is_not_told(window, loss, hits):
    run = run_of(*window)
    log_window(run)
    assert (run.told.rows[0]["loss"], run.told.rows[0]["mean_token_accuracy"]) == (loss, hits)


def test_a_row_tells_what_else_there_is():
    workers = {name: WorkerMetrics(name, n, n, 2.0) for name, n in (("a", 30), ("b", 10))}
    sources = SimpleNamespace(until=lambda step: {"one": step})
    run = run_of((6.0, 2.0, 1.0, 0.5), balance=0.1, saturated=3, sources=sources, workers=workers)
    log_window(run)
    (row,) = run.told.rows
    assert (row["aux_loss"], row["saturated"], row["sources"]) == (0.25, 3, {"one": 7})
    assert {name: each["share"] for name, each in row["workers"].items()} == {"a": 0.75, "b": 0.25}
    assert len(run.told.workers) == 1 and not run.workers
