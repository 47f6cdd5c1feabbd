"""The measurement of a GPU machine in parts: one that crashes or hangs costs itself alone."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.parts import BENCHMARKS, python, ran, session, state
from support.processes import PATIENCE, is_running, until


def test_what_is_done_is_not_repeated_and_what_failed_is(gpu, tmp_path):
    parts = [
        gpu.Part("good", python("print('well')")),
        gpu.Part("bad-1.5b", python("sys.exit('no such thing')")),
        gpu.Part("needy", python("pass"), needs="bad-1.5b"),
    ]
    for _ in range(2):
        first = session(gpu, tmp_path)
        first.run(parts)
        first.close()
    folder = tmp_path / "all"
    assert state(folder) == {"good": "done", "bad-1.5b": "failed", "needy": "left out"}
    assert (ran(folder, "good"), ran(folder, "bad-1.5b")) == (1, 2)
    assert "no such thing" in json.loads((folder / "state.json").read_text())["bad-1.5b"]["why"]
    # It fails for good after a third time, unless it is asked for.
    for _ in range(3):
        session(gpu, tmp_path).run(parts)
    assert ran(folder, "bad-1.5b") == 3
    again = session(gpu, tmp_path)
    again.forget(["bad", "good"])
    again.run(parts)
    assert (ran(folder, "good"), ran(folder, "bad-1.5b")) == (2, 4)


ENDLESS = "import subprocess; child = subprocess.Popen(['sleep', '600']); " + (
    "open(sys.argv[1] + '.pid', 'w').write(f'{child.pid}\\n'); child.wait()"
)


@pytest.fixture
def clock(gpu, monkeypatch):
    """The time of sessions: parts called long take for ever, others none."""
    module = sys.modules["gpu_session"]

    class Timed(subprocess.Popen):
        def wait(self, timeout=None):
            if Path(self.args[-1]).name != "long" or hasattr(self, "is_late"):
                return super().wait(PATIENCE if timeout is None else max(timeout, PATIENCE))
            self.is_late, pid = True, Path(self.args[-1] + ".pid")
            until(lambda: pid.exists() and pid.read_text().endswith("\n"))
            time.now += timeout
            raise subprocess.TimeoutExpired(self.args, timeout)

    time = SimpleNamespace(now=0.0, monotonic=lambda: time.now)
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(
        module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Timed})
    )
    return time


def test_a_part_is_ended_with_its_time_and_the_rest_left_for_later(gpu, tmp_path, clock):
    endless, pid = python(ENDLESS), tmp_path / "all" / "long.pid"
    first = session(gpu, tmp_path, minutes=1)
    first.run([gpu.Part("long", endless, least=0), gpu.Part("later", python("pass"), least=1)])
    assert clock.now == 60
    until(lambda: not is_running(int(pid.read_text())))
    parts = json.loads((tmp_path / "all" / "state.json").read_text())
    assert state(tmp_path / "all") == {"long": "stopped", "later": "left out"}
    assert parts["long"]["attempts"] == 0  # the session's time was up, not the part's
    second = session(gpu, tmp_path)
    second.run([gpu.Part("long", endless, seconds=20), gpu.Part("later", python("pass"))])
    assert state(tmp_path / "all") == {"long": "stopped", "later": "done"}
    assert json.loads((tmp_path / "all" / "state.json").read_text())["long"]["attempts"] == 1


def test_what_was_cut_off_is_begun_again_only_with_more_time(gpu, tmp_path, clock):
    """Else every call would end with the same part, cut off as the last one was."""
    long = gpu.Part("long", python(ENDLESS), least=0)
    short = gpu.Part("short", python("pass"), least=0)
    session(gpu, tmp_path, minutes=1).run([long])
    assert state(tmp_path / "all") == {"long": "stopped"}
    second = session(gpu, tmp_path, minutes=10)
    second._ends = clock.now + 70  # what others left of ten minutes
    second.run([long, short])
    assert state(tmp_path / "all") == {"long": "left out", "short": "done"}
    assert ran(tmp_path / "all", "long") == 1
    session(gpu, tmp_path, minutes=1).run([long])  # a call that never lasts longer
    assert ran(tmp_path / "all", "long") == 2


def test_what_was_cut_off_is_begun_again_with_all_the_time_that_it_may_take(gpu, tmp_path, clock):
    """Which may be little more than it had."""
    long = gpu.Part("long", python(ENDLESS), seconds=60, least=0)
    session(gpu, tmp_path, minutes=0.9).run([long])
    second = session(gpu, tmp_path)
    second._ends = clock.now + 62
    second.run([long])
    assert ran(tmp_path / "all", "long") == 2


def test_what_failed_stays_told_where_no_time_is_left_to_try_it_again(gpu, tmp_path, clock):
    bad = gpu.Part("bad", python("sys.exit('no such thing')"))
    first = session(gpu, tmp_path, minutes=1)
    first.run([bad], failed=False)
    clock.now += 59
    first.run([bad])
    part = json.loads((tmp_path / "all" / "state.json").read_text())["bad"]
    assert part["status"] == "failed" and "no such thing" in part["why"]


def test_another_machine_goes_on_from_the_archive(gpu, tmp_path):
    part = gpu.Part("good", python("open(sys.argv[1] + '.json', 'w').write('7')"))
    session(gpu, tmp_path).run([part])  # and is ended without a word
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        assert set(packed.getnames()) >= {"state.json", "good.log", "good.json"}
    session(gpu, tmp_path, folder="elsewhere").run([part])
    assert ran(tmp_path / "elsewhere", "good") == 1
    assert (tmp_path / "elsewhere" / "good.json").read_text() == "7"


ROWS = """
from gpu_rows import Rows
from pathlib import Path
rows = Rows(Path(sys.argv[1] + '.jsonl'))
def broken(): raise ValueError('wrong')
rows.measure('a', lambda: {'value': 1})
rows.measure('broken', broken)
rows.measure('crash', lambda: os.abort())
rows.measure('b', lambda: {'value': 2})
"""


def test_a_row_that_takes_its_process_along_is_tried_twice_and_left(gpu, tmp_path):
    code = f"sys.path.insert(0, {str(BENCHMARKS)!r}); exec({ROWS!r})"
    session(gpu, tmp_path).run([gpu.Part("rows", python(code), rows=True)])
    rows = {row["key"]: row for row in gpu.read_rows(tmp_path / "all" / "rows.jsonl")}
    assert state(tmp_path / "all") == {"rows": "done"} and ran(tmp_path / "all", "rows") == 3
    assert (rows["a"]["value"], rows["b"]["value"]) == (1, 2)
    assert rows["broken"]["failed"] == "ValueError: wrong"
    assert rows["crash"]["failed"] == "did not end, 2 times: it crashed or hung, as its log tells"


def test_a_line_that_was_cut_off_is_measured_again(gpu, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "value": 1}\n{"key": "b", "val')
    assert [row["key"] for row in gpu.read_rows(path)] == ["a"]
    rows = gpu.Rows(path)
    rows.measure("a", lambda: {"value": 5})
    rows.measure("b", lambda: {"value": 6})
    assert {r["key"]: r["value"] for r in gpu.read_rows(path)} == {"a": 1, "b": 6}


def test_parts_that_time_nothing_run_at_once(gpu, tmp_path):
    """Each of four goes on once all have begun."""
    wait = python(
        "import pathlib; mine = pathlib.Path(sys.argv[1] + '.begun'); mine.touch()\n"
        "while len(list(mine.parent.glob('*.begun'))) < 4: time.sleep(0.02)"
    )
    parts = [gpu.Part(name, wait, PATIENCE, together="checks") for name in "abcd"]
    session(gpu, tmp_path).run([*parts, gpu.Part("alone", python("pass"))])
    assert set(state(tmp_path / "all").values()) == {"done"}


def test_the_driver_is_asked_while_a_part_runs(gpu, tmp_path, monkeypatch):
    """It answers three times once the part has begun, which waits until that has been read."""
    tool, begun = tmp_path / "bin" / "nvidia-smi", tmp_path / "begun"
    tool.parent.mkdir()
    tool.write_text(
        f"#!/bin/sh\nwhile ! [ -e {begun} ]; do sleep 0.05; done\n"
        'for m in 100 900 300; do echo "1980, 3201, [N/A], 40, $m"; done\n'
        "echo nothing else\nexec sleep 600\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    watched = session(gpu, tmp_path)
    read = (
        f"import pathlib; pathlib.Path({str(begun)!r}).touch(); "
        "read = pathlib.Path(sys.argv[1]).with_name('nvidia-smi.csv')\n"
        "while not read.exists() or 'else' not in read.read_text(): time.sleep(0.02)"
    )
    watched.run([gpu.Part("bench-x", python(read))])
    watched.close()
    driver = json.loads((tmp_path / "all" / "state.json").read_text())["bench-x"]["driver"]
    assert driver["memory.used"] == [100, 300, 900] and driver["clocks.sm"] == [1980, 1980, 1980]
    assert "power.draw" not in driver


def test_a_session_that_is_ended_ends_its_part(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
from gpu_session import Part, Session
from pathlib import Path
s = Session(Path({str(tmp_path / "all")!r}), Path({str(tmp_path / "all.tar.gz")!r}), 10)
s.run([Part('long', [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); '
                     'time.sleep(600)'])])
"""
    ends_with_its_part(tmp_path, code)


