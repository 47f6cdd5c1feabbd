"""What a release is made of says one thing: versions, Pythons, pins, forms."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from qlora_wgpu import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PYTHONS = [
    name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python ::" in name
]  # fmt: skip
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(path: str) -> dict:
    # BaseLoader: YAML 1.1 has `on` as a boolean.
    return yaml.load((ROOT / path).read_text("utf-8"), yaml.BaseLoader)


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == __version__ and citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_has_its_pins(python: str) -> None:
    from packaging.requirements import Requirement

    text = (ROOT / "constraints" / f"{python}.txt").read_text("utf-8")
    pins: dict[str, list[str]] = {}
    for line in text.splitlines():
        if pin := re.match(r"([\w.-]+)==([\w.]+)", line):
            pins.setdefault(pin[1], []).append(pin[2])
    extras = [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    for need in map(Requirement, (*PROJECT["dependencies"], *extras)):
        name = need.name.lower().replace("_", "-")
        if name == PROJECT["name"]:
            continue
        assert name in pins, f"{name} has no pin: run tools/constraints.sh"
        assert all(need.specifier.contains(pin, prereleases=True) for pin in pins[name]), need


def test_workflows_try_every_python_of_the_project_and_its_own_jobs() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == PYTHONS
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = read(str(path.relative_to(ROOT)))
        assert workflow["permissions"] == {"contents": "read"}  # a job asks for more by itself
        for job in workflow["jobs"].values():
            assert "uses" in job or "timeout-minutes" in job
            for named in (job, *job.get("steps", ())):
                local = named.get("uses", "")
                assert not local.startswith("./") or (ROOT / local).exists(), local


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_names_nobody(form: Path) -> None:
    asked = yaml.safe_load(form.read_text("utf-8"))
    if form.stem == "config":
        return
    assert {"name", "description", "labels", "body"} == set(asked)
    ids = [field["id"] for field in asked["body"] if field["type"] != "markdown"]
    assert len(set(ids)) == len(ids)
    command = {"bug": "doctor --json", "gpu": "doctor --report"}.get(form.stem, "")
    assert command in form.read_text("utf-8")


def test_releasing_is_a_short_page_that_begins_with_the_name() -> None:
    page = (ROOT / "docs/releasing.md").read_text("utf-8")
    assert len(page.split()) <= 500
    assert page.split("\n## ")[1].startswith("Before the first release")
