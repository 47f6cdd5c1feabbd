"""A short form of the crash campaigns, in a process of its own, since they fork."""

import subprocess
import sys
from pathlib import Path

from campaigns import checkpoints, io_faults, kills
from campaigns.scenes import staged
from campaigns.support import Tally

SHORT = "from campaigns.test_crash import short; short()"


def short() -> None:
    """All three on one stage; ends with 1 where something is lost."""
    tally = Tally(seconds=120)
    with staged(quick=True) as stage:
        kills.run(stage, 2, 0, tally)
        io_faults.run(stage, 5, 0, tally)
        checkpoints.run(stage, 4, 2, tally)
    sys.exit(1 if tally.failures else 0)


def test_nothing_is_lost():
    done = subprocess.run(
        [sys.executable, "-c", SHORT],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
