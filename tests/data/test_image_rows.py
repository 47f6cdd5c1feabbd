"""Rows with images: their forms, their tokens, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import re
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.image_models import FAMILIES, SIZES, folder_of, rgb_of

from qlora_wgpu.data import (
    PreprocessConfig,
    PromptFormat,
    Tokenizer,
    find_chat_template,
    load_dataset,
)
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.errors import DataError
from qlora_wgpu.images.placeholders import ImageFiles

RECORDED = json.loads((Path(__file__).parent / "image_prompts.json").read_text())
ANSWER = {"role": "assistant", "content": "They are alike."}
TEXT = "Compare\n", "\nand "


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    @lru_cache
    def open_(family):
        folder = folder_of(family, tmp_path_factory.mktemp(family))
        tokenizer = Tokenizer.from_folder(folder)
        config = json.loads((folder / "config.json").read_text())
        return tokenizer, ImageFiles(folder, config, tokenizer.token)

    return open_


def png(size):
    file = io.BytesIO()
    Image.fromarray(rgb_of(*size)).save(file, "PNG")
    return file.getvalue()


def runs(ids):
    return [[int(key), len(list(run))] for key, run in groupby(ids)]


def encoded(opened, rows, family="qwen2_vl", **settings):
    tokenizer, images = opened(family)
    how = PreprocessConfig(settings.pop("max_seq_length", 4096), images=images, **settings)
    return encode_rows(rows, tokenizer, how)


def parts(*images):
    return [
        {"type": "text", "text": TEXT[0]}, images[0], images[1],
        {"type": "text", "text": TEXT[1]}, images[2],
    ]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_prompts_have_the_tokens_of_transformers_processors(opened, family, number):
    images = [{"type": "image", "image": png(size)} for size in SIZES[number]]
    rows = [{"messages": [{"role": "user", "content": parts(*images)}, ANSWER]}]
    (example,) = encoded(opened, rows, family)
    assert runs(example.input_ids) == RECORDED[family][number]
    assert len(example.images) == len(set(example.images)) == 3


# ---- forms of rows -------------------------------------------------------------------------------

IMAGE = png((40, 60))
URI = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
PART, ASK = {"type": "image"}, {"type": "text", "text": "What is it?"}


def question(*content):
    return [{"role": "user", "content": [*content, ASK]}, ANSWER]


def asked(text):
    return [{"role": "user", "content": text}, ANSWER]


TURNS = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
FORMS = {
    "a part with bytes": {"messages": question({**PART, "image": IMAGE})},
    "a part with a path": {"messages": question({**PART, "path": "cats/1.png"})},
    "a part with a URI": {"messages": question({**PART, "url": URI})},
    "a part in base 64": {"messages": question({**PART, "base64": URI.partition(",")[2]})},
    "OpenAI's part": {"messages": question({"type": "image_url", "image_url": {"url": URI}})},
    "a column with placeholders": {"messages": question(PART), "images": [IMAGE]},
    "a column without placeholders": {"messages": asked("What is it?"), "images": ["cats/1.png"]},
    "a column and a mark": {"messages": asked("<image>What is it?"), "image": "cats/1.png"},
    "a struct of datasets": {
        "messages": question(PART),
        "images": [{"bytes": IMAGE, "path": "cats/1.png"}],
    },
    "a prompt and a completion": {
        "prompt": question(PART)[:1],
        "completion": [ANSWER],
        "images": [{"path": "cats/1.png"}],
    },
    "LLaVA's": {"conversations": TURNS, "image": "cats/1.png"},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats/1.png").write_bytes(IMAGE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_prompt(opened, here, form):
    (example,) = encoded(opened, [FORMS[form]])
    (expected,) = encoded(opened, [FORMS["a part with bytes"]])
    tokenizer, _ = opened("qwen2_vl")
    prompt = [i for i, label in zip(example.input_ids, example.labels, strict=True) if label < 0]
    wanted = [i for i, label in zip(expected.input_ids, expected.labels, strict=True) if label < 0]
    assert tokenizer.decode(prompt, False) == tokenizer.decode(wanted, False)
    assert example.images == expected.images


def test_rows_of_files_have_paths_relative_to_them(opened, here, monkeypatch):
    rows = [FORMS["LLaVA's"], {"conversations": TURNS[1:] + TURNS[1:]}]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir("/")
    tokenizer, images = opened("qwen2_vl")
    rows = load_dataset(
        here / "rows.jsonl", tokenizer, 512, how=PreprocessConfig(512, images=images)
    )
    assert [len(example.images) for example in rows] == [1, 0]
    (source,) = rows.image_sources.values()
    assert (source.height, source.width) == (40, 60)
    assert (source.decoded() == rgb_of(40, 60)).all()


def test_another_column_of_images_can_be_mapped(opened, here, monkeypatch):
    rows = [{"conversations": TURNS, "picture": "cats/1.png"}]
    (here / "rows.jsonl").write_text(json.dumps(rows[0]))
    monkeypatch.chdir("/")
    tokenizer, images = opened("qwen2_vl")
    how = PreprocessConfig(512, images=images, columns={"images": "picture"})
    (example,) = load_dataset(here / "rows.jsonl", tokenizer, 512, how=how)
    assert len(example.images) == 1


def test_parquet_has_images_as_bytes(opened, here):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"conversations": TURNS, "image": {"bytes": IMAGE, "path": "cats/1.png"}}]
    parquet.write_table(arrow.Table.from_pylist(rows), here / "rows.parquet")
    tokenizer, images = opened("qwen2_vl")
    how = PreprocessConfig(512, images=images)
    (example,) = load_dataset(here / "rows.parquet", tokenizer, 512, how=how)
    (expected,) = encoded(opened, rows)
    assert example.input_ids.tolist() == expected.input_ids.tolist()
    assert example.images == expected.images


def test_text_has_the_models_markers(opened, here):
    row = {"prompt": "<image> Name: ", "completion": "a cat", "images": ["cats/1.png"]}
    (example,) = encoded(opened, [row])
    tokenizer, _ = opened("qwen2_vl")
    pads = "<|image_pad|>" * 6
    text = f"<|vision_start|>{pads}<|vision_end|> Name: a cat</s>"
    assert tokenizer.decode(example.input_ids.tolist(), False) == text
    trained = example.labels[example.labels >= 0].tolist()
    assert tokenizer.decode(trained, False) == "a cat</s>"


# ---- labels and truncation -----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_no_loss_is_taken_on_what_stands_for_an_image(opened, family):
    rows = [{"messages": question({**PART, "image": IMAGE}), "id": 1}]
    (example,) = encoded(opened, rows, family, train_on="all")
    tokenizer, _ = opened(family)
    unseen = set(example.input_ids[example.labels < 0].tolist())
    frames = {tokenizer.token_id(token) for token in FAMILIES[family]["tokens"]}
    present = frames & set(example.input_ids.tolist())
    if family == "qwen2_vl":  # the template writes its frame
        present -= {tokenizer.token_id(t) for t in ("<|vision_start|>", "<|vision_end|>")}
    assert present and present <= unseen
    assert not present & set(example.labels.tolist())
    assert tokenizer.decode(example.labels[example.labels >= 0].tolist(), False).endswith(
        "They are alike.<|im_end|>\n"
    )


def test_a_row_is_dropped_where_an_image_would_be_cut(opened):
    short = {"messages": [*asked("Why?"), *question({**PART, "image": IMAGE})]}
    whole = len(encoded(opened, [short], "gemma3")[0])
    fits, cut = (
        encoded(opened, [short, {"messages": asked("Why?")}], "gemma3", max_seq_length=length)
        for length in (whole - 5, whole - 60)
    )
    assert [len(example.images) for example in fits] == [1, 0]
    assert [len(example.images) for example in cut] == [0]
    assert cut.counts.dropped == 1


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "a download": (
        {"messages": question({**PART, "url": "https://x.org/cat.png"})},
        "image 1 is 'https://x.org/cat.png', but images are not downloaded",
    ),
    "a missing file": (
        {"messages": question(PART), "images": ["cats/2.png"]},
        "cannot read image 1 ('cats/2.png'): it does not exist",
    ),
    "another file": (
        {"messages": question({**PART, "image": b"#!/bin/sh"})},
        "cannot read image 1: it is not an image of a supported format",
    ),
    "a path with a null character": (
        {"messages": question({**PART, "path": "a\0b"})},
        "cannot read image 1 ('a\\x00b'): embedded null byte",
    ),
    "a home of nobody": (
        {"messages": question({**PART, "path": "~no such user/a.png"})},
        "cannot read image 1 ('~no such user/a.png'): it does not exist",
    ),
    "objects in objects": (
        {"messages": asked("<image>"), "images": [{"image": {"path": {"url": {"image": {}}}}}]},
        "image 1 has more than 4 objects within each other",
    ),
    "too few placeholders": (
        {"messages": question(PART), "images": [IMAGE, IMAGE]},
        "its messages have 1 image placeholder, but 2 images in 'images'",
    ),
    "too few images": (
        {"messages": question(PART, PART)},
        "its messages have 2 image placeholders, but 0 images in the row's columns",
    ),
    "a marker in a text": (
        {"messages": question({**PART, "image": IMAGE}, {"type": "text", "text": "<|image_pad|>"})},
        "the rendered text has 2 image markers (<|image_pad|>), but the row has 1 image",
    ),
    "both columns": (
        {"messages": asked("<image>"), "images": [IMAGE], "image": IMAGE},
        "a row must have either 'images' or 'image', not both",
    ),
    "a video": (
        {"messages": question({"type": "video", "video": "a.mp4"})},
        "message 1 has a part of type 'video', which is not supported (supported: text, image)",
    ),
    "text without a mark": (
        {"text": "A cat.", "images": [IMAGE]},
        "its text has <image> 0 times, but the row has 1 image",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_row_that_is_wrong_is_one_sentence_with_its_place(opened, here, what):
    row, message = REFUSED[what]
    with pytest.raises(DataError) as error:
        encoded(opened, [row])
    assert str(error.value).startswith(f"rows[0]: {message}")
    assert "\n" not in str(error.value)


def test_a_model_without_images_ignores_them_with_a_warning(opened):
    tokenizer, _ = opened("llava")
    rows = [{"messages": asked("What is it?"), "images": [IMAGE]}]
    plain = encode_rows(rows, tokenizer, PreprocessConfig(512))
    assert plain[0].images == () and "only text is read" in plain.warnings[0]


# ---- the cache -----------------------------------------------------------------------------------


def test_the_cache_keeps_images_until_their_files_change(opened, here, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    rows = [FORMS["LLaVA's"], {"conversations": TURNS, "image": URI}]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, images = opened("qwen2_vl")

    def read():
        how = PreprocessConfig(512, images=images)
        return load_dataset(here / "rows.jsonl", tokenizer, 512, how=how, cache=True)

    first, again = read(), read()
    assert first.fingerprint == again.fingerprint
    assert [each.images for each in first] == [each.images for each in again]
    for source in again.image_sources.values():
        assert (source.decoded() == rgb_of(40, 60)).all()
    (here / "cats/1.png").write_bytes(png((200, 60)))
    changed = read()
    assert len(changed.image_sources) == 2 and changed.fingerprint != first.fingerprint
    assert [len(example) for example in changed] == [len(first[0]) + 8, len(first[1])]


# ---- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_tokens_of_a_row(opened, here, family):
    tokenizer, images = opened(family)
    messages = question({**PART, "path": "cats/1.png"})
    (row,) = encoded(opened, [{"messages": messages}], family)
    prompt = PromptFormat("chat", tokenizer, find_chat_template(None, tokenizer))
    ids, sources = prompt.encoded(messages[:1], images=images, folder=here)
    begin = int(np.flatnonzero(row.labels >= 0)[0])
    assert ids == row.input_ids[:begin].tolist()
    assert tuple(source.key for source in sources) == row.images


def test_prompts_of_requests_have_no_paths_and_none_without_images(opened):
    tokenizer, images = opened("llava")
    prompt = PromptFormat("chat", tokenizer, find_chat_template(None, tokenizer))
    for given, part, message in (
        (images, {**PART, "path": "/etc/passwd"}, "image 1 must be a data: URI, got '/etc/passwd'"),
        (images, {**PART, "url": "http://x/y.png"}, "images are not downloaded"),
        (images, PART, "its messages have 1 image placeholder, but 0 images"),
        (None, {**PART, "url": URI}, "a part of type 'image', which is not supported"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            prompt.encoded(question(part)[:1], images=given)


@pytest.mark.parametrize("objective", ["grpo", "rloo", "reward", "classification"])
def test_other_objectives_refuse_images(opened, objective):
    row = {"prompt": "One?", "chosen": "Yes", "rejected": "No", "text": "One", "label": 1,
           "images": [png((8, 8))]}  # fmt: skip
    if objective == "classification":
        row = {key: row[key] for key in ("text", "label", "images")}
    with pytest.raises(DataError, match=rf"rows\[0\]: train.objective: {objective} does not"):
        encoded(opened, [row], objective=objective)


# ---- answers about images ------------------------------------------------------------------------

OTHER = {"role": "assistant", "content": "A dog."}
PAIRS = {
    "a column": {"prompt": asked("What is it?")[:1], "chosen": [ANSWER], "rejected": [OTHER],
                 "images": [IMAGE]},
    "a part": {"prompt": question({**PART, "image": IMAGE})[:1], "chosen": "They are alike.",
               "rejected": "A dog."},
    "whole conversations": {"chosen": question(PART), "rejected": [*question(PART)[:1], OTHER],
                            "image": "cats/1.png"},
    "parts of conversations": {"chosen": question({**PART, "path": "cats/1.png"}),
                               "rejected": [*question({**PART, "path": "cats/1.png"})[:1], OTHER]},
}  # fmt: skip


@pytest.mark.parametrize("form", PAIRS)
def test_both_answers_have_the_tokens_of_a_supervised_row(opened, here, form, monkeypatch):
    (here / "pairs.jsonl").write_text(json.dumps(PAIRS[form], default=base64_of))
    monkeypatch.chdir("/")
    tokenizer, images = opened("qwen2_vl")
    how = PreprocessConfig(512, images=images, objective="dpo")
    chosen, rejected = load_dataset(here / "pairs.jsonl", tokenizer, 512, how=how)
    for side, answer in ((chosen, ANSWER), (rejected, OTHER)):
        messages = [question({**PART, "image": IMAGE})[0], answer]
        (row,) = encoded(opened, [{"messages": messages}], train_on="last_turn")
        assert side.input_ids.tolist() == row.input_ids.tolist()
        assert side.labels.tolist() == row.labels.tolist()
        assert side.images == row.images != ()


def base64_of(content):
    return "data:image/png;base64," + base64.b64encode(content).decode()


def test_desirable_answers_and_text_have_images(opened, here):
    row = {"prompt": "<image> Name: ", "completion": "a cat", "images": ["cats/1.png"]}
    (plain,) = encoded(opened, [row])
    first, none, none_either, second = encoded(
        opened, [{**row, "label": True}, {**row, "label": False}], objective="kto"
    )
    assert not len(none) and not len(none_either)
    for each in (first, second):
        assert each.images == plain.images and each.input_ids.tolist() == plain.input_ids.tolist()


def test_an_image_in_an_answer_is_refused(opened):
    answer = {"role": "assistant", "content": [{**PART, "image": IMAGE}, ASK]}
    row = {"prompt": asked("Draw!")[:1], "chosen": [answer], "rejected": [OTHER]}
    with pytest.raises(DataError, match=r"rows\[0\]: an answer has an image: put images into the"):
        encoded(opened, [row], objective="dpo")
