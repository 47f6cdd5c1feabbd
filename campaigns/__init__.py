"""Attacks on runs, files and texts, each a module that can be run."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1] / "tests")
if TESTS not in sys.path:  # pytest has it there: the tests' own helpers are imported from it
    sys.path.append(TESTS)
