"""Parts of a measurement that do next to nothing, and what became of them."""

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def python(code):
    return [sys.executable, "-c", "import sys, os, time; " + code, "{out}"]


def state(folder):
    parts = json.loads((folder / "state.json").read_text())
    return {name: part["status"] for name, part in parts.items()}


def ran(folder, name):
    return (folder / f"{name}.log").read_text().count("$ ")


def session(gpu, tmp_path, minutes=10.0, folder="all"):
    return gpu.Session(tmp_path / folder, tmp_path / "all.tar.gz", minutes)
