"""What a supervisor makes of how its process ended, without a process."""

import errno
import io
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import LOST
from qlora_wgpu.supervision import child, parent, processes
from qlora_wgpu.supervision.child import Journal
from qlora_wgpu.supervision.processes import HUNG, RESTART, crash_name

CRASH = -signal.SIGABRT
posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    monkeypatch.setattr(processes, "memory_limit", lambda: None)


@pytest.fixture
def supervised(monkeypatch, capsys):
    """Supervises a command whose attempts do as they are told: the code, attempts and words."""

    def run(*arguments, attempts):
        made, todo = [], iter(attempts)

        def one(arguments, journal, *, own_group):
            assert own_group == (arguments[0] in ("train", "worker"))
            journal.forget_process()
            made.append(" ".join(arguments))
            code, *notes = next(todo)
            for note in notes:
                note(journal)
            return code

        monkeypatch.setattr(parent, "_run", one)
        code = parent.supervise(arguments)
        assert next(todo, None) is None
        return code, made, capsys.readouterr().err.splitlines()

    return run


def opened(journal):
    journal.note_opened()


def done(journal):
    journal.note_done()


def saved(name):
    return lambda journal: journal.note_checkpoint(name)


def died(words):
    text = f"thread panicked at a.rs:1\n note: x\n{words}\nnote: y\nstack backtrace:\n 1\n"
    return lambda journal: journal.driver_log.write_text(text)


def test_training_goes_on_from_its_newest_checkpoint(supervised):
    code, made, told = supervised(
        "train", "a.yaml", "--overwrite",
        attempts=[(CRASH, opened, saved("step-1"), saved("step-2"), died("lost it")), (0, done)],
    )  # fmt: skip
    assert code == 0
    assert made[1] == "train a.yaml device.submit_milliseconds=25 --resume"
    assert told == [
        "note: the GPU driver crashed (SIGABRT: lost it); resuming from step-2 with "
        "device.submit_milliseconds=25"
    ]


@pytest.mark.parametrize(
    ("given", "notes", "last"),
    [
        ((), (), "device.submit_milliseconds=25"),  # whose folder may be another run's
        ((), (opened,), "--overwrite"),
        (("--overwrite",), (), "--overwrite"),
        (("--resume",), (opened,), "--resume"),
    ],
)
def test_without_a_checkpoint_a_run_begins_as_it_may(supervised, given, notes, last):
    code, made, told = supervised("train", *given, attempts=[(LOST, *notes), (0, done)])
    assert code == 0 and made[1].split()[-1] == last and made[1].count("--") == last.count("--")
    assert told[0].startswith("note: the GPU was lost; restarting from the beginning with")


def test_each_attempt_asks_for_less_and_the_fourth_is_the_last(supervised):
    crash = (HUNG, saved("step-1"), died("no answer"))
    code, made, told = supervised("train", attempts=[crash] * 4)
    assert code == 2 and made[0] == "train"
    assert [line.split("=")[1].split()[0] for line in made[1:]] == ["25", "5", "1"]
    assert told[-1].startswith(
        "error: the GPU driver hangs (no answer), 4 times in a row: step-1 is kept, and --resume "
        "continues from it; update the driver"
    )


def test_progress_gives_new_attempts(supervised):
    crashes = [(CRASH, saved(f"step-{n}")) for n in range(6)]
    code, made, _ = supervised("train", attempts=[*crashes, (0, done)])
    assert code == 0 and [line.split("=")[1].split()[0] for line in made[1:]] == ["25"] * 6
    # The first checkpoint is progress, too.
    crashes = [(CRASH,), (CRASH, saved("first"))]
    _, made, _ = supervised("train", attempts=[*crashes, (0, done)])
    assert [line.split("=")[1].split()[0] for line in made[1:]] == ["25", "25"]


def test_an_exit_before_anything_was_done_is_a_crash(supervised):
    code, made, told = supervised("merge", attempts=[(0,)])
    assert code == 2 and len(made) == 1
    assert told[0].startswith("error: the GPU driver crashed (exit code 0 before the")
    assert supervised("merge", attempts=[(0, done)]) == (0, ["merge"], [])


def test_what_needs_no_process_gets_none(supervised):
    for command in ([], ["push", "a"], ["init"], ["trian"], ["train", "--help"]):
        assert supervised(*command, attempts=[]) == (None, [], [])
    for command in (["generate", "--prompt", "--help"], ["train", "a", "--help"]):
        assert supervised(*command, attempts=[(3,)])[0] == 3


