"""``demo/images``: what pictures show is what their questions and answers say, and it trains."""

import json
import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from qlora_wgpu import train
from qlora_wgpu.data.dataset import load_dataset
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.images.placeholders import image_files

DEMO = Path(__file__).parents[2] / "demo" / "images"
CENTERS = {"top left": (8, 8), "top right": (24, 8), "bottom left": (8, 24)}  # in pixels


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The demo's data, written next to copies of its scripts."""
    folder = tmp_path_factory.mktemp("demo") / "images"
    folder.mkdir()
    for name in ("scenes.py", "make_data.py"):
        (folder / name).write_text((DEMO / name).read_text())
    (folder.parent / "dice.py").write_text((DEMO.parent / "dice.py").read_text())
    subprocess.run([sys.executable, folder / "make_data.py"], check=True)
    return folder / "data"


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_answers_are_what_pictures_show(data):
    colours = runpy.run_path(str(DEMO / "scenes.py"))["COLOURS"]
    known, seen = {**colours, "nothing": (55, 55, 55)}, set()
    for row in rows(data / "eval.jsonl"):
        (image, text), answer = row["messages"][0]["content"], row["messages"][1]["content"]
        place = text["text"].removeprefix("What is ").removesuffix("?")
        if place not in CENTERS:
            continue
        pixel = Image.open(data / image["path"]).getpixel(CENTERS[place])
        named = answer.split()[0]
        distances = {name: math.dist(pixel, rgb) for name, rgb in known.items()}
        assert min(distances, key=distances.get) == named
        seen.add(named)
    assert seen == known.keys()


def test_no_picture_is_trained_on_and_held_out(data):
    parts = [rows(data / f"{split}.jsonl") for split in ("train", "eval")]
    paths = [{row["messages"][0]["content"][0]["path"] for row in part} for part in parts]
    assert [len(part) for part in paths] == [600, 50]
    assert not paths[0] & paths[1]


@pytest.mark.full
def test_it_trains(data, tmp_path):
    paths = [f"data.{split}={data / split}.jsonl" for split in ("train", "eval")]
    paths.append(f"output.dir={tmp_path / 'run'}")
    overrides = [*paths, "train.max_steps=2", "data.image_cache=memory"]
    result = train(DEMO / "images.yaml", overrides=overrides, quiet=True)
    assert result.eval_loss < result.eval_loss_before


def test_a_copied_data_set_has_its_own_pictures(data, tmp_path):
    """Though the file is the same, and examples of it are cached."""
    tokenizer = Tokenizer.from_folder(DEMO / "base")
    config = json.loads((DEMO / "base/config.json").read_text())
    files = image_files(DEMO / "base", config, tokenizer.token)
    how, sources = PreprocessConfig(48, images=files), []
    for name in ("one", "other"):
        folder = tmp_path / name
        shutil.copytree(data / "pictures", folder / "pictures")
        shutil.copy(data / "eval.jsonl", folder)
        found = load_dataset(folder / "eval.jsonl", tokenizer, 48, how=how, cache=True)
        sources.append({source.content.path for source in found.image_sources.values()})
    assert not sources[0] & sources[1]
