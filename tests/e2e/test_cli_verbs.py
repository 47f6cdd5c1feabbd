"""The verbs around training, from the outside: init, data, eval, chat, merge, quantize, export."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.commands import run_here

from e2e.test_cli import CONFIG
from e2e.tiny import write_chats, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs")
    write_model(folder / "model", store="bfloat16", shards=2)
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 6, seed=1)
    (folder / "run.yaml").write_text(CONFIG)
    done = run_here("train", "run.yaml", "train.max_steps=12", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def refused(place, *args):
    done = run_here(*args, cwd=place)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    return done.stderr


def test_init_data_train(place):
    done = run_here("init", "--model", "model", "--data", "train.jsonl", "--eval", "eval.jsonl",
               "--out", "new.yaml", cwd=place)  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = run_here("data", "new.yaml", "--samples", 1, cwd=place)
    assert shown.returncode == 0, shown.stderr
    for text in ("what is", "tokens per row", "24 read, 24 used", "loss on", "per epoch"):
        assert text in shown.stdout, text
    planned = run_here("estimate", "new.yaml", cwd=place)
    assert planned.returncode == 0, planned.stderr
    trained = run_here("train", "new.yaml", "train.max_steps=1", cwd=place)
    assert trained.returncode == 0, trained.stderr
    assert (place / "runs/model/adapter/adapter_model.safetensors").exists()
    (place / "long.txt").write_text("the quick brown fox. " * 2000)
    text = run_here(
        "init", "--model", "model", "--data", "long.txt", "--out", "text.yaml", cwd=place
    )
    assert text.returncode == 0, text.stderr
    assert run_here("data", "text.yaml", cwd=place).returncode == 0
    assert "already exists" in refused(
        place, "init", "--model", "model", "--data", "train.jsonl", "--out", "new.yaml"
    )
    assert "does not exist" in refused(
        place, "init", "--model", "model", "--data", "gone.jsonl", "--out", "x.yaml"
    )


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--epochs", "train.num_train_epochs"), ("--max-steps", "train.max_steps"),
        ("--lr", "optim.learning_rate"), ("--x", None),
    ],
)  # fmt: skip
def test_a_setting_taken_for_an_option(place, option, setting):
    told = run_here("train", "run.yaml", option, "3", cwd=place).stderr
    # Versions of click differ in the quotation marks.
    assert re.search(f"No such option:? '?{option}\\b", told)
    assert ("It is a setting" in told) == (setting is not None)
    assert setting is None or f"It is a setting: {setting}=VALUE\n" in told


def test_data_as_json(place):
    shown = run_here("data", "run.yaml", "--json", "data.packing=true", cwd=place)
    assert shown.returncode == 0, shown.stderr
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(rows) == 24
    for row in rows:
        assert set(row) == {"text", "input_ids", "labels"}
        assert len(row["input_ids"]) == len(row["labels"])
        learnt = [i for i in row["labels"] if i != -100]
        assert 0 < len(learnt) < len(row["labels"])
        assert "what is" in row["text"]
    assert "data.eval is not set" in refused(place, "data", "run.yaml", "--eval", "data.eval=null")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "run.yaml", "--json", "data.train=näher🙂.jsonl"),
        ("eval", "out", "--json", "--data", "näher🙂.jsonl"),
        ("generate", "out", "--prompts", "näher🙂.jsonl", "--max-new-tokens", 1),
    ],
    ids=lambda arguments: arguments[0],
)
def test_json_is_utf_8_whatever_the_console_has(place, arguments, encoding):
    row = {"prompt": "what is é 你🙂 ", "completion": "it"}
    (place / "näher🙂.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    done = run_here(*arguments, cwd=place, encoding=encoding)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.decode("utf-8").splitlines()
    assert "näher🙂" in line if arguments[0] == "eval" else "é 你🙂" in line
    assert json.loads(line)


def test_eval(place):
    done = run_here("eval", "run.yaml", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    logged = [json.loads(x) for x in (place / "out/metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval_loss"] for row in logged if "eval_loss" in row]
    assert figures["base"]["loss"] == pytest.approx(held_out[0], abs=1e-5)
    assert figures["adapter"]["loss"] == pytest.approx(held_out[-1], abs=1e-5)
    assert figures["adapter"]["perplexity"] == pytest.approx(np.exp(held_out[-1]), rel=1e-4)
    table = run_here("eval", "run.yaml", "--data", "train.jsonl", cwd=place)
    assert table.returncode == 0 and "perplexity" in table.stdout


def test_chat(place):
    newest = max((place / "out/checkpoints").iterdir()).relative_to(place)
    turns = (
        "what is 1 and 2?\n/adapter off\nwhat is 1 and 2?\n/nonsense\n/reset\n"
        f"/adapter nothing\n/adapter {newest}\n/adapter\n/exit\nunread\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "qlora_wgpu", "chat", "--model", "model", "--adapter",
         "out/adapter", "--max-new-tokens", "8"],
        input=turns, cwd=place, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) >= 2 and answers[0] != answers[-1]
    assert "the adapter is off" in done.stderr and "/reset" in done.stderr
    assert "there is no run, adapter or model in nothing" in done.stderr
    assert f"using {newest}" in done.stderr and "default (out/adapter)" in done.stderr


def test_chat_gives_the_template_its_variables(place):
    (place / "effort.jinja").write_text(
        "{% if reasoning_effort != 'low' %}{{ raise_exception('effort ' + reasoning_effort) }}"
        "{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    args = ("chat", "--model", "model", "--max-new-tokens", "2", "--chat-template", "effort.jinja")
    for effort, answers in (("low", True), ("huge", False)):
        given = json.dumps({"reasoning_effort": effort})
        done = run_here(*args, "--chat-template-kwargs", given, cwd=place, stdin="what is 1?\n")
        assert done.returncode == 0, done.stderr
        assert ("effort huge" not in done.stderr) is answers
    message = refused(place, *args, "--chat-template-kwargs", "[1]")
    assert "'chat_template_kwargs' must be an object" in message


def test_a_run_s_folder_is_all_that_is_needed(place, tmp_path):
    """Even where the base has lost its template: what a prompt is like is kept by the run."""
    shutil.copytree(place / "model", tmp_path / "model")
    (place / "rows.jsonl").write_text('{"instruction": "what is 1?", "output": "1."}\n' * 4)
    (tmp_path / "turns.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    rows = {
        "chat": ("train.jsonl", f"data.chat_template={tmp_path / 'turns.jinja'}"),
        "alpaca": ("rows.jsonl", "data.eval=rows.jsonl", "data.max_seq_length=256"),
    }
    for name, (data, *more) in rows.items():
        args = (f"model.path={tmp_path / 'model'}", f"data.train={data}", f"output.dir={name}")
        done = run_here("train", "run.yaml", *args, *more, "train.max_steps=1", cwd=place)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"qlora-wgpu chat {name}"
        answered = run_here(
            "generate", name, "--prompt", "what is 1?", "--max-new-tokens", 2, cwd=place
        )
        assert answered.returncode == 0 and "what is" not in answered.stdout, answered.stderr
    (tmp_path / "turns.jinja").unlink()
    done = run_here("eval", "chat", "data.eval=eval.jsonl", "--json", cwd=place)
    assert json.loads(done.stdout)["adapter_path"] == "chat/adapter", done.stderr


def logits(path, adapter=None, scheme="none"):
    lora = LoraConfig(r=4, lora_alpha=8)
    model = QLoRAModel.from_pretrained(path, lora, QuantConfig(scheme=scheme), "float32")
    if adapter is not None:
        model.load_adapter(adapter)
    return model.logits(np.arange(20)[None])


def test_training_goes_on_from_an_adapter(place):
    args = ("lora.init_from=out/adapter", "train.max_steps=1", "optim.learning_rate=1e-9")
    done = run_here("train", "run.yaml", *args, "output.dir=on", cwd=place)
    assert done.returncode == 0, done.stderr
    before, after = (
        load_file(place / name / "adapter/adapter_model.safetensors") for name in ("out", "on")
    )
    assert all(np.allclose(array, after[name], atol=1e-6) for name, array in before.items())
    assert "trained with r = 4" in refused(
        place, "train", "run.yaml", *args, "lora.r=5", "output.dir=other"
    )


def test_packed_and_reported(place):
    done = run_here(
        "train", "run.yaml", "data.packing=true", "data.max_seq_length=128", "output.dir=packed",
        "train.max_steps=2", "log.report_to=[tensorboard]", "optim.loraplus_lr_ratio=4",
        "train.neftune_noise_alpha=5", "train.label_smoothing_factor=0.1", cwd=place,
    )  # fmt: skip
    if "pip install" in done.stderr:
        pytest.skip("the extra tensorboard is not installed")
    assert done.returncode == 0, done.stderr
    page = (place / "packed/report.html").read_text()
    assert page.startswith("<!doctype html>") and "<code>qlora-wgpu train run.yaml" in page
    assert list((place / "packed/tensorboard").iterdir())


def test_merge(place):
    done = run_here("merge", "--model", "model", "--adapter", "out/adapter", "--out", "merged",
               cwd=place)  # fmt: skip
    assert done.returncode == 0 and "drift" in done.stdout, done.stderr
    files = {p.name for p in (place / "merged").iterdir()}
    assert files == {p.name for p in (place / "model").iterdir()}
    apart = np.abs(logits(place / "merged") - logits(place / "model", place / "out/adapter"))
    moved = np.abs(logits(place / "model") - logits(place / "model", place / "out/adapter"))
    assert apart.max() < 0.1 * moved.max()  # the merged weights are rounded to bfloat16
    done = run_here("merge", "--model", "model", "--adapter", "out/adapter", "--out", "merged-dq",
               "--base", "dequantized", "--no-check", cwd=place)  # fmt: skip
    assert done.returncode == 0 and "drift" not in done.stdout, done.stderr
    trained = logits(place / "model", place / "out/adapter", "nf4")
    apart = np.abs(logits(place / "merged-dq") - trained)
    assert apart.max() < 0.1 * moved.max()
    assert "already exists" in refused(
        place, "merge", "--model", "model", "--adapter", "out/adapter", "--out", "merged"
    )
    write_model(place / "other", hidden_size=64)
    assert "error" in refused(
        place, "merge", "--model", "other", "--adapter", "out/adapter", "--out", "no"
    )
    assert not (place / "no").exists()


def test_a_merge_asks_first_whether_the_disk_has_room(place, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    named = "--model", "model", "--adapter", "out/adapter"
    text = refused(place, "merge", *named, "--out", "new/merged")
    assert "new has 1.0 MB of free space, but the model needs 1." in text and "--out" in text
    assert not (place / "new").exists()


@pytest.mark.parametrize("double", [True, False])
def test_quantize(place, double):
    out = "model-nf4" if double else "model-4bit"  # as which it is the same model
    flag = "--double-quant" if double else "--no-double-quant"
    done = run_here("quantize", "--model", "model", "--out", out, flag, cwd=place)
    assert done.returncode == 0, done.stderr
    config = json.loads((place / out / "config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_use_double_quant"] is double
    quant = QuantConfig(double_quant=double)
    lora = LoraConfig(r=4)
    own = QLoRAModel.from_pretrained(place / "model", lora, quant, "float32").base_state_dict()
    stored = QLoRAModel.from_pretrained(place / out, lora, None, "float32").base_state_dict()
    assert all(np.array_equal(array, stored[name]) for name, array in own.items())
    assert "is already quantized" in refused(place, "quantize", "--model", out, "--out", "twice")
    assert "original weights are unknown" in refused(
        place, "merge", "--model", out, "--adapter", "out/adapter", "--out", "from-q4"
    )
    merged = run_here("merge", "--model", out, "--adapter", "out/adapter", "--base", "dequantized",
                 "--out", f"from-{out}", "--no-check", cwd=place)  # fmt: skip
    assert merged.returncode == 0, merged.stderr
    assert "quantization_config" not in (place / f"from-{out}/config.json").read_text()
    assert set(load_any(place / f"from-{out}")) == set(load_any(place / "model"))


def load_any(folder):
    from qlora_wgpu.checkpoint import ModelFolder

    return ModelFolder.open(folder).names()


def test_export_to_gguf(place):
    import gguf

    named = ("export", "--model", "model", "--adapter", "out/adapter", "--gguf")
    done = run_here(*named, "a.gguf", "--adapter-only", cwd=place)
    assert done.returncode == 0, done.stderr
    reader = gguf.GGUFReader(place / "a.gguf")
    assert reader.get_field("general.type").contents() == "adapter"
    assert reader.get_field("adapter.lora.alpha").contents() == 8.0
    tensors = {t.name: np.asarray(t.data) for t in reader.tensors}
    stored = load_file(place / "out/adapter/adapter_model.safetensors")
    assert len(tensors) == len(stored)
    at = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    for leaf in "ab":
        matrix = tensors[f"blk.0.ffn_down.weight.lora_{leaf}"]
        assert np.array_equal(matrix, stored[f"{at}{leaf.upper()}.weight"])
    heads = json.loads((place / "model/config.json").read_text())["num_attention_heads"]
    b = stored["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    half = len(b) // heads // 2
    matrix = tensors["blk.0.attn_q.weight.lora_b"]
    # Elements i and i + half of a head, which rotate together, are neighbours there.
    assert np.array_equal(matrix[:4], b[[0, half, 1, half + 1]])
    assert "must end in .gguf" in refused(place, *named, "a.bin", "--adapter-only")
    assert "a.gguf already exists" in refused(place, *named, "a.gguf", "--adapter-only")
    assert "tokenizer.json is a 'WordLevel' tokenizer" in refused(place, *named, "whole.gguf")
    assert not (place / "whole.gguf").exists()
