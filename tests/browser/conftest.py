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


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The demo's site, cut for browsers on software GPUs, in float32."""
    out = tmp_path_factory.mktemp("site") / "demo"
    config = load_config(DEMO / "demo.yaml", ["train.compute_dtype=float32"])
    return write_page(config, out, SiteOptions(kernels="cpu")).folder


@pytest.fixture
def ask(site, tmp_path):
    """Has a browser do a task on the site; files of ``over`` hide the site's."""

    def asked(name, page, task, over=None, aliases=None, folder=None, **more):
        (tmp_path / "task.json").write_text(json.dumps(task))
        for path, content in (over or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(content)
        server = Server([tmp_path, folder or site, HERE], aliases)
        try:
            found = result_of(name, server, page, **more)
            return found, server.requested
        finally:
            server.close()

    return asked


def user_task(rows=60, **more):
    """What a user of the page does: a file of chats, one pass, a question."""
    lines = (DEMO / "data" / "train.jsonl").read_text().splitlines()[:rows]
    question = json.loads(lines[0])["messages"][0]["content"]
    text = "\n".join(lines) + "\n"
    return {
        "name": "rows.jsonl",
        "text": text,
        "epochs": 1,
        "rate": 2e-3,
        "question": question,
    } | more
