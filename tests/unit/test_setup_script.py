"""``tools/setup.sh`` takes a Python that is new enough, whatever ``python3`` is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.sh"
OLD = '#!/bin/sh\ncase "$1" in --version) echo "Python 3.9.18";; *) exit 1;; esac\n'
NEW = '#!/bin/sh\ncase "$*" in *venv\\ --clear*) echo "made by $0" >&2; exit 7;; esac\n'

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a script for sh")


def set_up(tmp_path: Path, pythons: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs it as far as its virtual environment, with these commands alone."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sh", "dirname", "cat", "mkdir", "chmod", "touch"):
        (commands / name).symlink_to(shutil.which(name) or name)
    for name, script in pythons.items():
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    (tmp_path / "tools").mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    return subprocess.run(
        [commands / "sh", tmp_path / "tools" / "setup.sh"],
        env={"PATH": str(commands)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["python3", "python3.12", "python3.13", "python3.14"])
def test_one_that_is_new_enough_is_found(tmp_path: Path, name: str) -> None:
    done = set_up(tmp_path, {"python3": OLD, name: NEW})
    assert done.returncode == 7 and done.stderr.endswith(f"/{name}\n"), done.stderr


def test_an_old_one_alone_is_told(tmp_path: Path) -> None:
    done = set_up(tmp_path, {"python3": OLD})
    assert done.returncode == 2
    assert done.stderr == "error: Python 3.11 or later is required, found Python 3.9.18\n"


# A Python whose virtual environment has commands that note what they are asked.
MAKING = """#!/bin/sh
case "$*" in *venv*--clear*) ;; *) exit 0;; esac
mkdir .venv .venv/bin
for name in python uv qlora-wgpu; do
    echo '#!/bin/sh
echo "${0##*/} $*" >&2' >.venv/bin/$name
    chmod +x .venv/bin/$name
done
"""


@pytest.mark.parametrize("works", [True, False])
def test_pip_installs_where_uv_cannot(tmp_path: Path, works: bool) -> None:
    done = set_up(tmp_path, {"python3": MAKING + "echo false >>.venv/bin/uv\n" * (not works)})
    asked = [line.split()[:1] + line.split()[-1:] for line in done.stderr.splitlines()]
    assert done.returncode == 0, done.stderr
    assert asked == [["python", "uv"], ["uv", "."], *[["python", "."]] * (not works)]
