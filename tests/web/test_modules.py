"""The page's modules parse, and fit together and to the page, seen without a browser."""

import re
from html.parser import HTMLParser

import pytest
import tree_sitter_javascript
from browser.check_interruptions import OTHERWISE
from tree_sitter import Language, Parser

from qlora_wgpu.web.site import page_folder

PAGE = page_folder()
MODULES = sorted(PAGE.glob("*.mjs"))
_IMPORT = re.compile(r"^import \{([^}]*)\} from '(\./[\w./]+)';", re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:class|function\*?|const|let) (\w+)", re.M)


def parse(source: bytes):
    return Parser(Language(tree_sitter_javascript.language())).parse(source).root_node


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_a_module_parses(module):
    assert not parse(module.read_bytes()).has_error


def test_a_text_that_ends_early_is_seen():
    assert parse(b"const a = 'it's here';").has_error
    assert parse(b"export function f( { return 1; }").has_error


def test_modules_import_what_others_export():
    for module in MODULES:
        for names, path in _IMPORT.findall(module.read_text(encoding="utf-8")):
            source = (PAGE / path).read_text(encoding="utf-8")
            if "vendor" in path:  # in one line, with a list of what is exported
                exported = set(re.findall(r"(\w+)\s*(?=[,}])", source[source.rindex("export") :]))
            else:
                exported = set(_EXPORT.findall(source))
            wanted = {name.split(" as ")[0].strip() for name in names.split(",")}
            assert wanted <= exported, f"{module.name} imports {wanted - exported} of {path}"


def test_twins_in_python_that_modules_name_are_there():
    heads = {path.name: path.read_text(encoding="utf-8").partition("*/")[0] for path in MODULES}
    named = {name: re.findall(r"\b[a-z_]+/[a-z_]+\.py\b", head) for name, head in heads.items()}
    assert "data/masking.py" in named["masking.mjs"]
    package = PAGE.parents[1]
    assert not {twin for twins in named.values() for twin in twins if not (package / twin).exists()}


def test_the_page_has_the_elements_that_its_module_asks_for():
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    module = (PAGE / "app.mjs").read_text(encoding="utf-8")
    asked = set(re.findall(r"\$\('([\w-]+)'\)", module))
    assert len(asked) > 10
    assert asked <= set(re.findall(r'\bid="([\w-]+)"', page))


class Controls(HTMLParser):
    """The controls of a page, and those that a screen reader has no name for."""

    def __init__(self):
        super().__init__()
        self.labels, self.found, self.nameless = 0, [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.labels += tag == "label"
        if tag in ("input", "select", "textarea", "progress"):
            self.found.append(given["id"])
            if not (self.labels or "aria-label" in given or given["id"] in self.named):
                self.nameless.append(given["id"])

    def handle_endtag(self, tag):
        self.labels -= tag == "label"


def test_every_control_has_a_name():
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    controls = Controls()
    controls.named = set(re.findall(r'<label [^>]*for="([\w-]+)"', page))
    controls.feed(page)
    assert {"rank", "file", "epochs", "message", "progress"} <= set(controls.found)
    assert controls.nameless == []


@pytest.mark.parametrize("module", OTHERWISE)
def test_what_browsers_are_tried_with_is_still_there(module):
    there, instead = OTHERWISE[module]
    assert (PAGE / module).read_text().count(there) == 1 and there != instead
