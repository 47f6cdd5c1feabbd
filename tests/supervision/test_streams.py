"""Commands that are begun without standard streams, as services and cron begin some."""

import errno
import io
import subprocess
import sys

import pytest

from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.supervision import streams
from qlora_wgpu.supervision.streams import Output

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

    with pytest.raises(QLoRAError, match="to the standard output: Invalid argument"):
        Output(Closed()).write("text")
    monkeypatch.setattr(streams, "_OF_CLOSED_PIPES", (errno.EPIPE, errno.EINVAL))
    with pytest.raises(SystemExit) as end:
        Output(Closed()).write("text")
    assert end.value.code == 0
    assert Output(Closed(), goes_on=True).write("text") == 4


def test_nothing_is_tried_again_once_nobody_reads():
    """Windows tells it once, and drops what was written."""

    class Once(io.StringIO):
        def flush(self):
            self.times = getattr(self, "times", 0) + 1
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    raw = Once()
    stream = Output(raw, goes_on=True)
    for _ in range(3):
        stream.write("text")
        stream.flush()
    assert (raw.times, raw.getvalue()) == (1, "text")
