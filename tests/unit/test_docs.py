"""The reference pages say what the schema and the commands say, and links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from tools import models

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "cli.md", "limits.md"])
def test_the_reference_is_up_to_date(name):
    written = (ROOT / "docs" / name).read_text("utf-8")
    # Versions of click break lines at other places.
    assert generator().PAGES[name]().split() == written.split(), "run python tools/reference.py"


def test_the_table_of_models_is_up_to_date():
    written = (ROOT / "docs/models.md").read_text("utf-8")
    assert models.page() == written, "run PYTHONPATH=tests python -m tools.models"


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks/notes").glob("*.md")),
]
# A source distribution is without them.
NOTES = (ROOT / "benchmarks/notes").is_dir()


def anchors(page):
    """What a page's headings are called in links, as GitHub and mkdocs have them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    titles = [re.sub(r"[`*]", "", title) for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_and_files_that_are_named_exist(page):
    text = page.read_text("utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        if "notes/" in target and not NOTES:
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), (target, anchor)
    for target in re.findall(r"`((?:docs|configs|benchmarks|tests|tools)/[\w./-]+)`", text):
        if "NAME" not in target and (NOTES or "notes/" not in target):
            assert (ROOT / target).exists(), target


def test_the_site_has_all_pages_and_no_page_leads_out_of_it():
    pages = sorted((ROOT / "docs").glob("*.md"))
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    assert sorted(re.findall(r"[\w-]+\.md", nav)) == [page.name for page in pages]
    for page in pages:
        assert "](../" not in page.read_text("utf-8"), page.name


def test_commands_in_the_documentation_exist():
    from click import Context

    from qlora_wgpu.cli import commands

    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        word for page in pages
        for word in re.findall(r"qlora-wgpu ([a-z]+)(?= |`|\n)", page.read_text("utf-8"))
    }  # fmt: skip
    assert named <= {*commands.list_commands(Context(commands)), "in", "is", "and"}, named


def test_modules_that_docs_and_shaders_name_exist():
    package = ROOT / "qlora_wgpu"
    rooms = "|".join(sorted(path.parent.name for path in package.glob("*/__init__.py")))
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in [*pages, *(ROOT / "shaders").rglob("*.wgsl")]:
        text = page.read_text("utf-8")
        for module in re.findall(rf"(?<![\w/])(?:qlora_wgpu/)?((?:{rooms})/[\w/]+\.py)", text):
            known = package / module, ROOT / module
            assert any(path.exists() for path in known) or "NAME" in module, (page.name, module)


def test_one_training_step_is_read_in_ten_short_files():
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    chapter = page.split("## One training step")[1].split("\n## ")[0]
    files = re.findall(r"^\| `([\w/.]+)` \|", chapter, re.MULTILINE)
    lines = sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files)
    assert 6 <= len(files) <= 10 and lines <= 3500, lines
