"""The command line from the outside: what works, and what a mistake looks like."""

import json
import os
import subprocess
import sys

import pytest
from support.commands import run_here

from e2e.tiny import write_chats, write_model
from qlora_wgpu.runs import estimation
from qlora_wgpu.selfcheck import results
from qlora_wgpu.tuning import tuner


def run(*args, cwd, env=None):
    return subprocess.run(
        [sys.executable, "-m", "qlora_wgpu", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: eval.jsonl, max_seq_length: 64}
train: {max_steps: 3, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
optim: {learning_rate: 1e-2}
output: {dir: out}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 6, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def test_train_then_generate(place):
    done = run_here("train", "run.yaml", "optim.weight_decay=0.01", cwd=place)
    assert done.returncode == 0, done.stderr
    for text in ("planned device memory", "held-out loss", "before", "after", "expected", "out"):
        assert text in done.stdout, text
    assert "weight_decay: 0.01" in (place / "out" / "config.yaml").read_text()
    rows = [json.loads(line) for line in (place / "out/metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in row for row in rows) == 3

    second = run_here("train", "run.yaml", cwd=place)
    assert second.returncode == 2 and "already contains a run" in second.stderr
    assert run_here("train", "run.yaml", "--overwrite", cwd=place).returncode == 0

    args = ("generate", "--model", "model", "--adapter", "out/adapter", "--max-new-tokens", 5)
    plain = run_here(*args, "--prompt", "what is", cwd=place)
    assert plain.returncode == 0 and plain.stdout.startswith("what is"), plain.stderr
    chat = run_here(*args, "--prompt", "what is 1 and 2?", "--chat", cwd=place)
    assert chat.returncode == 0, chat.stderr


def test_text_file(place):
    (place / "train.txt").write_text("the quick brown fox. " * 60)
    done = run_here(
        "train", "run.yaml", "data.train=train.txt", "data.eval=null", "output.dir=txt",
        "train.max_steps=1", cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (place / "txt" / "adapter" / "adapter_config.json").exists()


def test_doctor_and_help(place, monkeypatch):
    monkeypatch.setattr(estimation, "training_speed", lambda config, device: 100.0)
    doctor = run_here("doctor", cwd=place)
    assert doctor.returncode == 0 and "driver" in doctor.stdout and "features" in doctor.stdout
    assert "You have " in doctor.stdout
    for args in (("--help",), ("train", "--help"), ("generate", "--help"), ("doctor", "--help")):
        shown = run_here(*args, cwd=place)
        assert shown.returncode == 0 and "Usage" in shown.stdout
    assert run("--version", cwd=place).stdout.startswith("qlora-wgpu, version")


def truncate(place):
    file = place / "model" / "model.safetensors"
    kept = file.read_bytes()
    file.write_bytes(kept[: len(kept) // 2])
    return lambda: file.write_bytes(kept)


def edit_config(**changes):
    def break_it(place):
        file = place / "model" / "config.json"
        kept = file.read_text()
        file.write_text(json.dumps({**json.loads(kept), **changes}))
        return lambda: file.write_text(kept)

    return break_it


def remove(name):
    def break_it(place):
        file = place / name
        kept = file.read_bytes()
        file.unlink()
        return lambda: file.write_bytes(kept)

    return break_it


def replace(name, text):
    def break_it(place):
        file = place / name
        if not file.exists():
            file.write_text(text)
            return file.unlink
        kept = file.read_bytes()
        file.write_text(text)
        return lambda: file.write_bytes(kept)

    return break_it


NOTHING = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
MISTAKES = {
    "missing config": (("train", "gone.yaml"), None, None, "gone.yaml"),
    "unknown key": (("train", "run.yaml", "lora.rank=4"), None, None, "did you mean 'lora.r'"),
    "wrong type": (("train", "run.yaml", "train.max_steps=ten"), None, None, "train.max_steps"),
    "no model": (("train", "run.yaml", "model.path=gone"), None, None, "gone"),
    "model type": (("train", "run.yaml"), edit_config(model_type="mamba"), None, "mamba"),
    "rope type": (
        ("train", "run.yaml"),
        edit_config(rope_scaling={"rope_type": "mrope", "factor": 2.0}),
        None,
        "mrope",
    ),
    "truncated weights": (("train", "run.yaml"), truncate, None, "truncated"),
    "no weights": (("train", "run.yaml"), remove("model/model.safetensors"), None, "safetensors"),
    "wrong shape": (("train", "run.yaml"), edit_config(intermediate_size=60), None, "shape"),
    "missing tensor": (("train", "run.yaml"), edit_config(num_hidden_layers=3), None, "layers.2"),
    "negative eps": (("train", "run.yaml"), edit_config(rms_norm_eps=-1.0), None, "rms_norm_eps"),
    "eps": (("train", "run.yaml"), edit_config(rms_norm_eps=float("inf")), None, "rms_norm_eps"),
    "no heads": (("train", "run.yaml"), edit_config(num_attention_heads=0), None, "num_attention"),
    "kv heads": (("train", "run.yaml"), edit_config(num_key_value_heads=4), None, "a multiple of"),
    "untied without a head": (
        ("train", "run.yaml"), edit_config(tie_word_embeddings=False), None, "lm_head",
    ),
    "modules to save": (
        ("train", "run.yaml", "lora.modules_to_save=[lm_head]"), None, None,
        "lm_head is tied to model.embed_tokens",
    ),
    "rank 0": (("train", "run.yaml", "lora.r=0"), None, None, "lora.r"),
    "no such module": (
        ("train", "run.yaml", "lora.target_modules=[q_porj]"), None, None, "did you mean 'q_proj'",
    ),
    "learning rate": (("train", "run.yaml", "optim.learning_rate=-1"), None, None, "learning_rate"),
    "a list": (("train", "list.yaml"), replace("list.yaml", "- 1\n"), None, "list.yaml"),
    "a tab": (("train", "tab.yaml"), replace("tab.yaml", "model:\n\tpath: x\n"), None, "tab.yaml"),
    "broken row": (
        ("train", "run.yaml"), replace("train.jsonl", '{"text": "a b c"}\n{"text'), None, "2",
    ),
    "no column": (
        ("train", "run.yaml"), replace("train.jsonl", '{"words": "a b c"}\n'), None, "train.jsonl",
    ),
    "broken config": (("train", "run.yaml"), replace("model/config.json", "{"), None, "config"),
    "out is a file": (("train", "run.yaml", "output.dir=run.yaml"), None, None, "run.yaml"),
    "enormous": (
        ("train", "run.yaml", "train.per_device_train_batch_size=1000000"), None, None, "lower",
    ),
    "tune": (("train", "run.yaml", "device.tune=often"), None, None, "device.tune"),
    "no tokenizer": (("train", "run.yaml"), remove("model/tokenizer.json"), None, "tokenizer"),
    "no data": (("train", "run.yaml", "data.train=trian.jsonl"), None, None, "train.jsonl"),
    "empty data": (("train", "run.yaml"), replace("train.jsonl", ""), None, "train.jsonl"),
    "broken data": (("train", "run.yaml"), replace("train.jsonl", '{"a"'), None, "line 1"),
    "small vocabulary": (("train", "run.yaml"), edit_config(vocab_size=70), None, "(70, 36)"),
    "no such device": (("train", "run.yaml", "device.gpu=radeon9"), None, None, "radeon9"),
    "no such gpu": (
        ("generate", "--model", "model", "--gpu", "radeon9", "--prompt", "x"), None, None,
        "radeon9",
    ),
    "no such gpu, by the old name": (
        ("generate", "--model", "model", "--device", "radeon9", "--prompt", "x"), None, None,
        "radeon9",
    ),
    "no such layer": (("train", "run.yaml", "lora.target_modules=[q]"), None, None, "'q'"),
    "no adapter folder": (
        ("generate", "--model", "model", "--adapter", "gone", "--prompt", "x"), None, None, "gone",
    ),
    "no such GPU, doctor": (("doctor", "--gpu", "nope"), None, None, "no GPU matches 'nope'"),
    "no driver, doctor": (("doctor",), None, NOTHING, "mesa-vulkan-drivers"),
    "no driver, train": (("train", "run.yaml"), None, NOTHING, "mesa-vulkan-drivers"),
}  # fmt: skip
# In processes of their own, as a user runs them: one before a GPU is opened, one after.
SUPERVISED = ("unknown key", "enormous")


@pytest.mark.quick(
    mistake=[
        "missing config",
        "wrong type",
        "rope type",
        "wrong shape",
        "no such module",
        "broken row",
        "small vocabulary",
    ]
)
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_sentence_and_exit_code_2(place, mistake):
    args, break_it, env, expected = MISTAKES[mistake]
    if args[0] == "train":
        args = [*args[:2], "output.dir=bad", *args[2:]]
    mend = break_it(place) if break_it else lambda: None
    try:
        if env or mistake in SUPERVISED:
            done = run(*args, cwd=place, env=env)
        else:
            done = run_here(*args, cwd=place)
    finally:
        mend()
    assert done.returncode == 2, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if line.strip()]
    lines = [line for line in said if not line.startswith("warning: ")]  # of the data, before
    assert "Traceback" not in done.stdout + done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert expected in lines[0], lines[0]
    assert not (place / "bad").exists()


@pytest.mark.quick
def test_a_key_s_old_name_is_told_on_stderr(place):
    done = run_here("train", "run.yaml", "device.adapter=radeon9", "output.dir=bad", cwd=place)
    note, error = [line for line in done.stderr.splitlines() if line.strip()]
    assert note.startswith("note: device.adapter was renamed to device.gpu")
    assert done.returncode == 2 and error.startswith("error: ") and "radeon9" in error


@pytest.fixture
def own_choices(place, monkeypatch):
    """A cache for the choices of this test alone; kernels are found right once for all, and timed
    no more often than is needed.
    """
    checked = results.cache_file()
    monkeypatch.setattr(results, "cache_file", lambda: checked)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(tuner, "_MAX_ROUNDS", tuner._MIN_ROUNDS)
    return place / "cache" / "qlora-wgpu" / "tuning.json"


@pytest.mark.full
def test_tuning_is_done_once_and_shown(place, own_choices, monkeypatch):
    losses, times = [], []
    for folder in ("tuned", "again"):
        done = run_here(
            "train", "run.yaml", "device.tune=always", f"output.dir={folder}", cwd=place
        )
        assert done.returncode == 0, done.stderr
        assert "autotuned kernels: " in done.stdout
        rows = (place / folder / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row).get("loss") for row in rows])
        assert len(json.loads(own_choices.read_text())) == 1
        times.append(own_choices.stat().st_mtime_ns)
    assert losses[0] == losses[1] and times[0] == times[1]
    monkeypatch.setattr(estimation, "training_speed", lambda config, device: 100.0)
    assert run_here("doctor", cwd=place).stdout.count("autotuned: hidden") == 1
    assert own_choices.stat().st_mtime_ns == times[0]
