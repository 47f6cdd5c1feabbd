"""Objectives over answers on worker processes that are lost, and that join late."""

import pytest
from cluster.answer_runs import Told, answers_in, settings_of, traces
from cluster.dying_worker import FOLDER, DyingWorker
from support.processes import until

from qlora_wgpu.cluster.owner import Cluster
from qlora_wgpu.runs import train

pytestmark = pytest.mark.full

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with answers_in(tmp_path_factory.mktemp("answers")) as folder:
        yield folder


def test_a_worker_that_is_lost_in_whatever_it_computes_changes_nothing(
    place, tmp_path, monkeypatch
):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("qlora_wgpu.runs.cluster.Worker", DyingWorker)
    told = Told()
    for count in (0, 2):
        train(settings_of(place, f"lost-{count}", "kto", None, count), told)
    assert traces(place, "lost-2") == traces(place, "lost-0")
    lost = ["answer_logps", "divergence", "gradient"]
    assert sorted(path.name for path in tmp_path.iterdir()) == lost
    assert any("its blocks go to other workers" in text for text in told.texts)


def test_a_worker_that_joins_late_has_its_share(place, monkeypatch):
    made = []

    class Kept(Cluster):
        def wait_for(self, count):
            made.append(self)
            return super().wait_for(count)

    monkeypatch.setattr("qlora_wgpu.runs.cluster.Cluster", Kept)
    train(settings_of(place, "late-0", "kto", None))
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0", memory_limit=0,
    ) as local:  # fmt: skip

        def another(told):
            local.scale(2)
            until(lambda: len(made[0]._engine.identities) == 2)

        cluster = {"scheduler": local.scheduler_address, "division": "fixed"}
        told = Told(after=1, do=another)
        train(settings_of(place, "late-1", "kto", None, 1, cluster=cluster), told)
    assert traces(place, "late-1") == traces(place, "late-0")
    shares = [[worker["share"] for worker in row["workers"].values()] for row in told.rows]
    assert shares[0] == [1.0] and min(shares[-1]) > 0 and len(shares[-1]) == 2
