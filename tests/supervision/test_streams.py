"""Standard streams that are closed from the start, have no reader, or are full."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from e2e.tiny import write_chats, write_model

from qlora_wgpu.cli._display import TrainingDisplay
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.supervision import streams
from qlora_wgpu.supervision.streams import Output

CLOSED = "import os; [os.close(i) for i in {}]; os.execv({!r}, {!r})"
COMMAND = [sys.executable, "-m", "qlora_wgpu"]
FULL = Path("/dev/full")
INIT = ("init", "--model", "model", "--data", "chats.jsonl")
NO_ROOM = "the standard output: No space left on device"
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", 4)
    (tmp_path / "data.yaml").write_text("{model: {path: model}, data: {train: chats.jsonl}}")
    return tmp_path


def run(*arguments, cwd, **streams):
    """A command, its streams buffered as a user's are."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [*COMMAND, *arguments], text=True, check=False, cwd=cwd, env=environment, **streams
    )


# ---- closed from the start, as services and cron begin some commands -----------------------------


@pytest.mark.cover(closed=[(0, 1, 2)])
@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_they_end_as_with_streams(closed, tmp_path):
    code = CLOSED.format(closed, sys.executable, [*COMMAND, "data", "none.yaml"])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    told = "" if 2 in closed else "error: the configuration file none.yaml does not exist"
    assert done.stderr.strip() == told


def test_what_is_opened_next_takes_no_streams_place(tmp_path):
    program = (
        "from qlora_wgpu.supervision.streams import replace_closed\n"
        "replace_closed()\n"
        "import os, sys\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "print('on stdout')\n"
        "os.write(1, b'of native code')\n"
        "sys.exit(0 if file.fileno() > 2 and sys.stdin.read() == '' else 'a number is taken')\n"
    )
    close = CLOSED.format((0, 1), sys.executable, [sys.executable, "-c", program])
    done = subprocess.run([sys.executable, "-c", close], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_bytes() == b""


# ---- a pipe that nobody reads, as `| head -1` leaves it ------------------------------------------


def into_closed(*arguments, cwd, both=False):
    """The exit code of a command, and what it says on stderr unless that is closed, too."""
    read, written = os.pipe()
    os.close(read)
    try:
        done = run(*arguments, cwd=cwd, stdout=written, stderr=written if both else subprocess.PIPE)
    finally:
        os.close(written)
    return done.returncode, done.stderr or ""


@pytest.mark.cover(arguments=[INIT])
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("train", "--help"), ("--version",), ("estimate", "model"), INIT],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_it_goes_on_to_its_own_end(folder, arguments):
    assert into_closed(*arguments, cwd=folder) == (0, "")
    assert (folder / "run.yaml").is_file() == (arguments is INIT)


@pytest.mark.full
def test_texts_that_nobody_reads_are_no_error(folder):
    code, told = into_closed("data", "data.yaml", "--json", cwd=folder)
    assert code == 0 and "Traceback" not in told


@pytest.mark.cover(arguments=[("estimate", "nowhere")])
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("estimate", "nowhere"), ("estimate", "--nothing")])
def test_an_error_that_nobody_reads_keeps_its_exit_code(folder, arguments):
    assert into_closed(*arguments, cwd=folder, both=True)[0] == 2


def test_a_pipe_without_a_reader_is_one_on_windows(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EINVAL, "Invalid argument")

    with pytest.raises(QLoRAError, match="to the standard output: Invalid argument"):
        Output(Closed()).write("text")
    monkeypatch.setattr(streams, "_BROKEN_PIPE", (errno.EPIPE, errno.EINVAL))
    with pytest.raises(SystemExit) as end:
        Output(Closed()).write("text")
    assert end.value.code == 0
    assert Output(Closed(), ignore_broken_pipe=True).write("text") == 4


