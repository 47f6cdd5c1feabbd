"""Commands that are begun without standard streams, as services and cron begin some."""

import subprocess
import sys

import pytest

CLOSED = "import os; [os.close(i) for i in {}]; os.execv({!r}, {!r})"


def run_without(streams, *args, cwd):
    """A command that is begun with these of its standard streams closed."""
    command = [sys.executable, "-m", "qlora_wgpu", *args]
    code = CLOSED.format(streams, sys.executable, command)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("streams", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_they_end_as_with_streams(streams, tmp_path):
    done = run_without(streams, "data", "none.yaml", cwd=tmp_path)
    assert done.returncode == 2
    told = "" if 2 in streams else "error: the configuration file none.yaml does not exist"
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
