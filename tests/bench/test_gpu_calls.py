"""The calls of a GPU's measurement: what is measured where a backend does not open the GPU."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The scripts, as a run in their folder finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    import gpu_calls
    import gpu_prepare
    import gpu_session

    yield SimpleNamespace(calls=gpu_calls, prepare=gpu_prepare, session=gpu_session)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("opened", ["dawn", "wgpu"])
def test_what_opens_the_gpu_is_measured(scripts, tmp_path, opened, call):
    session = SimpleNamespace(folder=tmp_path)
    calls = scripts.calls.Calls(scripts.calls.Sizes(), session, ["dawn", "wgpu"], "python")
    assert [part.name for part in calls.devices()] == ["device-dawn", "device-wgpu"]
    before = {part.needs for part in calls.parts(call)}
    assert "device-dawn" in before
    calls.measure_with([opened])
    parts = calls.parts(call)
    assert {part.needs for part in parts} <= {"", f"device-{opened}", "torch"}
    assert len({part.name for part in parts}) == len(parts)
    assert sum(part.name.startswith(("bench-", "layers-")) for part in parts) > 1


def test_call_4_explores_alone_what_dawn_opens(scripts, tmp_path, monkeypatch):
    import gpu

    session = SimpleNamespace(folder=tmp_path, run=lambda parts, **_: ran.append(parts))
    calls = scripts.calls.Calls(scripts.calls.Sizes(), session, ["dawn", "wgpu"], "python")
    for call, count in ((4, 3), (2, 30)):
        ran: list = []
        gpu.run(calls, session, call)
        assert [len(parts) >= count for parts in ran] == [True, True]
        explorers = [part for part in ran[0] if part.name.startswith("explore")]
        assert [p.name for p in explorers] == (
            ["explore", "explore-attention", "explore-gradients"] if call == 4 else []
        )
    for part in calls.parts(4):
        command = " ".join(part.command)
        minutes = float(part.command[part.command.index("--minutes") + 1])
        assert 60 * minutes < part.seconds and part.rows and "--small" not in command
        assert Path(part.command[1]).exists() and scripts.calls.REGISTERS.exists()
    calls.measure_with(["wgpu"])
    assert not calls.parts(4)


def test_no_part_asks_for_more_time_than_it_is_given_or_a_call_has(scripts, tmp_path):
    session = SimpleNamespace(folder=tmp_path)
    calls = scripts.calls.Calls(scripts.calls.Sizes(), session, ["dawn", "wgpu"], "python")
    for part in (part for call in (1, 2, 3, 4) for part in calls.parts(call)):
        assert part.least < part.seconds < 4.75 * 60, part.name


@pytest.mark.parametrize("driver", ["", "/usr/local/nvidia/nvidia_icd.json"])
def test_the_setup_goes_on_without_a_driver_of_nvidias(scripts, tmp_path, driver):
    """A shell that stops at the first failure, and one that goes on only if it succeeded."""
    wheel = tmp_path / "one.whl"
    wheel.write_text("1")
    count = tmp_path / "count"
    tools = {
        "python3": f"""case "$1" in
            -m) echo pip >> {count}; while [ "$1" != --target ]; do shift; done; mkdir -p "$2";;
            *) [ -z "{driver}" ] || echo "export VK_DRIVER_FILES={driver}";;
        esac""",
        "ldconfig": "echo libvulkan.so.1",
    }
    for name, code in tools.items():
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{code}\n")
        tool.chmod(0o755)
    # It was prepared in a folder that this machine has not.
    (tmp_path / "setup.sh").write_text(scripts.prepare.SETUP.format(folder="/prepared/there"))
    shell = f'set -e; . {tmp_path}/setup.sh && echo "went on with $VK_DRIVER_FILES $PYTHONPATH"'
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}

    def run():
        done = subprocess.run(["bash", "-c", shell], env=path, capture_output=True, text=True)
        assert done.stdout.startswith(f"went on with {driver} {tmp_path}/"), done.stderr
        return done.stdout.split("/")[-1]

    first = run()
    assert run() == first and count.read_text() == "pip\n"  # what is installed stays
    wheel.write_text("2")
    assert run() != first and count.read_text() == "pip\n" * 2


def session_of(scripts, tmp_path, kinds):
    """A session in which backends opened GPUs of some kinds."""
    state = {}
    for backend, kind in kinds.items():
        row = {"key": "about", "name": f"card of {backend}", "info": {"adapter_type": kind}}
        (tmp_path / f"device-{backend}.jsonl").write_text(json.dumps(row) + "\n")
        state[f"device-{backend}"] = {"status": "done"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    return scripts.session.Session(tmp_path, tmp_path / "all.tar.gz", 1.0)


def test_a_software_gpu_is_not_measured_as_a_card(scripts, tmp_path):
    calls = scripts.calls
    session = session_of(scripts, tmp_path, {"dawn": "CPU", "wgpu": "DiscreteGPU"})
    of_cards = calls.Calls(calls.Sizes(), session, ["dawn", "wgpu"], "python")
    assert of_cards.opened(session) == {"wgpu": "card of wgpu"}
    to_try = calls.Calls(calls.SMALL, session, ["dawn", "wgpu"], "python")
    assert set(to_try.opened(session)) == {"dawn", "wgpu"}


def test_speed_beside_rivals_comes_right_after_the_check_of_own_kernels(scripts, tmp_path):
    session = SimpleNamespace(folder=tmp_path)
    calls = scripts.calls.Calls(scripts.calls.Sizes(), session, ["dawn", "wgpu"], "python")
    names = [part.name for part in calls.parts(1)]
    assert names[:11] == [
        "doctor", "own-dawn", "own-wgpu", "torch", "bench-llama-3.2-1b-1024-dawn",
        "rivals-llama-3.2-1b-dawn", "layers-llama-3.2-1b-1024-dawn", "bench-llama-3.1-8b-1024-dawn",
        "rivals-llama-3.1-8b-dawn", "layers-llama-3.1-8b-1024-dawn", "attention-dawn",
    ]  # fmt: skip
    parts = [part for call in (1, 2, 3) for part in calls.parts(call)]
    peers = [part for part in parts if part.name.startswith(("peft", "generation"))]
    assert {part.needs for part in peers} == {"torch"} and len(peers) == 4
    for shape in ("llama-3.2-1b", "llama-3.1-8b"):
        last = [part for part in parts if part.name == f"rivals-{shape}-compiled-dawn"]
        assert len(last) == 1 and "peft-compile-graphs" in last[0].command and last[0].rows
    texts = [part.command for part in parts if part.name.endswith("-texts-dawn")]
    assert [c[c.index("--texts") + 1 :][:3] for c in texts] == [["1", "8", "64"]] * 2


@pytest.mark.full
def test_without_a_card_a_call_ends_and_tells_where_it_looked(scripts, tmp_path):
    """Here, where there is a software GPU only."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), str(tmp_path / "all"), "--call", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    short = done.stdout[done.stdout.index("== IN SHORT") :]
    assert "NO CARD was opened" in short and "as it is: no card (software: llvmpipe" in short
    state = json.loads((tmp_path / "all" / "state.json").read_text())
    assert set(state) == {"device-dawn", "device-wgpu"}  # the one that is not installed, too
    assert "nvidia-smi" in (tmp_path / "all" / "driver.txt").read_text()
