"""Short forms of the campaigns on what strangers' files compute."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["templates", "tokenizers", "patterns"])
def test_a_short_campaign(name) -> None:
    command = [sys.executable, "-m", f"campaigns.{name}"]
    limits = ["--count", "60", "--seed", "7", "--seconds", "3"]
    done = subprocess.run([*command, *limits], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(char.isdigit() for char in done.stdout.partition(" s\n")[2]), done.stdout
