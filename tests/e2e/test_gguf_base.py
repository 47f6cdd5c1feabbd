"""A GGUF file as the base of everything that takes a model."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from support.commands import run_here
from support.gguf_files import byte_vocabulary, random_weights, write_model

from e2e.hub_server import serving
from e2e.tiny import write_chats, write_weights
from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.checkpoint import ModelFolder

CONFIG = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
RUN = """\
model: {path: base.gguf}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: train.jsonl, max_seq_length: 64}
train: {max_steps: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 1,
        compute_dtype: float32}
optim: {learning_rate: 1e-2}
output: {dir: out}
"""
TYPES = {"attn_q.weight": Type.Q4_0, "ffn_down.weight": Type.Q5_1, "attn_v.weight": Type.F16}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    keys = byte_vocabulary(TEMPLATE)
    write_model(folder / "base.gguf", CONFIG, random_weights(CONFIG), keys=keys, types=TYPES,
                default=Type.Q8_0)  # fmt: skip
    write_chats(folder / "train.jsonl")
    (folder / "run.yaml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def trained(place):
    done = run_here("train", "run.yaml", cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "out"


def ids():
    return np.arange(5, 5 + 20).reshape(2, 10)


def logits(path, device, adapter=None, scheme="nf4"):
    with QLoRAModel.from_pretrained(
        path, quant=QuantConfig(scheme=scheme), compute_dtype="float32", device=device,
        adapter=adapter,
    ) as model:  # fmt: skip
        return model.logits(ids())


def test_what_is_stored_is_what_is_computed(place, tmp_path, device) -> None:
    """The same logits as of a folder that holds what each tensor stands for."""
    folder = ModelFolder.open(place / "base.gguf")
    assert (folder["model.layers.0.self_attn.q_proj.weight"].stored_dtype, folder.is_quantized) == (
        "Q4_0",
        True,
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(tmp_path, {name: folder[name].read() for name in folder.names()})
    expected = logits(tmp_path, device, scheme="none")
    for scheme in ("nf4", "none"):
        assert np.abs(logits(place / "base.gguf", device, scheme=scheme) - expected).max() < 1e-5


def test_types_that_no_kernel_reads(tmp_path, device) -> None:
    config = CONFIG | {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 256,
                       "head_dim": 64, "num_key_value_heads": 4}  # fmt: skip
    path = write_model(tmp_path / "m.gguf", config, random_weights(config), default=Type.TQ1_0,
                       types={"token_embd.weight": Type.F16})  # fmt: skip
    with pytest.warns(UserWarning, match=r"7 linear layers .* changed their weights by [0-9.]+ %"):
        assert np.isfinite(logits(path, device)).all()


def test_a_run(place, trained) -> None:
    config = json.loads((trained / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"].endswith("base.gguf")
    kept = {path.name for path in (trained / "adapter").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json"} <= kept
    for args in (
        ("generate", "out", "--prompt", "what is", "--max-new-tokens", 3),
        ("eval", "out"),
        ("data", "run.yaml"),
        ("estimate", "run.yaml"),
        ("estimate", "base.gguf", "--seq", 64),
        ("init", "--model", "base.gguf", "--data", "train.jsonl", "--out", "new.yaml"),
    ):
        done = run_here(*args, cwd=place)
        assert done.returncode == 0, (args, done.stderr)
        if args[0] == "estimate":
            assert "stay as stored: 4 in Q8_0, 1 in Q4_0" in done.stdout
    assert "path: base.gguf" in (place / "new.yaml").read_text()


def test_merging(place, trained, device) -> None:
    """Into what the weights stand for; what they were before is not known."""
    args = ("merge", "out", "--out", "merged", "--no-check")
    refused = run_here(*args, cwd=place)
    assert refused.returncode == 2 and "--base dequantized" in refused.stderr, refused.stderr
    done = run_here(*args, "--base", "dequantized", cwd=place)
    assert done.returncode == 0, done.stderr
    expected = logits(place / "base.gguf", device, trained / "adapter")
    moved = np.abs(expected - logits(place / "base.gguf", device)).max()
    apart = np.abs(logits(place / "merged", device, scheme="none") - expected).max()
    assert apart < 0.2 * moved  # rounded to bfloat16
    names = {path.name for path in (place / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    config = json.loads((place / "merged/config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]


def test_an_adapter_for_llama_cpp(place, trained) -> None:
    done = run_here("export", "out", "--adapter-only", "--gguf", "adapter.gguf", cwd=place)
    assert done.returncode == 0, done.stderr
    names = {tensor.name for tensor in GGUFReader(place / "adapter.gguf").tensors}
    assert "blk.0.attn_q.weight.lora_a" in names and len(names) == 14


@pytest.mark.quick
def test_mistakes(place) -> None:
    for args, message in (
        (("train", "base.gguf"), "init --model base.gguf"),
        (("estimate", "gone.gguf"), "unknown shape 'gone.gguf'"),
        (
            ("train", "run.yaml", "model.path=gone.gguf", "output.dir=new"),
            "model folder gone.gguf does not exist",
        ),
        (("quantize", "--model", "base.gguf", "--out", "new"), "is already quantized"),
    ):
        done = run_here(*args, cwd=place)
        assert done.returncode == 2 and message in done.stderr, (args, done.stderr)
        assert done.stderr.count("\n") == 1


OPENED = """\
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError
folder = ModelFolder.without_weights("owner/tiny-GGUF/Q8/tiny-Q8_0.gguf")
print(folder.config["hidden_size"], folder.text_folder.joinpath("tokenizer.json").exists())
try:
    ModelFolder.open("owner/tiny-GGUF/gone.gguf")
except CheckpointError as err:
    print(err)
"""


@pytest.mark.slow
def test_a_file_of_the_hub(place, tmp_path) -> None:
    root = tmp_path / "hub"
    repository = root / "models/owner/tiny-GGUF/Q8"
    repository.mkdir(parents=True)
    (repository / "tiny-Q8_0.gguf").write_bytes((place / "base.gguf").read_bytes())
    (repository / "tiny-F16.gguf").write_text("not wanted")
    with serving(root) as (address, log):
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"),
               "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", OPENED], capture_output=True, text=True, check=False,
            env={**os.environ, **env},
        )  # fmt: skip
        assert done.stdout.splitlines()[0] == "64 True", done.stderr
        assert "has no file gone.gguf" in done.stdout.splitlines()[1]
        assert not any("F16" in line for line in log if "/resolve/" in line)
