"""Commands that are begun without standard streams, as services and cron begin some."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qlora_wgpu.supervision import streams
from qlora_wgpu.supervision.streams import NamedStream

CLOSED = "import os; [os.close(i) for i in {}]; os.execv({!r}, {!r})"


def run_without(closed, *args, cwd):
    """A command that is begun with these of its standard streams closed."""
    command = [sys.executable, "-m", "qlora_wgpu", *args]
    code = CLOSED.format(closed, sys.executable, command)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


@pytest.mark.cover(closed=[(1,), (0, 1, 2)])
@pytest.mark.slow
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_they_end_as_with_streams(closed, tmp_path):
    done = run_without(closed, "data", "none.yaml", cwd=tmp_path)
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


def test_a_pipe_without_a_reader_is_one_on_windows(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(errno.EINVAL, "Invalid argument")

    stream = NamedStream(Closed(), "the standard output")
    with pytest.raises(OSError, match="Invalid argument: 'the standard output'") as told:
        stream.write("text")
    assert not isinstance(told.value, BrokenPipeError)
    monkeypatch.setattr(streams, "_OF_CLOSED_PIPES", (errno.EPIPE, errno.EINVAL))
    with pytest.raises(BrokenPipeError, match="the standard output"):
        stream.write("text")


def test_a_pipe_that_told_once_that_it_has_no_reader_is_asked_no_more(monkeypatch, tmp_path):
    """Windows has no other way to tell, and drops what was written: nothing fails again."""

    class Once(io.TextIOWrapper):
        def write(self, text):
            raise OSError(errno.EPIPE, "Broken pipe")

    with (tmp_path / "stdout").open("wb") as raw, (tmp_path / "stderr").open("w") as other:
        monkeypatch.setattr(sys, "stdout", NamedStream(Once(raw), "the standard output"))
        monkeypatch.setattr(sys, "stderr", other)
        assert not streams.drop_closed()
        with pytest.raises(BrokenPipeError):
            sys.stdout.write("text")
        assert streams.drop_closed()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_a_pipe_has_a_reader_until_it_is_closed():
    there, here = os.pipe()
    with os.fdopen(here, "w") as stream:
        assert not streams._has_no_reader(stream)
        os.close(there)
        assert streams._has_no_reader(stream)
    with Path(os.devnull).open("w") as stream:
        assert not streams._has_no_reader(stream)
