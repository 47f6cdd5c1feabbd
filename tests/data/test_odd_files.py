"""Pipes, folders and links to nothing beside a tokenizer are not skipped."""

from pathlib import Path

import pytest
from support.pipes import make_pipe
from support.tiny_tokenizer import tiny_backend

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import TokenizerError

NAMES = [
    "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json",
    "generation_config.json", "tokenizer.json",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_backend().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing", "device"])
def test_an_entry_that_is_no_file(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        make_pipe(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("gone" if kind == "nothing" else "/dev/zero")
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(folder)


def test_a_template_of_two_hundred_megabytes(folder: Path) -> None:
    with (folder / "chat_template.jinja").open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(TokenizerError, match="such a file may have at most 1,048,576 bytes"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", '{"eos_token_id": [4294967296, 18446744073709551616]}'),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": [], "template": "x"}]}'),
    ],
)
def test_values_that_were_tracebacks(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    try:
        Tokenizer.from_folder(folder)
    except TokenizerError as err:
        assert "no chat template named 'default'" in str(err)
