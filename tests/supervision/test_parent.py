"""What a supervisor does when its process ends, with a process that ends as the test wants."""

import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import PATIENCE, is_running, until

HERE = Path(__file__).parent
SUPERVISE = """\
import sys
from qlora_wgpu.supervision import parent
parent._command = lambda: [sys.executable, sys.argv[1]]
sys.exit(parent.supervise(sys.argv[2:]))
"""
# Its clock: each signal that it passes on takes the next of these seconds, and notes that.
CLOCK = """\
from types import SimpleNamespace
from qlora_wgpu.supervision import parent
seconds = iter((0.0, 0.9, 1.1))
def now():
    with open("clock", "a") as file:
        print(second := next(seconds), file=file)
    return second
parent.time = SimpleNamespace(monotonic=now)
"""


def command(*arguments, before=""):
    code = before + SUPERVISE
    return [sys.executable, "-c", code, str(HERE / "faulty_command.py"), *arguments]


def supervised(folder, *arguments):
    done = subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    attempts = (folder / "attempts").read_text().splitlines()
    return done, attempts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "words"),
    [("crash", "SIGABRT: Parent device is lost"), ("hang", "hangs (no response"), ("lost", "lost")],
)
def test_training_goes_on_from_the_newest_checkpoint(tmp_path, failure, words):
    done, attempts = supervised(
        tmp_path, "train", "--overwrite", f"1:open+save-1+save-2+{failure}", "2:save-3"
    )
    assert done.returncode == 0, done.stderr
    assert len(attempts) == 2
    assert attempts[1].endswith("device.submit_milliseconds=25 --resume")
    assert "--overwrite" not in attempts[1]
    note = done.stderr.splitlines()[-1]
    assert note.startswith("note: ") and words in note and "from save-2 with" in note
    assert "panicked" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "words"), [("try", " while checking gemm"), ("try+come-through", "")]
)
def test_a_crash_is_told_with_what_was_tried(tmp_path, steps, words):
    done, _ = supervised(tmp_path, "train", f"1:{steps}+crash", "2:crash", "3:")
    first, second = done.stderr.splitlines()
    assert f"(SIGABRT: Parent device is lost){words}; restarting" in first
    assert "checking" not in second  # that was the first one's


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_an_exit_code_of_0_counts_once_the_command_says_that_it_is_done(tmp_path, verb):
    done, attempts = supervised(tmp_path, verb, "1:try+vanish", "2:")
    assert "(exit code 0 before the command completed) while checking gemm" in done.stderr
    assert (done.returncode, len(attempts)) == ((0, 2) if verb == "train" else (2, 1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_crash_under_a_memory_limit_is_not_the_drivers(tmp_path):
    limit = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, resource.getrlimit(resource.RLIMIT_AS)[1]))"
    )
    done = subprocess.run(
        command("eval", "1:crash", before=limit + "\n"), cwd=tmp_path, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "driver" not in done.stderr
    assert "address space limited to 16,384 MiB (ulimit -v): raise that" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(
    ("limit", "steps", "said"),
    [
        ("address_space", "lost", "the GPU was lost, with no more than 1 MiB"),
        (
            "container_limit",
            "kill",
            "memory ran out (its container is limited to 5 MiB): check",
        ),
    ],
)
def test_a_limit_of_memory_is_told_with_how_a_process_ended(tmp_path, limit, steps, said):
    given = {"address_space": "'no more than 1 MiB'", "container_limit": str(5 << 20)}[limit]
    patch = f"from qlora_wgpu.supervision import parent\nparent.{limit} = lambda: {given}\n"
    done = subprocess.run(
        command("eval", f"1:{steps}", before=patch), cwd=tmp_path, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr and "update the driver" not in done.stderr


@pytest.mark.slow
def test_without_a_checkpoint_the_run_begins_again(tmp_path):
    done, attempts = supervised(tmp_path, "train", "1:open+crash", "2:")
    assert done.returncode == 0 and "from the beginning" in done.stderr
    assert attempts[1].endswith("--overwrite")


@pytest.mark.slow
def test_a_folder_that_was_not_opened_is_never_overwritten(tmp_path):
    _, attempts = supervised(tmp_path, "train", "1:crash", "2:")
    assert "--overwrite" not in attempts[1] and "--resume" not in attempts[1]


@pytest.mark.slow
def test_a_resumed_run_is_resumed_again(tmp_path):
    _, attempts = supervised(tmp_path, "train", "--resume", "1:open+crash", "2:")
    assert attempts[1].count("--resume") == 1 and "--overwrite" not in attempts[1]


@pytest.mark.slow
def test_each_attempt_asks_for_less_and_the_fourth_is_the_last(tmp_path):
    done, attempts = supervised(tmp_path, "train", *["n:open+save-1+crash"] * 9)
    assert done.returncode == 2
    dispatches = [word for line in attempts for word in line.split() if word.startswith("device.")]
    assert [int(word.partition("=")[2]) for word in dispatches] == [25, 5, 1]
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "save-1 is kept" in last and "doctor --check" in last


@pytest.mark.slow
def test_progress_gives_new_attempts(tmp_path):
    plans = [f"{n}:open+save-{n}+crash" for n in range(8)]
    done, attempts = supervised(tmp_path, "train", *plans, "8:")
    assert done.returncode == 0 and len(attempts) == 9


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["eval", "doctor"])
def test_other_commands_are_explained_and_not_repeated(tmp_path, verb):
    done, attempts = supervised(tmp_path, verb, "1:crash")
    assert done.returncode == 2 and len(attempts) == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the GPU driver crashed (SIGABRT")


@pytest.mark.slow
def test_a_mistake_is_not_repeated(tmp_path):
    done, attempts = supervised(tmp_path, "train", "1:mistake")
    assert done.returncode == 2 and len(attempts) == 1 and not done.stderr


@pytest.mark.slow
def test_a_process_killed_from_outside_is_not_repeated(tmp_path):
    done, attempts = supervised(tmp_path, "train", "1:open+kill")
    assert done.returncode == 2 and len(attempts) == 1
    assert "killed (SIGKILL)" in done.stderr


@contextmanager
def sleeping(folder, how="sleep", before=""):
    """A supervisor and the number of its process, which is ready for signals."""
    process = subprocess.Popen(
        command("train", f"1:{how}", before=before), cwd=folder, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = folder / "ready"
        until(lambda: ready.exists() and ready.read_text())
        yield process, int(ready.read_text())
    finally:
        process.kill()  # its own process ends with it, or after a while
        process.wait()
        process.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, 8)])
