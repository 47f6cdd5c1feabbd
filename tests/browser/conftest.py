"""Not among the ordinary tests: ``make test-browser`` has the browsers that these need."""

import json
from pathlib import Path

import pytest
from browser.drive import Server, result_of

from qlora_wgpu.config import load_config
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.web import SiteOptions

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "demo"
PATCHED = (
    b"import './%b';\nimport './%b';\n"  # in place of a module: a patch, and the module by an alias
)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The demo's site, cut for browsers on software GPUs, in float32."""
    out = tmp_path_factory.mktemp("site") / "demo"
    config = load_config(DEMO / "demo.yaml", ["train.compute_dtype=float32"])
    return write_page(config, out, SiteOptions(kernels="cpu")).folder


def asker(site, own):
    """Has a browser do a task on the site; files of ``over`` hide the site's, None removes one.

    How the server serves is ``served``.
    """

    def asked(name, page, task, over=None, aliases=None, folder=None, served=None, **more):
        (own / "task.json").write_text(json.dumps(task))
        files = {"task.json": None} | (over or {})
        for path, content in files.items():
            (own / path).parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                (own / path).write_bytes(content)
        missing = [path for path, content in (over or {}).items() if content is None]
        server = Server([own, folder or site, HERE], aliases, missing, **(served or {}))
        try:
            found = result_of(name, server, page, **more)
            return found, server.requested
        finally:
            server.close()
            for path in files:
                (own / path).unlink(missing_ok=True)

    return asked


@pytest.fixture
def ask(site, tmp_path):
    """An asker with a folder of its own."""
    own = tmp_path / "own"
    own.mkdir()
    return asker(site, own)


def user_task(rows=60, *more):
    """What a user of the page does: a file of chats, one pass, a question."""
    lines = [*(DEMO / "data" / "train.jsonl").read_text().splitlines()[:rows], *more]
    question = json.loads(lines[0])["messages"][0]["content"]
    return {
        "name": "rows.jsonl",
        "text": "\n".join(lines) + "\n",
        "epochs": 1,
        "rate": 2e-3,
        "question": question,
    }
