"""Models and data sets by their names on the hub, from a server that speaks its protocol."""

import json

import pytest

from e2e.hub_server import serving
from e2e.test_cli import run
from e2e.tiny import write_chats, write_model

CONFIG = """\
model: {path: owner/tiny-model}
lora: {r: 4, lora_alpha: 8}
data: {train: owner/chats, eval: "owner/chats:test", max_seq_length: 64}
train: {max_steps: 1, gradient_accumulation_steps: 1}
"""


@pytest.fixture
def hub(tmp_path):
    root = tmp_path / "hub"
    write_model(root / "models/owner/tiny-model", shards=2)
    (root / "models/owner/tiny-model/pytorch_model.bin").write_text("not wanted")
    (root / "datasets/owner/chats/data").mkdir(parents=True)
    write_chats(root / "datasets/owner/chats/data/train-00000-of-00001.jsonl")
    write_chats(root / "datasets/owner/chats/data/test-00000-of-00001.jsonl", 6, seed=1)
    (root / "datasets/owner/chats/README.md").write_text("chats")
    (tmp_path / "run.yaml").write_text(CONFIG)
    with serving(root) as (address, log):
        yield {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"),
               "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}, log  # fmt: skip


def files(log):
    return {
        line.rpartition("/")[2] for line in log if line.startswith("GET") and "/resolve/" in line
    }


def test_a_run_from_the_hub(hub, tmp_path):
    env, log = hub
    planned = run("estimate", "run.yaml", cwd=tmp_path, env=env)
    assert planned.returncode == 0, planned.stderr
    assert "config.json" in files(log)
    shown = run("data", "run.yaml", "--json", cwd=tmp_path, env=env)
    assert shown.returncode == 0, shown.stderr
    assert len([json.loads(line) for line in shown.stdout.splitlines()]) == 24
    # So far no weight has been asked for.
    assert not any(name.endswith((".safetensors", ".bin")) for name in files(log))
    done = run("train", "run.yaml", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "pytorch_model.bin" not in files(log)
    config = json.loads((tmp_path / "runs/first/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/tiny-model"
    # What is in the cache is not fetched again, and is enough without a network.
    before = len([line for line in log if line.startswith("GET") and "safetensors" in line])
    offline = {**env, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    for given in (env, offline):
        again = run("train", "run.yaml", "--overwrite", cwd=tmp_path, env=given)
        assert again.returncode == 0, again.stderr
    assert len([x for x in log if x.startswith("GET") and "safetensors" in x]) == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=owner/nothing", "neither a folder nor a model on the Hugging Face hub"),
        ("data.train=owner/nothing", "nor a data set on the Hugging Face Hub"),
        ("data.train=owner/chats:validation", "no split 'validation': its files begin with"),
    ],
)
def test_names_that_are_not_there(hub, tmp_path, override, message):
    env, _ = hub
    done = run("train", "run.yaml", override, cwd=tmp_path, env=env)
    assert done.returncode == 2, done.stdout
    assert message.lower() in done.stderr.lower() and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_download_that_was_cut_off_goes_on(hub, tmp_path):
    env, log = hub
    assert run("train", "run.yaml", cwd=tmp_path, env=env).returncode == 0
    blobs = tmp_path / "cache/hub/models--owner--tiny-model/blobs"
    largest = max(blobs.iterdir(), key=lambda p: p.stat().st_size)
    content = largest.read_bytes()
    largest.unlink()
    (blobs / f"{largest.name}.incomplete").write_bytes(content[:1000])
    log.clear()
    done = run("train", "run.yaml", "--overwrite", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert largest.read_bytes() == content
