"""Short forms of the crash campaigns; each in a process of its own, since they fork."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name, count", [("kills", 3), ("io_faults", 12), ("checkpoints", 20)])
def test_nothing_is_lost(name, count):
    command = [sys.executable, "-m", f"tests.campaigns.{name}", "--count", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
