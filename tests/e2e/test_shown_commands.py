"""What README.md and the guides show of the command line is taken, and does what it says."""

import json
import re
import shlex
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
from PIL import Image
from support.commands import run_here

from e2e.tiny import write_chats, write_model
from qlora_wgpu import cli

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
OF_ALL = {
    "README.md": 6, "docs/tutorial.md": 8, "docs/data.md": 1, "docs/memory.md": 1,
    "docs/generate.md": 6, "docs/export.md": 5, "docs/other-trainers.md": 1, "docs/ci.md": 1,
    "docs/cluster.md": 4, "docs/classification.md": 3, "docs/web.md": 1,
    "docs/images.md": 4,
}  # fmt: skip
# Those about a run that there is.
OF_A_RUN = ["data", "memory", "generate", "export", "other-trainers"]
# What needs no network, no other machine and no tokenizer of llama.cpp's.
ALONE = {"init", "data", "estimate", "train", "chat", "eval", "generate", "merge", "quantize"}


def shown(page):
    """The commands in a page's blocks of no language, without what a shell does."""
    blocks = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", (ROOT / page).read_text(), re.M | re.S)
    text = "".join(block for _, language, block in blocks if not language)
    lines = re.findall(r"^ *qlora-wgpu (.*?)(?: > .*)?$", text.replace("\\\n", " "), re.M)
    return [shlex.split(line, comments=True) for line in lines]


def write_place(folder):
    """What a reader has: a model, chats, prompts, a file of another trainer."""
    model = folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    write_model(model, num_hidden_layers=1, max_position_embeddings=40)
    write_chats(folder / "chats.jsonl", 1)
    write_chats(folder / "held-out.jsonl", 1, seed=1)
    (folder / "in.jsonl").write_text('{"prompt": "ab"}\n')
    (folder / "theirs.yml").write_text(
        f"base_model: {model}\ndatasets: [{{path: chats.jsonl, type: chat_template}}]\n"
        "adapter: qlora\nload_in_4bit: true\n"
    )
    shutil.copytree(model, folder / "BASE")


def run_page(page, folder):
    """Each command of a page that can run here, and what it said."""
    for verb, *words in shown(page):
        if verb in ALONE:
            done = run_here(verb, *words, cwd=folder, stdin="what?\n")
            assert done.returncode == 0, done.stderr
            yield verb, done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that readers of README.md have in the end."""
    folder = tmp_path_factory.mktemp("trained")
    write_place(folder)
    return folder, dict(run_page("README.md", folder))


@pytest.mark.parametrize("page", sorted(OF_ALL))
def test_commands_are_taken(page):
    commands = deepcopy(cli.commands)
    assert len(shown(page)) == OF_ALL[page]  # else a block has another form
    for verb, *words in shown(page):
        commands.get_command(None, verb).make_context(verb, words)


@pytest.mark.quick
def test_no_other_page_shows_commands():
    """docs/cli.md shows their help."""
    found = {page for page in PAGES if page != "docs/cli.md" and shown(page)}
    assert found == OF_ALL.keys()


def test_the_commands_of_the_readme_run_one_after_another(trained):
    folder, said = trained
    assert said.keys() == ALONE & {verb for verb, *_ in shown("README.md")}
    assert said["train"].splitlines()[-1] == "qlora-wgpu chat runs/SmolLM2-135M-Instruct"
    assert (folder / "runs/SmolLM2-135M-Instruct/adapter/adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", OF_A_RUN)
def test_the_commands_of_a_page_run(trained, tmp_path, name):
    folder = tmp_path / "place"
    shutil.copytree(trained[0], folder)
    shutil.copytree(folder / "runs/SmolLM2-135M-Instruct", folder / "runs/first")
    if name == "other-trainers":
        (folder / "run.yaml").unlink()
    assert list(run_page(f"docs/{name}.md", folder))


def test_the_tutorial_runs(tmp_path):
    write_model(tmp_path / "demo/base", num_hidden_layers=1)
    (tmp_path / "examples").mkdir()
    rows = (ROOT / "examples/questions.csv").read_text().splitlines()
    (tmp_path / "examples/questions.csv").write_text("\n".join(rows[:20]) + "\n")
    said = dict(run_page("docs/tutorial.md", tmp_path))
    assert said["train"].splitlines()[-1] == "qlora-wgpu chat runs/base"


def test_the_commands_about_images_run(tmp_path):
    """Of a run on one row, with the model of the image demo."""
    shutil.copytree(ROOT / "demo/images/base", tmp_path / "base")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "cat.jpg")
    asked = {"role": "user", "content": "<image>What is this?"}
    messages = [asked, {"role": "assistant", "content": "red"}]
    for name, turns in (("rows", messages), ("questions", messages[:1])):
        row = {"messages": turns, "images": ["cat.jpg"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    (tmp_path / "run.yaml").write_text(
        "model: {path: base}\ndata: {train: rows.jsonl, max_seq_length: 48, image_cache: memory}\n"
        "train: {max_steps: 1}\noutput: {dir: runs/first}\n"
    )
    said = dict(run_page("docs/images.md", tmp_path))
    assert "cat.jpg" in said["data"] and said.keys() == {"data", "train", "generate"}
