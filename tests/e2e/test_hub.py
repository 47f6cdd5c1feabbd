"""Models and data sets by their names on the hub, from a server that speaks its protocol."""

import json

import pyarrow
import pyarrow.parquet as parquet
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


@pytest.mark.full
def test_a_run_from_the_hub(hub, tmp_path):
    env, log = hub
    for target in ("owner/tiny-model", "run.yaml"):
        planned = run("estimate", target, cwd=tmp_path, env=env)
        assert planned.returncode == 0, planned.stderr
        assert "total" in planned.stdout
        assert "Fetching" not in planned.stderr
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


def test_a_revision_of_a_model(hub, tmp_path):
    """Its configuration and its tokenizer are those of the revision that is asked for."""
    env, log = hub
    name = "owner/tiny-model@refs/pr/3"
    planned = run("estimate", name, cwd=tmp_path, env=env)
    shown = run("data", "run.yaml", f"model.path={name}", "--json", cwd=tmp_path, env=env)
    assert (planned.returncode, shown.returncode) == (0, 0), planned.stderr + shown.stderr
    asked = {
        line.rpartition("/revision/")[2]
        for line in log
        if "models/" in line and "/revision/" in line
    }
    assert asked == {"refs/pr/3"}


def write_table(path, begin, rows):
    path.parent.mkdir(parents=True)
    texts = [f"{begin} {i}" for i in range(rows)]
    parquet.write_table(pyarrow.table({"text": texts}), path)


@pytest.fixture
def configurations(hub, tmp_path):
    """A data set whose own files cannot be read, and its conversion by configurations."""
    root = tmp_path / "hub"
    (root / "datasets/owner/math").mkdir()
    (root / "datasets/owner/math/rows.json.gz").write_bytes(b"packed")
    for name, split, rows in (
        ("main", "train", 3), ("main", "test", 2), ("socratic", "train", 4)
    ):  # fmt: skip
        write_table(root / f"converted/owner/math/{name}/{split}/0000.parquet", name, rows)
    write_table(root / "converted/owner/chats/default/validation/0000.parquet", "held out", 2)
    return hub[0]


@pytest.mark.cover(name=["owner/chats:validation"])
@pytest.mark.parametrize(
    ("name", "held_out", "texts"),
    [
        ("owner/math:main/train", False, ["main 0", "main 1", "main 2"]),
        ("owner/math:socratic/train", False, [f"socratic {i}" for i in range(4)]),
        ("owner/math:main/test", True, ["main 0", "main 1"]),
        ("owner/chats:validation", True, ["held out 0", "held out 1"]),
    ],
)
def test_a_configuration_of_a_data_set(configurations, tmp_path, name, held_out, texts):
    key = "eval" if held_out else "train"
    offline = {**configurations, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    for env in (configurations, offline):
        options = ["--eval"] * held_out
        shown = run("data", "run.yaml", "--json", *options, f"data.{key}={name}",
                    cwd=tmp_path, env=env)  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        rows = [json.loads(line)["text"] for line in shown.stdout.splitlines()]
        assert rows == texts


@pytest.mark.cover(name=["owner/math:main/dev"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/math", "has the configurations main, socratic: name one, such as owner/math:main"),
        (
            "owner/math:big/train",
            "has no configuration 'big': it has main, socratic; name one as in",
        ),
        ("owner/math:main/dev", "configuration main of the data set owner/math has no split 'dev'"),
    ],
)
def test_configurations_that_are_not_there(configurations, tmp_path, name, message):
    done = run("data", "run.yaml", f"data.train={name}", cwd=tmp_path, env=configurations)
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.cover(override=["data.train=owner/nothing"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=owner/nothing", "neither a local folder nor a model on the Hugging Face Hub"),
        (
            "model.path=owner/tiny-model@nothing",
            "owner/tiny-model on the Hugging Face Hub has no revision 'nothing'",
        ),
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


@pytest.mark.full
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