def test_nothing_is_tried_again_once_nobody_reads():
    """Windows tells it once, and drops what was written."""

    class Once(io.StringIO):
        def flush(self):
            self.times = getattr(self, "times", 0) + 1
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    raw = Once()
    stream = Output(raw, ignore_broken_pipe=True)
    for _ in range(3):
        stream.write("text")
        stream.flush()
    assert (raw.times, raw.getvalue()) == (1, "text")


def test_what_is_written_to_stderr_for_its_own_sake_never_fails(monkeypatch):
    raw = Full()
    stream = streams.best_effort(raw)
    for text in ("a" * 40, "b", "c"):
        assert stream.write(text) == len(text)
    stream.flush()
    assert raw.getvalue() == "a" * 40

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert streams.best_effort(streams.best_effort(Closed())).write("a") == 1


def test_a_full_disk_is_told_once_where_a_run_goes_on(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    output = Output(Full(), ignore_errors=True)
    for _ in range(3):
        output.write("a" * 41)
    text = f"warning: no more output ({os.strerror(errno.ENOSPC)}); the run continues\n"
    assert told.getvalue() == text
    monkeypatch.setattr(sys, "stderr", full := Full())
    Output(full, ignore_errors=True).write("a" * 41)  # there is nowhere to tell it
    assert full.getvalue() == ""


@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.cover("all")
def test_a_pipe_that_nobody_reads_ends_a_command_unless_it_goes_on(broken, ignores):
    class Faulty(io.StringIO):
        def flush(self):
            raise OSError(errno.EPIPE if broken else errno.EIO, "no")

    stream = Output(Faulty(), ignore_broken_pipe=ignores)
    if broken and ignores:
        stream.flush()
        return
    with pytest.raises(SystemExit if broken else QLoRAError) as end:
        stream.flush()
    assert not broken or end.value.code == 0


@pytest.mark.parametrize("closed", [(), (0,), (1, 2)])
def test_closed_streams_are_replaced_by_the_null_device(monkeypatch, closed):
    done, free = [], sorted({*closed, 7})

    def fstat(number):
        if number in closed:
            raise OSError(errno.EBADF, "closed")

    own = SimpleNamespace(
        fstat=fstat, open=lambda *how: free.pop(0) if len(closed) < 2 else 7, devnull=os.devnull,
        O_RDWR=os.O_RDWR, dup2=lambda *what: done.append(("dup2", *what)),
        close=lambda number: done.append(("close", number)),
        set_inheritable=lambda *what: done.append(("inherited", *what)),
    )  # fmt: skip
    monkeypatch.setattr(streams, "os", own)
    given = {name: None if number in closed else io.StringIO()
             for number, name in enumerate(("stdin", "stdout", "stderr"))}  # fmt: skip
    namespace = SimpleNamespace(**given)
    monkeypatch.setattr(streams, "sys", namespace)
    streams.replace_closed()
    expected = [("inherited", 0, True)] if closed == (0,) else []  # it took the free number
    if len(closed) == 2:
        expected = [each for n in closed
                    for each in (("dup2", 7, n), ("close", 7), ("inherited", n, True))]  # fmt: skip
    assert done == expected
    for number, name in enumerate(given):
        stream = getattr(namespace, name)
        if number not in closed:
            assert stream is given[name]
        elif number == 0:
            assert stream.read() == ""
        else:
            assert stream.write("text") == 4
            stream.close()


def test_streams_escape_what_they_cannot_write(monkeypatch):
    made = {name: io.TextIOWrapper(io.BytesIO(), "ascii") for name in ("stdin", "stdout", "stderr")}
    namespace = SimpleNamespace(**made)
    monkeypatch.setattr(streams, "sys", namespace)
    streams.guard_streams()
    assert (made["stdout"].errors, made["stdin"].errors) == ("backslashreplace", "strict")
    for name in ("stdout", "stderr"):
        getattr(namespace, name).write("\xe9")
        getattr(namespace, name).flush()
        assert made[name].buffer.getvalue() == b"\\xe9"
    monkeypatch.setattr(streams, "sys", SimpleNamespace(**dict.fromkeys(made)))
    streams.guard_streams()


def test_what_cannot_be_written_at_the_end_is_dropped(monkeypatch):
    dropped, flushed = [], []

    class Stream:
        def __init__(self, error):
            self.error = error

        def flush(self):
            flushed.append(self.error)
            if self.error:
                raise self.error

    monkeypatch.setattr(streams, "redirect_to_devnull", dropped.append)
    full = Stream(OSError("full"))
    for first in (full, Stream(ValueError("closed")), Stream(None)):
        monkeypatch.setattr(
            streams, "sys", SimpleNamespace(stdout=Output(first), stderr=Stream(None))
        )
        streams.drop_unwritable()
    assert dropped == [full] and len(flushed) == 6


# ---- a disk that is full: it is said, and the exit code is 2 -------------------------------------


@pytest.mark.cover(arguments=[("data", "data.yaml", "--json")])
@needs_full
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("train", "--help"), ("estimate", "model"), ("data", "data.yaml"),
     ("data", "data.yaml", "--json")],
    ids=" ".join,
)  # fmt: skip
def test_stdout_that_is_full(folder, arguments):
    with FULL.open("w") as full:
        done = run(*arguments, cwd=folder, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.endswith(NO_ROOM)
    assert "Exception" not in done.stderr


@pytest.mark.cover(arguments=[("train", "nosuch.yaml")])
@needs_full
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("train", "nosuch.yaml"), ("train",), ("nosuch",), ("estimate", "model", "--nothing")],
    ids=" ".join,
)
def test_stderr_that_is_full_leaves_the_exit_code(folder, arguments):
    with FULL.open("w") as full:
        both = run(*arguments, cwd=folder, stdout=full, stderr=full)
        one = run(*arguments, cwd=folder, stdout=subprocess.PIPE, stderr=full)
    assert (both.returncode, one.returncode, one.stdout) == (2, 2, "")


