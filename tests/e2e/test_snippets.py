"""What README.md and the guides show of Python and YAML is taken as it stands."""

import re
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import yaml

from e2e.tiny import write_chats, write_model
from qlora_wgpu import load_config, train

ROOT = Path(__file__).parents[2]
RUN = """\
model: {path: models/SmolLM2-135M}
lora: {r: 4}
data: {train: chats.jsonl, eval: held-out.jsonl, max_seq_length: 32}
train: {max_steps: 1, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
output: {dir: runs/first}
device: {tune: never}
"""


def blocks(page, language):
    text = (ROOT / page).read_text()
    return [
        dedent(block)
        for _, block in re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, re.M | re.S)
    ]


@pytest.fixture
def place(tmp_path, monkeypatch, device):
    """What a reader has: a model, chats, a run's file and its run; runs share one device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qlora_wgpu.runs.opening.device_of", lambda settings: device)
    monkeypatch.setattr("qlora_wgpu.runs.prompts._MAX_TOKENS", 2)
    write_model(
        tmp_path / "models" / "SmolLM2-135M", num_hidden_layers=1, max_position_embeddings=40
    )
    write_chats(tmp_path / "chats.jsonl", 2)
    write_chats(tmp_path / "held-out.jsonl", 2, seed=1)
    (tmp_path / "run.yaml").write_text(RUN)
    train("run.yaml", quiet=True)
    return tmp_path


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_blocks_run_as_they_stand(place, page, capfd):
    names = {"input_ids": np.array([[5, 6, 7]]), "labels": np.array([[5, 6, 7]])}
    names["rows"] = [{"text": "a text"}]
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
    assert (place / "my-adapter" / "adapter_model.safetensors").exists()
    assert names["result"].steps == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("page", "sections"),
    [
        ("README.md", [{"model", "data", "lora", "train", "optim", "output"}]),
        ("docs/data.md", [{"data"}]),
        ("docs/preferences.md", [{"model", "data", "train", "optim"}]),
        ("docs/quantized.md", [{"model"}]),
    ],
)
def test_the_yaml_is_a_configuration(tmp_path, page, sections):
    shown = blocks(page, "yaml")
    assert [set(yaml.safe_load(block)) for block in shown] == sections
    for block, named in zip(shown, sections, strict=True):
        text = block if "model" in named else block + "model: {path: x}\n"
        (tmp_path / "run.yaml").write_text(text)
        load_config(tmp_path / "run.yaml")


@pytest.mark.quick
def test_the_lines_for_peft_are_eight_lines_of_python():
    """They run where torch is; here is none."""
    (block,) = blocks("docs/peft.md", "python")
    compile(block, "docs/peft.md", "exec")
    assert len([line for line in block.splitlines() if line]) == 8