def test_a_session_that_is_ended_ends_the_contender_of_an_agreement(tmp_path):
    """Which a script starts that is a part; it would take the card from the next session."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "whole").touch()
    contender = "import os, time; print(os.getpid(), file=sys.stderr); time.sleep(600)"
    command = [sys.executable, str(BENCHMARKS / "gpu_agreement.py"), "{out}", str(model), "S", "--",
               sys.executable, "-c", f"import sys; {contender}"]  # fmt: skip
    code = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
from gpu_session import Part, Session
from pathlib import Path
s = Session(Path({str(tmp_path / "all")!r}), Path({str(tmp_path / "all.tar.gz")!r}), 10)
s.run([Part('long', {command!r})])
"""
    ends_with_its_part(tmp_path, code)


def ends_with_its_part(tmp_path, code):
    """Ends a session twice whose part tells a process, which has to end with it."""
    log = tmp_path / "all" / "long.log"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        size = log.stat().st_size if log.exists() else 0

        def told(size=size):
            text = log.read_text() if log.exists() else ""
            return text[size:].endswith("\n") and text.splitlines()[-1].isdigit()

        until(told)
        child = int(log.read_text().splitlines()[-1])
        process.send_signal(number)
        process.wait(PATIENCE)
        if number == signal.SIGTERM:
            assert (tmp_path / "all.tar.gz").exists()
            part = json.loads((tmp_path / "all" / "state.json").read_text())["long"]
            assert (part["status"], part["lost"]) == ("stopped", 0)
        until(lambda child=child: not is_running(child))


