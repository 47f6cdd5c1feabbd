"""The file that a stranger sends: what is in it, what never is, and when it ends."""

import json
import platform
import socket
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import run_here

from qlora_wgpu.bench.workload import Workload, find_shape
from qlora_wgpu.cli import doctor as command
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.runs import machine_report as reports
from qlora_wgpu.runs.machine_report import machine_facts, machine_report, without_names
from qlora_wgpu.selfcheck import Result, check_own_cases

HOME = "/home/zaphod/beeble brox"
SAID = (
    f"cannot compile {HOME}/.cache/qlora-wgpu/a.spv for Zaphod on heart-of-gold.example.org "
    "(C:\\Users\\zaphod\\AppData\\x.hlsl, '/opt/secret/driver.so:3')"
)
PLANTED = ("zaphod", "beeble", "heart-of-gold", "secret", "AppData", ".cache", "/opt")


@pytest.fixture
def owner(monkeypatch, tmp_path):
    """A user, a home folder and a machine whose names are known."""
    for name, value in (("USER", "zaphod"), ("LOGNAME", "zaphod"), ("USERNAME", "Zaphod"),
                        ("HOSTNAME", "heart-of-gold"), ("HOME", HOME)):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", lambda: Path(HOME))
    monkeypatch.setattr(socket, "gethostname", lambda: "heart-of-gold.example.org")
    monkeypatch.setattr(platform, "node", lambda: "heart-of-gold.example.org")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-zaphod")


def refused(device):
    yield from islice(check_own_cases(device), 2)
    yield Result("rope", "own", "float32", float("inf"), float("inf"), refusal=SAID)


def small(shape="S", seconds=0.01, ceiling=1e10):
    steps = SimpleNamespace(step_seconds=SimpleNamespace(median=seconds))
    return SimpleNamespace(
        workload=Workload(find_shape(shape)), steps=steps, flops_per_step=4e9,
        ceilings=SimpleNamespace(flops_per_second=ceiling),
    )  # fmt: skip


def fails(workload, device, progress):
    raise RuntimeError(SAID)


def test_texts_of_others_lose_paths_and_names(owner):
    text = without_names(SAID)
    assert not [name for name in PLANTED if name.lower() in text.lower()], text
    assert text.startswith("cannot compile …") and " on …" in text
    kept = "error: type 3/4 of naga (line 7) is f16 and/or f32"
    assert without_names(kept) == kept


def test_a_report_names_nobody_and_says_what_it_was_about(device, owner, monkeypatch):
    monkeypatch.setattr(reports, "check_own_cases", refused)
    monkeypatch.setattr(reports, "measure", fails)
    told = []
    parts = [json.dumps(part) for part in machine_report(device, told.append)]
    doing = [json.loads(part).get("unfinished") for part in parts]
    assert doing == ["checks", "steps of S", "steps of llama-3.2-1b", None]
    for part in (*parts, *told):
        assert not [name for name in PLANTED if name.lower() in part.lower()]
    report = json.loads(parts[-1])
    checks, by_name = report["checks"], {row["check"]: row for row in report["checks"]["results"]}
    assert (checks["done"], checks["wrong"]) == (3, 1) and checks["total"] > 3
    assert by_name["rope"]["error"] is None and "cannot compile" in by_name["rope"]["refusal"]
    assert report["steps"]["S"]["failed"].startswith("RuntimeError: cannot compile …")
    assert "S was not measured" in report["steps"]["llama-3.2-1b"]["skipped"]
    (gpu, *_), used = report["gpus"], report["device"]
    assert used["name"] == device.name and used["profile"]["name"] and gpu["info"]["device"]
    assert gpu["limits"]["max-buffer-size"] and isinstance(gpu["features"], list)


def test_nothing_is_begun_once_the_time_is_up(device):
    *_, report = machine_report(device, seconds=-1.0)
    assert report["checks"]["done"] == 0 and "unfinished" not in report
    assert report["steps"]["S"]["skipped"] == "it took longer than the time available"


@pytest.mark.parametrize(
    ("room", "left", "ceiling", "outcome"),
    [
        (1 << 20, 200.0, 1e14, "it needs"),
        (None, 31.0, 1e12, "longer than the time left"),
        (None, 200.0, 1e14, 5),
        (None, 62.0, 1e12, 2),
    ],
)
def test_a_billion_parameters_take_no_more_than_there_is(
    device, monkeypatch, room, left, ceiling, outcome
):
    measured = []
    monkeypatch.setattr(Workload, "planned_memory", lambda self, device: {"base": 1 << 30})
    monkeypatch.setattr(reports, "room", lambda device: room)
    monkeypatch.setattr(
        reports, "_measured", lambda workload, *_: (None, measured.append(workload) or {})
    )
    large = reports._large_steps(device, small(ceiling=ceiling), print, lambda: left)
    if isinstance(outcome, str):
        assert outcome in large["skipped"] and not measured
    else:
        assert [workload.steps for workload in measured] == [outcome]


def test_what_does_not_fit_is_said(device, monkeypatch):
    def too_large(self, device):
        raise OutOfMemoryError("needs 9 MiB")

    monkeypatch.setattr(Workload, "planned_memory", too_large)
    large = reports._large_steps(device, small(), print, lambda: 200.0)
    assert large == {"skipped": "needs 9 MiB"}


def test_the_command_writes_it_and_prints_facts(tmp_path, device, monkeypatch):
    monkeypatch.setattr(command, "machine_report", partial(machine_report, seconds=-1.0))
    done = run_here("doctor", "--report", "gpu.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 of " in done.stdout and "steps of S: it took longer" in done.stdout
    report = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert report["report"] == 1 and report["versions"]["qlora-wgpu"]
    facts = run_here("doctor", "--json", cwd=tmp_path)
    assert facts.returncode == 0
    assert json.loads(facts.stdout).keys() == machine_facts(device).keys()
    both = run_here("doctor", "--json", "--check", cwd=tmp_path)
    assert both.returncode == 2 and "--check and --json are mutually exclusive" in both.stderr
