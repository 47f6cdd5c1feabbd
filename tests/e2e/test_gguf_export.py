"""``export``: a whole model in one GGUF file, measured before it gets its name."""

from __future__ import annotations

import json
import resource
from contextlib import contextmanager

import gguf
import numpy as np
import pytest
from support.commands import run_here
from support.gguf_files import byte_vocabulary, random_weights, write_model

import qlora_wgpu
from e2e.tiny import write_chats, write_weights
from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.exporting import gguf_tensors as tensors
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gguf.layout import TensorSlice
from qlora_wgpu.lora import AdapterConfig, save_adapter
from qlora_wgpu.runs import exporting

CONFIG = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 128,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
RUN = """\
model: {path: base}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: train.jsonl, max_seq_length: 64}
train: {max_steps: 1, compute_dtype: float32}
quant: {scheme: SCHEME}
output: {dir: out}
"""


@pytest.fixture
def place(tmp_path):
    """A base with a tokenizer, and a run on it that has an adapter."""
    config, base = CONFIG, tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    write_weights(base, random_weights(config))
    made = write_model(tmp_path / "v.gguf", config, random_weights(config),
                       keys=byte_vocabulary(TEMPLATE))  # fmt: skip
    from qlora_wgpu.checkpoint import ModelFolder

    texts = ModelFolder.without_weights(made).text_folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((texts / name).read_bytes())
    write_chats(tmp_path / "train.jsonl")
    set_run(tmp_path, "none")
    rng, matrices = np.random.default_rng(0), {}
    for spec in find_family(config).read(config).linears:
        at = f"base_model.model.{spec.name}.lora_"
        matrices[f"{at}A.weight"] = rng.standard_normal((2, spec.in_features), np.float32) * 0.2
        matrices[f"{at}B.weight"] = rng.standard_normal((spec.out_features, 2), np.float32) * 0.2
    targets = sorted({name.split(".")[-3] for name in matrices})
    settings = AdapterConfig(2, 4, 0.0, targets, False, "base")
    save_adapter(tmp_path / "out/adapter", matrices, settings)
    (tmp_path / "out/metrics.jsonl").write_text("")
    return tmp_path


def set_run(place, scheme: str) -> None:
    (place / "out").mkdir(exist_ok=True)
    text = RUN.replace("SCHEME", scheme)
    for key in ("base", "train.jsonl", "out"):
        text = text.replace(f": {key}", f": {place / key}")
    (place / "out/config.yaml").write_text(text)


def logits(path, device, adapter=None):
    with QLoRAModel.from_pretrained(
        path, quant=QuantConfig(scheme="none"), compute_dtype="float32", device=device,
        adapter=adapter,
    ) as model:  # fmt: skip
        return model.logits(np.arange(5, 25).reshape(2, 10))