def test_the_summary_takes_what_there_is(gpu, tmp_path):
    """Half a measurement, and nothing at all."""
    folder = tmp_path / "half"
    folder.mkdir()
    assert "== parts" in gpu.written.written(gpu.summary.summary(folder))
    driver = {"memory.used": [100.0, 500.0, 1100.0]}
    parts = {
        "device-dawn": {"status": "failed", "why": "no GPU was found"},
        "checks-wgpu-0": {"status": "done"},
        "ceilings-wgpu": {"status": "done"},
        "layers-S-64-wgpu": {"status": "stopped"},
        "attention-wgpu": {"status": "left out"},
        "bench-S-64-tune-wgpu": {"status": "done", "driver": driver},
        "peft-S-64": {"status": "done", "driver": driver},
        "losses-peft": {"status": "done"},
        "tests-0-wgpu": {"status": "stopped"},
    }
    launch = {"label": "gemm/forward", "path": "gemm/nt.wgsl", "shapes": {"x": [4, 8]},
              "flops": 10**6, "bytes": 100, "matrix_units": False}  # fmt: skip
    lines = {
        "checks-wgpu-0": [{"key": "own float32 rope 0", "good": True},
                          {"key": "own float32 linear 1", "good": False, "error": 0.5}],
        "ceilings-wgpu": [{"key": "gaps", "dispatch": 1e-6},
                          {"key": "ceilings, first", "flops_per_second": 1e12,
                           "bytes_per_second": 1e11, "matrix_flops_per_second": 0.0}],
        "layers-S-64-wgpu": [{"key": "default", "launches": [{**launch, "us": 4.0}]},
                             {"key": "tiled", "launches": [{**launch, "us": 2.0}]},
                             {"key": "matrix", "failed": "DeviceError: no"}],
    }  # fmt: skip
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    step = {"work_seconds": 0.4, "step_seconds": {"median": 0.5}, "flops_per_second": 1e9,
            "tokens_per_second": {"median": 300.0, "min": 200.0, "max": 400.0},
            "memory": {"peak": 500 << 20}, "host_share": 0.1, "seconds": {"compile": 2.0},
            "loss": 7.0, "kernels": None}  # fmt: skip
    (folder / "bench-S-64-tune-wgpu.json").write_text(json.dumps(step))
    peer = {"seconds": [9.0, 9.0, 1.0, 2.0, 4.0], "tokens_per_step": 400, "losses": [7.1],
            "device_mib": 1000, "versions": {}}  # fmt: skip
    (folder / "peft-S-64.json").write_text(json.dumps(peer))
    (folder / "losses-peft.json").write_text(json.dumps({"losses": [7.5, 7.25]}))
    (folder / "tests-0-wgpu.log").write_text(
        "[gw1] [ 10%] PASSED a::b\na::c FAILED [ 20%]\nFAILED a::c - why\n"
    )
    (folder / "state.json").write_text(json.dumps(parts))
    figures = gpu.summary.summary(folder)
    kernel = figures["layers"]["layers-S-64-wgpu"]["kernels"]["gemm/forward (x 4x8)"]
    assert (kernel["best"], kernel["gflops"], kernel["of_nearest"]) == ("tiled", 500.0, 0.5)
    assert figures["ratios"] == {
        "bench-S-64-tune-wgpu": {"speed": 1.5, "own_mib": 0.5, "driver_mib": 1.0}
    }
    assert figures["checks"]["rows"] == {"wgpu": 2} and len(figures["checks"]["bad"]) == 1
    text = gpu.written.written(figures)
    for expected in ("error 5.0e-01", "device-dawn: failed", "gap 100.0 ms", "7.25",
                     "'PASSED': 1, 'FAILED': 1", "failed: matrix: DeviceError: no"):  # fmt: skip
        assert expected in text, expected