@needs_full
@pytest.mark.slow
def test_a_command_does_not_hang_on_what_stderr_takes(folder):
    with FULL.open("w") as full:
        done = run("estimate", "model", cwd=folder, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == 0 and "model" in done.stdout


class Full(io.StringIO):
    """A disk that is full after some characters."""

    room = 40

    def write(self, text):
        if self.tell() + len(text) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_elsewhere_a_full_disk_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(QLoRAError, match="No space left"):
        Terminal().print("a" * 50)


# ---- what a run shows, which neither ends --------------------------------------------------------


def test_a_display_outlives_a_full_disk(monkeypatch):
    full, told = Full(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", full)
    monkeypatch.setattr(sys, "stderr", told)
    with TrainingDisplay(Terminal(ignore_errors=True)) as display:
        for text in ("one", "two", "a" * 50, "b"):
            display.note(text)
        display.activity("reading")
    assert full.getvalue() == "note: one\nnote: two\n"
    assert told.getvalue() == (
        "warning: no more output (No space left on device); the run continues\n"
    )


def test_a_program_without_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Terminal(ignore_errors=True).print("nothing")


SHOWS = """
import sys
from qlora_wgpu.cli._terminal import Terminal
console = Terminal(ignore_errors=True)
for number in range(3):
    console.print("x" * 70000)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_a_closed_pipe_ends_nothing(both):
    as_in_runs = 'import os, sys\nsys.stderr = os.fdopen(os.dup(2), "w", buffering=1)\n'
    program = as_in_runs + SHOWS if both else SHOWS + 'sys.stderr.write("done")'
    process = subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE,
    )  # fmt: skip
    process.stdout.read(10)
    process.stdout.close()
    _, told = process.communicate("\n" * 3)
    assert process.returncode == 0
    warning = "warning: no more output (Broken pipe); the run continues\ndone"
    assert told == (None if both else warning)
