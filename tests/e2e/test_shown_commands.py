"""What README.md and the guides show of the command line is taken, and does what it says."""

import re
import shlex
import shutil
from copy import deepcopy
from io import StringIO
from pathlib import Path

import pytest
from support.commands import run_here

from e2e.tiny import write_chats, write_model
from qlora_wgpu import cli

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
OF_ALL = {"README.md": 6, "docs/guide.md": 17, "docs/cluster.md": 4, "docs/web.md": 1}
# What needs no network, no other machine and no tokenizer of llama.cpp's.
ALONE = {"init", "data", "estimate", "train", "chat", "eval", "generate", "merge", "quantize"}


def shown(page):
    """The commands in a page's blocks of no language, without what a shell does."""
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", (ROOT / page).read_text(), re.M | re.S)
    text = "".join(block for _, language, block in blocks if not language)
    lines = re.findall(r"^ *qlora-wgpu (.*?)(?: > .*)?$", text.replace("\\\n", " "), re.M)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that a reader of both pages has."""
    model = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    write_model(model, num_hidden_layers=1, max_position_embeddings=40)
    write_chats(tmp_path / "chats.jsonl", 1)
    write_chats(tmp_path / "held-out.jsonl", 1, seed=1)
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n')
    (tmp_path / "theirs.yml").write_text(
        f"base_model: {model}\ndatasets: [{{path: chats.jsonl, type: chat_template}}]\n"
        "adapter: qlora\nload_in_4bit: true\n"
    )
    shutil.copytree(model, tmp_path / "BASE")
    monkeypatch.setattr("sys.stdin", StringIO("what?\n"))
    return tmp_path


@pytest.mark.parametrize("page", sorted(OF_ALL))
def test_commands_are_taken(page):
    commands = deepcopy(cli.commands)
    assert len(shown(page)) == OF_ALL[page]  # else a block has another form
    for verb, *words in shown(page):
        commands.get_command(None, verb).make_context(verb, words)


def test_no_other_page_shows_commands():
    """docs/cli.md shows their help."""
    found = {page for page in PAGES if page != "docs/cli.md" and shown(page)}
    assert found == OF_ALL.keys()


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_commands_run_one_after_another(place, page):
    for verb, *words in shown(page):
        if verb not in ALONE:
            continue
        if "--from" in words:
            (place / "run.yaml").unlink()
        done = run_here(verb, *words, cwd=place)
        assert done.returncode == 0, done.stderr
        trained = place / "runs" / "SmolLM2-135M-Instruct"
        if verb == "train":
            assert done.stdout.splitlines()[-1] == "qlora-wgpu chat runs/SmolLM2-135M-Instruct"
            shutil.copytree(trained, place / "runs" / "first")
