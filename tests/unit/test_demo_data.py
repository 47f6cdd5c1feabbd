"""The demo's committed files: what their scripts give, whole, and in agreement with each other."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

DEMO = Path(__file__).parents[2] / "demo"
BASE = DEMO / "base"


def import_demo(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Imports a module of the demo folder as its scripts do: with that folder on the path."""
    monkeypatch.syspath_prepend(DEMO)
    return __import__(name)


def read_rows(name: str) -> list[dict[str, Any]]:
    lines = (DEMO / "data" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_json(name: str) -> Any:
    return json.loads((BASE / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_committed_rows_are_what_the_generator_gives(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = import_demo(monkeypatch, "make_data").make_data()
    assert sorted(files) == ["eval.jsonl", "train.jsonl"]
    assert (DEMO / "data" / name).read_bytes() == files[name].encode()


@pytest.mark.slow
def test_generators_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); "
        "import corpus, make_data; "
        "text = repr(list(corpus.documents(3, 300))) + repr(make_data.make_rows(50, 4)); "
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code, str(DEMO)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_evaluation_stories_are_in_no_training_row(monkeypatch: pytest.MonkeyPatch) -> None:
    story_of = import_demo(monkeypatch, "make_data").story_of
    train = [story_of(row) for row in read_rows("train.jsonl")]
    evaluation = [story_of(row) for row in read_rows("eval.jsonl")]
    assert all(train)
    assert all(evaluation)
    assert len(set(train)) == len(train)
    assert len(set(evaluation)) == len(evaluation)
    assert not set(train) & set(evaluation)


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 640), ("eval.jsonl", 60)])
def test_rows_are_a_question_about_a_story_and_its_answer(name: str, count: int) -> None:
    rows = read_rows(name)
    assert len(rows) == count
    for row in rows:
        assert list(row) == ["messages"]
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        story, _, question = user["content"].rpartition(". ")
        assert question.endswith("?")
        assert len(question.split(". ")) == 1
        answer = assistant["content"]
        assert answer.endswith(".")
        # The answer's last word is what was asked for: it must have been told.
        assert answer[:-1].split()[-1] in story.replace(".", " ").split()


@pytest.mark.slow
def test_the_base_model_is_trained_on_no_question_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = "\n".join(import_demo(monkeypatch, "corpus").documents(5, 3000))
    questions = {
        row["messages"][0]["content"].rpartition(". ")[2]
        for name in ("train.jsonl", "eval.jsonl")
        for row in read_rows(name)
    }
    assert len(questions) > 100
    assert not [question for question in questions if question in texts]


def test_base_folder_is_small_and_whole() -> None:
    files = {path.name: path.stat().st_size for path in BASE.iterdir()}
    assert sorted(files) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert 100_000 < sum(files.values()) <= 6_000_000


def test_config_weights_and_tokenizer_agree() -> None:
    config, tokenizer = read_json("config.json"), read_json("tokenizer.json")
    vocab_size = config["vocab_size"]
    ids = sorted(tokenizer["model"]["vocab"].values())
    assert ids == list(range(vocab_size))
    with (BASE / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    assert header["model.embed_tokens.weight"]["shape"] == [vocab_size, config["hidden_size"]]
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in header

    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    names = read_json("tokenizer_config.json")
    for key in ("bos", "eos", "pad"):
        assert added[names[f"{key}_token"]] == config[f"{key}_token_id"]
        assert read_json("generation_config.json")[f"{key}_token_id"] == config[f"{key}_token_id"]


def test_rows_fit_the_demo_configuration() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(BASE / "tokenizer.json"))
    config = yaml.safe_load((DEMO / "demo.yaml").read_text(encoding="utf-8"))
    for key in ("train", "eval"):
        assert (DEMO / config["data"][key]).is_file()
        for row in read_rows(Path(config["data"][key]).name):
            user, assistant = (message["content"] for message in row["messages"])
            text = f"<|bos|><|user|> {user}<|end|><|assistant|> {assistant}<|end|>"
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert len(ids) <= config["data"]["max_seq_length"]
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (DEMO / config["model"]["path"]).resolve() == BASE


def test_template_of_the_tokenizer_is_the_readable_one() -> None:
    template = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
    assert read_json("tokenizer_config.json")["chat_template"] == template
