"""Objectives over answers on a cluster: the losses, metrics and bits of one device."""

import numpy as np
import pytest
from cluster.answer_runs import Told, answers_in, settings_of, traces

from qlora_wgpu.cluster import owner
from qlora_wgpu.cluster.blocks import BlockResult, WorkerSpec
from qlora_wgpu.cluster.owner import Cluster
from qlora_wgpu.errors import ClusterError
from qlora_wgpu.ops.preference import PAIR_LOSSES, SINGLE_LOSSES
from qlora_wgpu.runs import train
from qlora_wgpu.runs.cluster import Worker

OBJECTIVES = [("orpo", None), *(("dpo", loss) for loss in PAIR_LOSSES),
              *(("kto", loss) for loss in SINGLE_LOSSES)]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with answers_in(tmp_path_factory.mktemp("answers")) as folder:
        yield folder


def compare(place, name, objective, loss=None, **sections):
    """Runs alone and with two workers; the rows of the log, which are the same."""
    for count in (0, 2):
        train(settings_of(place, f"{name}-{count}", objective, loss, count, **sections))
    alone, shared = (traces(place, f"{name}-{count}") for count in (0, 2))
    assert shared == alone
    return shared[0]


@pytest.mark.full
@pytest.mark.cover(loss=["kto"])
@pytest.mark.parametrize(("objective", "loss"), OBJECTIVES)
def test_every_loss_has_the_bits_of_one_device(place, clusters, objective, loss):
    rows = compare(place, f"{objective}-{loss}", objective, loss)
    steps = [row for row in rows if "loss" in row]
    measured = [row for row in rows if "eval_loss" in row]
    assert len(steps) == 3 and len(measured) == 3
    names = ["rewards/margins", "logps/chosen"]
    names += ["kl"] if loss == "kto" else []
    names += ["log_odds_chosen"] if objective == "orpo" else []
    assert all(name in row for name in names for row in steps)
    assert all(f"eval_{name}" in row for name in names for row in measured)
    if loss == "kto":
        assert all(row["kl"] > 0 for row in steps[1:]) and measured[-1]["eval_kl"] > 0
    (cluster,) = clusters
    asked = [method for method, _ in cluster.asked]
    assert ("answer_logps" in asked) is (objective != "orpo")
    assert ("divergence" in asked) is (loss == "kto")
    assert "loss" not in asked


@pytest.mark.full
def test_dropout_packing_and_a_reference_that_is_an_adapter(place, clusters):
    train(settings_of(place, "before", "dpo", None))
    lora = {"init_from": str(place / "before" / "adapter"), "lora_dropout": 0.3}
    for objective in ("dpo", "kto"):
        rows = compare(place, f"again-{objective}", objective, lora=lora, data={"packing": True})
        assert rows[0]["eval_rewards/chosen"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_answers_go_to_workers_some_at_a_time(place, clusters, monkeypatch):
    monkeypatch.setattr(owner, "_AT_ONCE", 2)
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    compare(place, "parts", "kto", train=sizes, log={"logging_steps": 3})
    (cluster,) = clusters
    assert [each for each in cluster.asked if each[0] == "answer_logps"][:3] == [
        ("answer_logps", 2)
    ] * 3
    first = cluster.asked[: [method for method, _ in cluster.asked].index("gradient")]
    assert [method for method, _ in first if method != "answer_logps"] == [
        *["divergence"] * 2, *["answer_loss"] * 2, "divergence",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.cover(objective=["dpo"], first=[0])
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_run_goes_on_with_and_without_a_cluster(place, clusters, objective, first):
    name = f"{objective}-paused-{first}"
    train(settings_of(place, name, objective, None), overwrite=True)
    whole = traces(place, name)
    told = Told(after=1, do=lambda told: told.stop_run("enough"))
    begun = train(settings_of(place, name, objective, None, first), told, overwrite=True)
    assert begun.interrupted and begun.steps < 3
    train(settings_of(place, name, objective, None, 0 if first else 3), resume=True)
    assert traces(place, name) == whole
    assert clusters


@pytest.mark.slow
def test_what_the_reference_said_is_kept_by_the_kinds_of_gpus_that_it_was_asked_on(
    place, clusters, monkeypatch
):
    def asked(name):
        train(settings_of(place, name, "dpo", None, 1, data={"cache": True}), overwrite=True)
        return [each for each in clusters[-1].asked if each[0] == "answer_logps"]

    def joined(cluster, *given):
        cluster._devices.add(("a GPU of another kind", "kernels"))
        return answer_logps(cluster, *given)

    answer_logps = Cluster.answer_logps
    monkeypatch.setattr(Cluster, "answer_logps", joined)
    assert len(asked("mixed")) == 2  # of what is learnt, and of what is held out
    monkeypatch.setattr(Cluster, "answer_logps", answer_logps)
    assert len(asked("alike")) == 2  # not what another kind may have had a part in
    assert not asked("alike")


@pytest.mark.parametrize("name", ["metrics", "logps"])
def test_a_block_of_answers_that_is_not_finite_is_told(name):
    for value, is_finite in ((1.0, True), (np.nan, False), (np.inf, False)):
        sums = BlockResult(1.0, 1.0, 0, 0.1, **{name: np.array([1, value], np.float32)})
        assert sums.is_finite is is_finite


def test_a_worker_of_another_version_says_so():
    with pytest.raises(ClusterError, match=r"the owner has 0\.0\.1: install the same version"):
        Worker(WorkerSpec({}, 8, "0.0.1", {}))