def test_signals_are_passed_on(tmp_path, number, code):
    with sleeping(tmp_path) as (process, _):
        process.send_signal(number)
        assert process.wait(PATIENCE) == code


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path, number):
    with sleeping(tmp_path, "open+deaf", before=CLOCK) as (process, child):
        process.send_signal(number)
        assert "press Ctrl-C again" in process.stderr.readline()
        process.send_signal(number)  # as `timeout` does, to the group: less than a second later
        until(lambda: (tmp_path / "clock").read_text().split() == ["0.0", "0.9"])
        assert process.poll() is None and is_running(child)
        process.send_signal(number)
        errors = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 128 + number and not errors
        assert (tmp_path / "clock").read_text().split() == ["0.0", "0.9", "1.1"]
        assert not is_running(child)


@pytest.mark.slow
def test_no_process_outlives_its_supervisor(tmp_path):
    with sleeping(tmp_path) as (process, child):
        process.kill()
        process.wait(PATIENCE)
        until(lambda: not is_running(child))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be cut there")
@pytest.mark.parametrize("kind", ["train", "generate"])
def test_a_file_that_is_cut_while_it_is_mapped(tmp_path, kind):
    done, attempts = supervised(tmp_path, kind, "1:open+save-1+cut" if kind == "train" else "1:cut")
    assert done.returncode == 2 and len(attempts) == 1
    (line,) = done.stderr.splitlines()
    path = tmp_path / "weights"
    assert line.startswith(f"error: {path} was truncated while it was read: 100 of 65,536 bytes")
    assert ("save-1 is kept, and --resume continues from it" in line) == (kind == "train")
