"""What people are told to install is what the project needs, and no name that may be another's."""

import re
import tomllib
from pathlib import Path

import pytest

from qlora_wgpu import errors
from qlora_wgpu.errors import EXTRAS, ConfigError, install_command, require_extra
from qlora_wgpu.gpu.wgpu_native import WgpuNative

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TOLD = ("qlora_wgpu", "shaders", "configs", "docs", "examples", "demo", "tools", "benchmarks")


@pytest.mark.parametrize("extra", EXTRAS)
def test_packages_are_those_of_the_project(extra: str) -> None:
    assert list(EXTRAS[extra]) == PROJECT["optional-dependencies"][extra]


def test_the_first_implementation_is_installed_in_the_version_that_is_needed() -> None:
    (needed,) = (name for name in PROJECT["dependencies"] if name.startswith("wgpu"))
    assert WgpuNative.install == f'pip install "{needed}"'


def test_nobody_is_told_to_install_the_projects_name_from_an_index() -> None:
    """Until it is published, who takes the name would run code on users' machines."""
    pages = [path for folder in TOLD for path in (ROOT / folder).rglob("*") if path.is_file()]
    pages += [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.*"), *ROOT.glob("Dockerfile")]
    wrong = re.compile(r"qlora[-_]wgpu\[|(pip3?|pipx|uvx?)( \w+)* [\"']?qlora[-_]wgpu(?![-\w/*.])")
    suffixes = (".py", ".md", ".yaml", ".yml", ".js", ".html", ".jinja", ".sh", "")
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}" for path in pages if path.suffix in suffixes
        if (match := wrong.search(path.read_text("utf-8")))
    }  # fmt: skip
    assert not found


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"distributed"}
    monkeypatch.setattr(errors, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(ConfigError) as told:
        require_extra("cluster")
    assert str(told.value) == (
        "cryptography is required for clusters: "
        'pip install "distributed>=2024.8" "cryptography>=42"'
    )
    there |= {"cryptography"}
    require_extra("cluster")
    assert install_command("dawn") == f'pip install "{EXTRAS["dawn"][0]}"'
