"""Ctrl-C while Python still imports: no traceback, and nothing of it is lost."""

import signal
import subprocess
import sys

import pytest
from support.processes import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals wait on POSIX alone")

INTERRUPTED = """\
import runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = [sys.argv[1], "doctor"]
runpy.run_module("qlora_wgpu", run_name="__main__")
"""

SUPERVISING = """\
import os, signal, subprocess, sys
from qlora_wgpu.supervision import parent
class AtOnce(subprocess.Popen):
    def __init__(self, *how, **options):
        {before}
        super().__init__(*how, **options)
        {after}
subprocess.Popen = AtOnce
parent._command = lambda: [sys.executable, "-c", {child!r}]
sys.exit(parent.supervise([{verb!r}]))
"""

STARTING = """\
import signal, sys, time
time.sleep(0.3)
from qlora_wgpu.supervision.processes import unblock_signals
try:
    unblock_signals()
    time.sleep(300)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("module", ["child", "processes", "parent"])
def test_the_first_command_while_it_imports(module):
    code = [sys.executable, "-c", INTERRUPTED, f"qlora_wgpu.supervision.{module}"]
    done = subprocess.run(code, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert not done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "doctor"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_process_that_it_begins(verb, moment):
    interrupt = "os.killpg(0, signal.SIGINT)"
    moments = {"before": "pass", "after": "pass"} | {moment: interrupt}
    code = [sys.executable, "-c", SUPERVISING.format(**moments, child=STARTING, verb=verb)]
    done = subprocess.run(
        code, capture_output=True, text=True, timeout=PATIENCE, check=False, start_new_session=True
    )
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert not done.stderr