def test_a_run_in_one_file(place, device) -> None:
    done = run_here("export", "out", "--type", "q8_0", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "as stored" not in done.stdout + done.stderr  # a note for those who train from it
    assert "in q8_0 written to out/model.gguf" in done.stdout
    assert "tokens of held-out data: logits by" in done.stdout
    assert float(done.stdout.split("nats per token (")[1].split()[0]) < 1  # % lost
    expected = logits(place / "base", device, place / "out/adapter")
    apart = logits(place / "out/model.gguf", device) - expected
    assert np.linalg.norm(apart) < 0.03 * np.linalg.norm(expected)
    reader = gguf.GGUFReader(place / "out/model.gguf")
    assert reader.get_field("general.name").contents() == "base out"
    assert reader.get_field("tokenizer.chat_template").contents() == TEMPLATE
    assert {path.name for path in (place / "out").glob("*model*")} == {
        "model.gguf", "model.Modelfile",
    }  # fmt: skip
    ollama = (place / "out/model.Modelfile").read_text()
    assert ollama.count('TEMPLATE """') == 1 and "has no TEMPLATE" not in done.stdout
    assert ollama.startswith("FROM ./model.gguf\n") and 'stop """<|im_end|>"""' in ollama
    assert "ollama create NAME -f out/model.Modelfile" in done.stdout
    again = run_here("export", "out", cwd=place)
    assert again.returncode == 2 and "model.gguf already exists" in again.stderr


def test_tokens_that_llama_cpp_makes_otherwise_are_named(place) -> None:
    """It does not normalize texts, which this tokenizer does."""
    path = place / "base/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    texts = ("plain", "cafe\u0301 au lait", "more", "none of these")
    rows = [[{"role": r, "content": t} for r in ("user", "assistant")] for t in texts]
    lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    (place / "train.jsonl").write_text(lines)
    done = run_here("export", "out", cwd=place)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "note: llama.cpp tokenizes 1 of 3 examples of the run differently from training" in said
    assert "in training and 'e'" in said and "au" in said
    # Without data or a check, prompts are rendered from the template.
    (place / "out/model.gguf").unlink()
    quick = run_here("export", "out", "--no-check", cwd=place)
    assert quick.returncode == 0 and "other tokens" not in quick.stdout


def test_by_default_it_is_as_exact_as_the_base(place, device) -> None:
    done = run_here("export", "out", "--gguf", "new/whole.gguf", cwd=place)
    assert done.returncode == 0 and "in f32" in done.stdout, done.stderr
    expected = logits(place / "base", device, place / "out/adapter")
    assert np.abs(logits(place / "new/whole.gguf", device) - expected).max() < 1e-5


def test_the_base_as_it_was_trained(place) -> None:
    """After NF4 the stored weights are further from what was trained than NF4's own."""
    set_run(place, "nf4")
    shares = []
    for base in ("original", "dequantized"):
        done = run_here("export", "out", "--gguf", f"{base}.gguf", "--base", base, cwd=place)
        assert done.returncode == 0, done.stderr
        assert ("is due to training on NF4, not to the file" in done.stdout) == (base == "original")
        last = done.stdout.rpartition("drift from base and adapter")[2]
        shares.append(float(last.split("KL divergence ")[1].split()[0]))
    assert shares[1] < 1e-6 < 1e-2 < shares[0]


def test_a_file_that_computes_something_else_is_not_kept(place, monkeypatch) -> None:
    monkeypatch.setattr(TensorSlice, "of", lambda part, array: array[::-1])
    done = run_here("export", "out", cwd=place)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "model.gguf is not kept, because its predictions differ" in done.stderr
    assert not list(place.glob("out/*gguf*"))
    unchecked = run_here("export", "out", "--no-check", cwd=place)
    assert unchecked.returncode == 0 and (place / "out/model.gguf").exists()
    assert "drift" not in unchecked.stdout


@pytest.mark.quick
def test_a_tokenizer_of_the_adapter_comes_first(place) -> None:
    folder = place / "out/adapter"
    for path in (place / "base").glob("tokenizer*"):
        text = path.read_text().replace("<|im_start|>", "<|begin|>")
        (folder / path.name).write_text(text)
    assert run_here("export", "out", "--no-check", cwd=place).returncode == 0
    fields = gguf.GGUFReader(place / "out/model.gguf").fields
    assert "<|begin|>" in fields["tokenizer.ggml.tokens"].contents()
    assert "<|begin|>" in fields["tokenizer.chat_template"].contents()
    assert Tokenizer.from_folder(folder).token_id("<|begin|>") is not None


@contextmanager
def files_of_at_most(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.quick
def test_a_disk_that_fills_up(place) -> None:
    with files_of_at_most(100_000):
        done = run_here("export", "out", "--no-check", cwd=place)
    assert done.returncode == 2 and "out/model.gguf cannot be written: File too" in done.stderr
    assert done.stderr.count("\n") == 1 and not list(place.glob("out/*gguf*"))


@pytest.mark.quick
def test_an_interrupted_export_leaves_nothing(place, monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tensors, "as_bytes", interrupted)
    assert run_here("export", "out", "--no-check", cwd=place).returncode not in (0, 1, 2)
    assert not list(place.glob("out/*gguf*"))


@pytest.mark.quick
def test_a_modelfile_that_its_user_has_changed_stays(place) -> None:
    changed = place / "out/model.Modelfile"
    changed.write_text("FROM ./model.gguf\nSYSTEM mine\n")
    done = run_here("export", "out", "--no-check", cwd=place)
    assert done.returncode == 2 and done.stderr == (
        "error: out/model.Modelfile already exists: choose another name with --gguf, or remove it\n"
    )
    assert changed.read_text().endswith("SYSTEM mine\n")
    assert not (place / "out/model.gguf").exists()
    changed.rename(place / "out/adapter.Modelfile")
    assert run_here("export", "out", "--adapter-only", cwd=place).returncode == 2
    assert not (place / "out/adapter.gguf").exists()
    assert run_here("export", "out", "--no-check", cwd=place).returncode == 0
    (place / "out/model.gguf").unlink()  # the same Modelfile is in nobody's way
    assert run_here("export", "out", "--no-check", cwd=place).returncode == 0


def no_device(*_, **__):
    raise DeviceError("no GPU was found")


@pytest.mark.quick
def test_without_a_device_nothing_is_written_in_vain(place, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "load_adapted", no_device)
    monkeypatch.setattr(tensors, "as_bytes", None)  # no tensor is made for a file
    done = run_here("export", "out", cwd=place)
    assert done.returncode == 2
    assert done.stderr == "error: no GPU was found; --no-check skips the measurement\n"
    assert not list(place.glob("out/*odel*"))


@pytest.mark.quick
def test_a_disk_without_room_is_told_before_anything_is_measured(place, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "load_adapted", no_device)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    done = run_here("export", "out", cwd=place)
    assert done.returncode == 2 and "out has 0.0 MB of free space" in done.stderr, done.stderr
    assert not list(place.glob("out/*odel*"))


@pytest.mark.quick
def test_a_merged_model_whose_drift_is_not_measured(place, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "load_adapted", no_device)
    done = run_here("merge", "out", cwd=place)
    assert done.returncode == 2 and done.stderr == (
        "error: out/merged is complete, but its drift is unknown: no GPU was found; --no-check "
        "skips the measurement\n"
    )
    assert (place / "out/merged/model.safetensors").exists()


@pytest.mark.quick
def test_an_adapter_alone(place) -> None:
    done = run_here("export", "out", "--adapter-only", cwd=place)
    assert done.returncode == 0 and "7 layers written to out/adapter.gguf" in done.stdout
    ollama = (place / "out/adapter.Modelfile").read_text()
    assert ollama.startswith("FROM ./base.gguf\nADAPTER ./adapter.gguf\n")


@pytest.mark.quick
def test_mistakes(place) -> None:
    other = {**CONFIG, "hidden_size": 32, "head_dim": 8}
    (place / "other").mkdir()
    (place / "other/config.json").write_text(json.dumps(other))
    write_weights(place / "other", random_weights(other))
    named = ("export", "--adapter", "out/adapter", "--gguf", "x.gguf")
    for args, message in (
        (("export", "out", "--type", "q5_k_m"), "llama-quantize model.gguf smaller.gguf Q5_K_M"),
        (("export", "out", "--type", "int4"), "--type 'int4' is not a type of GGUF files"),
        (("export", "out", "--gguf", "model.bin"), "must end in .gguf"),
        (("export", "out", "--adapter-only", "--type", "f16"), "are mutually exclusive"),
        ((*named, "--model", "other"), "does not fit other"),
        ((*named, "--model", "other", "--adapter-only"), "does not fit other"),
        ((*named, "--model", "gone"), "model folder 'gone' does not exist"),
    ):
        done = run_here(*args, cwd=place)
        assert done.returncode == 2 and message in done.stderr, (args, done.stderr)
        assert done.stderr.count("\n") == 1
    assert not list(place.glob("*x.gguf")) + list(place.glob("out/*gguf"))


def test_from_python(place, capfd) -> None:
    written = qlora_wgpu.export(place / "out", type="q8_0", gguf=place / "python.gguf")
    assert written.path == place / "python.gguf" and written.type_name == "q8_0"
    assert 0 < written.drift.lost < 0.01 and written.nbytes == written.path.stat().st_size
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
