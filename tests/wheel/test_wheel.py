"""The wheel holds its shaders and configurations, and trains away from the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from e2e.tiny import write_chats, write_model

ROOT = Path(__file__).parents[2]
CONFIG = """\
model: {path: model}
lora: {r: 2, lora_alpha: 2}
data: {train: train.jsonl, max_seq_length: 64}
train: {max_steps: 1, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
output: {dir: out}
"""


def build(kind, out):
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_it_holds_every_shader_and_configuration(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("shaders", "configs"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file()]
        assert files
        for path in files:
            assert f"qlora_wgpu/{path.relative_to(ROOT).as_posix()}" in inside
    assert {"qlora_wgpu/py.typed", "qlora_wgpu/report/page.html.jinja"} <= inside
    assert not any(name.startswith(("tests/", "campaigns/", "demo/")) for name in inside)


@pytest.mark.slow
def test_a_source_distribution_holds_what_its_tests_read(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folders = ["qlora_wgpu", "shaders", "configs", "tests", "campaigns", "demo", "docs", "tools"]
    files = [
        p for folder in [*folders, "benchmarks"] for p in (ROOT / folder).rglob("*") if p.is_file()
    ]
    made = ROOT / "demo/images/data"  # by the demo
    kept = {
        p.relative_to(ROOT).as_posix()
        for p in files
        if not {"__pycache__", "notes"} & {*p.parts} and made not in p.parents
    }
    assert kept | {"pyproject.toml", "Makefile", "README.md", "LICENSE"} <= inside
    assert not any("__pycache__" in name or "/notes/" in name for name in inside)


@pytest.mark.slow
def test_it_trains_away_from_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    write_model(tmp_path / "model")
    write_chats(tmp_path / "train.jsonl")
    (tmp_path / "run.yaml").write_text(CONFIG)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def python(*args):
        return subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    where = python("-c", "import qlora_wgpu; print(qlora_wgpu.__file__)").stdout
    assert where.startswith(str(tmp_path / "site")), where
    done = python("-m", "qlora_wgpu", "train", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()