def test_what_was_tried_is_told_once(supervised):
    crash = (CRASH, lambda journal: journal.note_under_way("checking gemm"))
    _, _, told = supervised("train", attempts=[crash, (CRASH,), (0, done)])
    assert (
        "(SIGABRT) while checking gemm; restarting" in told[0]
        and "(SIGABRT); restarting" in told[1]
    )


@pytest.mark.parametrize(("ended", "code"), [(3, 3), (-signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_end_that_is_no_crash_is_handed_on(supervised, ended, code):
    for verb in ("generate", "train", "worker"):
        assert supervised(verb, attempts=[(ended,)]) == (code, [verb], [])


def test_a_process_that_is_killed_from_outside(supervised):
    for verb in ("generate", "train"):
        code, _, told = supervised(verb, attempts=[(-signal.SIGKILL,)])
        assert code == 2 and told[0].startswith("error: the process was killed (SIGKILL)")
    code, made, told = supervised("worker", attempts=[(-signal.SIGKILL,), (3,)])
    assert code == 3 and made == ["worker"] * 2
    assert told == ["note: the process was killed (SIGKILL); restarting"]


def test_a_crash_under_a_memory_limit_is_not_the_drivers(supervised, monkeypatch):
    monkeypatch.setattr(processes, "memory_limit", lambda: 3 << 30)
    _, _, told = supervised("eval", attempts=[(CRASH, died("why"))])
    assert told[0].startswith(
        "error: the process crashed (SIGABRT: why), with address space limited to 3,072 MiB "
        "(ulimit -v): raise that limit"
    )


@pytest.mark.parametrize("verb", ["train", "worker", "merge"])
def test_a_file_that_was_cut_while_it_was_mapped(supervised, tmp_path, verb):
    path, whole = tmp_path / "weights", tmp_path / "whole"
    path.write_bytes(bytes(100))
    whole.write_bytes(bytes(100))

    def mapped(journal):
        journal.note_mapped(str(tmp_path / "gone"), 1)
        journal.note_mapped(str(whole), 100)
        journal.note_mapped(str(path), 65_536)

    ended = (-signal.SIGBUS, mapped, *[saved("step-1")] * (verb == "train"))
    code, made, told = supervised(verb, attempts=[ended])
    assert code == 2 and made == [verb]
    kept = "; step-1 is kept, and --resume continues from it" if verb == "train" else ""
    assert told == [
        f"error: {path} was truncated while it was read: 100 of 65,536 bytes are left; copy or "
        f"download it again{kept}"
    ]
    crash = supervised("merge", attempts=[(CRASH, mapped)])[2]
    assert "driver crashed" in crash[0]


def test_a_worker_begins_anew_until_five_lives_were_short(supervised, monkeypatch):
    lives = [(0, 1), (10, 11), (20, 80), (100, 150), (200, 259), (300, 301), (400, 401)]
    seconds = (second for life in lives for second in life)
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    code, made, told = supervised("worker", attempts=[(CRASH,)] * 7)
    assert code == 2 and len(made) == 7
    assert told[:6] == ["note: the GPU driver crashed (SIGABRT); restarting"] * 6
    assert "(SIGABRT), 5 times in a row: update" in told[6]
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert len(supervised("worker", attempts=[(CRASH,)] * 5)[1]) == 5


def test_a_worker_that_its_scheduler_left_begins_anew_in_silence(supervised):
    assert supervised("worker", attempts=[(RESTART,)] * 9 + [(3,)])[::2] == (3, [])


class Noted:
    """A process that notes what is done to it."""

    def __init__(self):
        self.done, self.ended = [], None

    def poll(self):
        return self.ended

    def send_signal(self, number):
        self.done.append(number)

    def kill(self):
        self.done.append("killed")


def test_the_second_wish_ends_a_training_run_and_what_comes_with_the_first_is_none(
    monkeypatch, tmp_path, capsys
):
    seconds = iter((0.0, 0.9, 1.1))
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    journal, process = Journal(0, tmp_path), Noted()
    journal.note_opened()
    forwarder = parent._SignalForwarder(process, journal, is_graceful=True)
    forwarder.forward(signal.SIGTERM)
    assert "press Ctrl-C again" in capsys.readouterr().err
    forwarder.forward(signal.SIGTERM)
    assert process.done == [signal.SIGTERM] and forwarder.killed_by is None
    forwarder.forward(signal.SIGINT)
    assert process.done == [signal.SIGTERM, "killed"] and forwarder.killed_by == signal.SIGINT


def test_a_run_that_has_ended_by_itself_is_not_killed(monkeypatch, tmp_path, capsys):
    seconds = iter((0.0, 9.0))
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    process = Noted()
    forwarder = parent._SignalForwarder(process, Journal(0, tmp_path), is_graceful=True)
    forwarder.forward(signal.SIGTERM)
    process.ended = 0
    forwarder.forward(signal.SIGTERM)
    assert process.done == [signal.SIGTERM] and forwarder.killed_by is None
    assert not capsys.readouterr().err  # nothing is saved before the run's folder is opened


def test_other_commands_are_asked_as_often_as_somebody_asks(tmp_path, capsys):
    process = Noted()
    forwarder = parent._SignalForwarder(process, Journal(0, tmp_path), is_graceful=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        forwarder.forward(number)
    assert process.done == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    assert forwarder.killed_by is None and not capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_gets_its_cursor_and_a_line_back(monkeypatch, tmp_path, stream):
    seconds = iter((5.0, 6.0, 6.1))  # exactly a second is still the same wish
    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    out, err = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    journal, process = Journal(0, tmp_path), Noted()
    journal.note_opened()
    forwarder = parent._SignalForwarder(process, journal, is_graceful=True)
    for _ in range(2):
        forwarder.forward(signal.SIGINT)
    assert process.done == [signal.SIGINT] and not out.getvalue()
    forwarder.forward(signal.SIGINT)
    assert process.done == [signal.SIGINT, "killed"]
    assert out.getvalue() == ("\x1b[?25h\n" if stream is Terminal else "")
    before, note, _ = err.getvalue().partition("note: stopping and saving")
    assert note and ("\n" in before) == (stream is Terminal)


@posix
@pytest.mark.cover("all")
@pytest.mark.parametrize(("graceful", "ignored"), [(True, False), (False, False), (True, True)])
def test_signals_are_passed_on_while_a_process_runs(tmp_path, graceful, ignored):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTSTP)
    own = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    if ignored:  # as nohup has it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in numbers]
    process = Noted()
    forwarder = parent._SignalForwarder(process, Journal(0, tmp_path), is_graceful=graceful)
    try:
        with forwarder as entered:
            during = [signal.getsignal(number) for number in numbers]
        after = [signal.getsignal(number) for number in numbers]
    finally:
        for number, handler in zip(numbers, own, strict=True):
            signal.signal(number, handler)
    assert entered is forwarder and after == before
    assert during == [
        forwarder.forward,
        forwarder.forward if graceful else signal.SIG_IGN,
        signal.SIG_IGN if ignored else forwarder.forward,
        forwarder._pause if graceful else signal.SIG_DFL,
    ]


@posix
def test_a_pause_stops_both_processes_and_ends_with_the_supervisors(monkeypatch, tmp_path):
    process = Noted()
    monkeypatch.setattr(os, "kill", lambda *how: process.done.append(how))
    forwarder = parent._SignalForwarder(process, Journal(0, tmp_path), is_graceful=True)
    forwarder._pause(signal.SIGTSTP, None)
    own = (os.getpid(), signal.SIGSTOP)
    assert process.done == [signal.SIGSTOP, own, signal.SIGCONT]


@posix
@pytest.mark.cover("all")
@pytest.mark.parametrize(
    ("own_group", "pending", "killed_by"),
    [(True, True, None), (False, True, None), (False, False, None), (True, False, signal.SIGINT)],
)
def test_a_process_is_begun_with_its_journal_and_waited_for(
    monkeypatch, tmp_path, own_group, pending, killed_by
):
    journal, begun, around = Journal(7, tmp_path), [], signal.getsignal(signal.SIGTERM)
    journal.note_done()  # by the process before

    class Process(Noted):
        def __init__(self, command, *, env, process_group):
            super().__init__()
            begun.append(self)
            self.command, self.env, self.group = command, env, process_group
            self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

        def wait(self):
            forwarder = signal.getsignal(signal.SIGTERM).__self__
            forwarder.killed_by = killed_by
            return 3

    monkeypatch.setattr(parent, "subprocess", SimpleNamespace(Popen=Process))
    monkeypatch.setattr(parent, "is_pending", lambda number: pending and number == signal.SIGINT)
    code = parent._run(["train", "a"], journal, own_group=own_group)
    (process,) = begun
    assert code == (3 if killed_by is None else 128 + killed_by)
    assert process.command == [*parent._command(), "train", "a"]
    assert process.env == journal.environment() and not journal.is_done
    assert process.group == (0 if own_group else None)  # a group's own Ctrl-C is forwarded
    assert process.done == ([signal.SIGINT] if pending and not own_group else [])
    assert {signal.SIGINT, signal.SIGTERM} <= process.blocked
    assert signal.getsignal(signal.SIGTERM) == around


@pytest.mark.parametrize(
    ("safe", "path", "is_searched"),
    [(False, ".", True), (False, "/elsewhere", False), (True, ".", False)],
)
def test_the_working_directory_is_searched_only_if_it_was(monkeypatch, safe, path, is_searched):
    monkeypatch.setattr(sys, "path", [str(Path(path).absolute()), "/more"])
    flags = SimpleNamespace(safe_path=safe)
    own = SimpleNamespace(flags=flags, path=sys.path, executable="python")
    monkeypatch.setattr(parent, "sys", own)
    kept = [] if is_searched else ["-P"]
    assert parent._command() == ["python", *kept, "-m", "qlora_wgpu"]


def gone(*_):
    raise FileNotFoundError(errno.ENOENT, "No such thing")


@pytest.mark.parametrize(
    ("owner", "name", "told"),
    [
        (Path, "cwd", "the working directory cannot be used (No such thing): change to another"),
        (tempfile, "gettempdir", "no folder for temporary files is writable: set TMPDIR to one"),
    ],
)
def test_a_folder_that_every_command_needs_is_asked_for(supervised, monkeypatch, owner, name, told):
    monkeypatch.setattr(owner, name, gone)
    code, _, said = supervised("train", attempts=[])
    assert code == 2 and said[0].startswith(f"error: {told}")


def test_a_journal_is_handed_to_the_next_process_alone(monkeypatch, tmp_path):
    journal = Journal(7, tmp_path)
    for name, value in journal.environment().items():
        monkeypatch.setenv(name, value)
    assert Journal.inherited() == journal and Journal.inherited() is None
    for wrong in ("a:b", "7", ""):
        monkeypatch.setenv("QLORA_WGPU_SUPERVISOR", wrong)
        assert Journal.inherited() is None


@pytest.mark.parametrize(
    ("code", "name"), [(3, "exception 0x3"), (0xC0000005, "exception 0xc0000005"), (2, None)]
)
def test_windows_tells_a_crash_by_its_code(code, name):
    assert crash_name(code, windows=True) == name
    assert crash_name(code, windows=False) is None


# ---- the supervised process ----------------------------------------------------------------------


@posix
def test_native_output_goes_to_a_file_and_pythons_stays(monkeypatch, tmp_path):
    journal, done = Journal(7, tmp_path), []
    journal.driver_log.write_text("of the process before")
    opened, own_stderr = os.open, tmp_path / "stderr"
    own = SimpleNamespace(
        dup=lambda number: done.append(("dup", number)) or opened(own_stderr, flags, 0o600),
        dup2=lambda log, number: done.append((os.path.samestat(os.fstat(log), kept()), number)),
        open=opened, close=os.close, fdopen=os.fdopen, O_WRONLY=os.O_WRONLY, O_CREAT=os.O_CREAT,
        O_TRUNC=os.O_TRUNC,
    )  # fmt: skip
    flags, kept = os.O_WRONLY | os.O_CREAT, journal.driver_log.stat
    streams = SimpleNamespace(stderr=io.TextIOWrapper(io.BytesIO(), "ascii", "backslashreplace"))
    monkeypatch.setattr(child, "os", own)
    monkeypatch.setattr(child, "sys", streams)
    child._redirect_native_stderr(journal)
    assert done == [("dup", 2), (True, 2)]
    assert journal.driver_log.read_text() == ""
    streams.stderr.write("\xe9\n")  # a line at a time
    assert (tmp_path / "stderr").read_text() == "\\xe9\n"
    streams.stderr.close()


@posix
def test_a_log_of_native_output_is_created_for_its_user_alone(monkeypatch, tmp_path):
    journal = Journal(7, tmp_path)
    own = SimpleNamespace(**{name: getattr(os, name) for name in
                             ("open", "close", "O_WRONLY", "O_CREAT", "O_TRUNC")})  # fmt: skip
    own.dup = own.fdopen = lambda *given, **how: None
    own.dup2 = lambda log, number: os.write(log, b"panicked at x\nno room\n")
    monkeypatch.setattr(child, "os", own)
    monkeypatch.setattr(
        child, "sys", SimpleNamespace(stderr=SimpleNamespace(flush=print, encoding="", errors=""))
    )
    child._redirect_native_stderr(journal)
    assert journal.driver_log.stat().st_mode & 0o777 == 0o600
    assert journal.panic_message() == "no room"


@posix
def test_a_process_ends_with_its_supervisor(monkeypatch):
    parents, done = iter((7, 7, 1)), []
    monkeypatch.setattr(child, "os", SimpleNamespace(getppid=lambda: next(parents)))
    monkeypatch.setattr(child, "time", SimpleNamespace(sleep=done.append))
    monkeypatch.setattr(
        child, "signal",
        SimpleNamespace(SIGTERM="term", pthread_kill=lambda *what: done.append(what)),
    )  # fmt: skip
    child._end_with(7)
    assert done == [0.5, 0.5, (threading.main_thread().ident, "term")]


def test_a_process_ends_with_its_supervisor_on_windows(monkeypatch):
    done = []
    kernel = SimpleNamespace(
        OpenProcess=lambda *what: done.append(what) or "handle",
        WaitForSingleObject=lambda *what: done.append(what),
    )
    windows = SimpleNamespace(windll=SimpleNamespace(kernel32=kernel))
    raised = SimpleNamespace(SIGTERM="term", raise_signal=done.append)
    for name, own in (("ctypes", windows), ("signal", raised),
                      ("sys", SimpleNamespace(platform="win32"))):  # fmt: skip
        monkeypatch.setattr(child, name, own)
    child._end_with(7)
    assert done == [(0x100000, False, 7), ("handle", 0xFFFFFFFF), "term"]


def test_a_process_ends_when_its_driver_hangs(monkeypatch):
    said, done = iter((None, None, "no response")), []
    monkeypatch.setattr(child, "time", SimpleNamespace(sleep=done.append))
    own = SimpleNamespace(
        write=lambda *what: done.append(what), _exit=lambda code: done.append(code)
    )
    monkeypatch.setattr(child, "os", own)
    child._end_when(lambda: next(said))
    assert done == [0.5, 0.5, (2, b"panicked at\nno response\n"), HUNG]


def test_what_watches_a_process_does_not_keep_it(monkeypatch, tmp_path):
    begun = []

    class Thread:
        def __init__(self, *, target, args, daemon):
            begun.append((target, args, daemon))

        def start(self):
            begun.append("started")

    monkeypatch.setattr(child, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(child, "_redirect_native_stderr", begun.append)
    journal = Journal(7, tmp_path)
    child.begin(journal)
    child.end_if_hung(print)
    assert begun == [
        journal, (child._end_with, (7,), True), "started", (child._end_when, (print,), True),
        "started",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", ""),
        ("all is well", ""),
        ("thread panicked at a.rs:1\n", ""),
        ("panicked at a.rs:1\nfirst\n\nnote: x\npanicked at b.rs\nsecond\n\n", "second"),
        ("panicked at a.rs:1\n one\n two \nnote: x\nstack backtrace:\n 1: f\n", "two"),
    ],
)
def test_a_panic_is_its_last_line(tmp_path, said, message):
    journal = Journal(7, tmp_path)
    assert journal.panic_message() == ""
    journal.driver_log.write_text(said)
    assert journal.panic_message() == message


def test_what_a_process_notes_is_told_by_kind(tmp_path):
    journal = Journal(7, tmp_path)
    assert (journal.is_done, journal.has_opened, journal.under_way()) == (False, False, "")
    assert journal.checkpoints() == [] and journal.truncated_files() == []
    for name in ("one", "two"):
        journal.note_checkpoint(tmp_path / name)
        journal.note_under_way(name)
    journal.note_done()
    journal.note_opened()
    assert journal.is_done and journal.has_opened and journal.under_way() == "two"
    assert journal.checkpoints() == [str(tmp_path / "one"), str(tmp_path / "two")]
    journal.forget_process()
    journal.forget_process()
    assert (journal.is_done, journal.has_opened, journal.under_way()) == (False, True, "")
    assert len(journal.checkpoints()) == 2
