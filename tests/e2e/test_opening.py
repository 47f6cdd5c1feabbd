"""What opens an adapter opens it as its run trained it, whatever the defaults are."""

import json
import shutil
import warnings
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from references.seeded import adapter, batch, weights
from safetensors.numpy import save_file

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.cli import _opening, commands
from qlora_wgpu.config.loading import find_run
from qlora_wgpu.config.section import RenamedKeyWarning
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.exporting import merge
from qlora_wgpu.runs import evaluation, exporting, opening, resolve
from qlora_wgpu.training import Observer

REFERENCES = Path(__file__).parents[1] / "references"
QUANT = {"blocksize": 128, "double_quant": False}


class Notes(Observer):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def settings(folder, **sections):
    return {
        "model": {"path": str(folder / "model")},
        "lora": {"r": 4, "lora_alpha": 8},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "max_seq_length": 64,
        },
        "output": {"dir": str(folder / "out"), "save_steps": 1},
        **sections,
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opening")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 6, seed=1)
    train = {
        "max_steps": 3,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 2,
        "compute_dtype": "float32",
    }
    trained = settings(
        folder, quant=QUANT, train=train, device={"backend": "wgpu"}, optim={"learning_rate": 1e-2}
    )
    qlora_wgpu.train(trained)
    return folder


def logged(place):
    rows = [json.loads(line) for line in (place / "out/metrics.jsonl").read_text().splitlines()]
    return [row["eval_loss"] for row in rows if "eval_loss" in row][-1]


def test_log_eval_and_merged_model_agree(place, tmp_path):
    """The defaults would say blocks of 64 and double quantization, which is told apart by far."""
    notes = Notes()
    measured = qlora_wgpu.evaluate(settings(place), notes)
    assert measured.adapter.loss == pytest.approx(logged(place), abs=2e-6)
    assert "quant.blocksize = 128" in notes.texts[0] and len(notes.texts) == 1
    merge(place / "model", place / "out/adapter", tmp_path / "merged", base="dequantized")
    plain = settings(place, model={"path": str(tmp_path / "merged")}, quant={"scheme": "none"})
    plain["train"] = {"compute_dtype": "float32"}
    plain["output"] = {"dir": str(tmp_path / "none")}
    merged = qlora_wgpu.evaluate(plain).base.loss
    assert merged == pytest.approx(logged(place), abs=2e-6)


def test_the_tokenizer_beside_the_adapter_is_enough_to_measure(place, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(place / "model", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    measured = qlora_wgpu.evaluate(place / "out", overrides=[f"model.path={bare}"])
    assert measured.adapter.loss == pytest.approx(logged(place), abs=2e-6)


def test_without_a_run_the_configuration_counts(place, tmp_path):
    shutil.copytree(place / "out/adapter", tmp_path / "adapter")
    notes = Notes()
    measured = qlora_wgpu.evaluate(
        settings(place, train={"compute_dtype": "float32"}),
        notes,
        adapter=str(tmp_path / "adapter"),
    )
    assert abs(measured.adapter.loss - logged(place)) > 1e-4
    assert "belongs to no run" in notes.texts[0] and "quant.blocksize = 64" in notes.texts[0]


def test_from_python(place):
    model = qlora_wgpu.open_adapter(place / "out/adapter")
    assert model.quant == QuantConfig(**QUANT) and model.compute_dtype == "float32"
    assert model.device.backend.name == "wgpu"
    other = qlora_wgpu.open_adapter(place / "out/adapter", compute_dtype="bfloat16")
    assert other.quant == QuantConfig(**QUANT) and other.compute_dtype == "bfloat16"


def test_a_folder_of_checkpoints_names_the_run(place):
    with pytest.raises(ConfigError, match=r"model in .*checkpoints: did you mean .*/out\?"):
        qlora_wgpu.open_adapter(place / "out" / "checkpoints")


def test_other_quantization_than_trained_is_told(place, device):
    path, lora = place / "model", LoraConfig(r=4, lora_alpha=8)
    model = QLoRAModel.from_pretrained(path, lora, device=device)
    with pytest.warns(UserWarning, match="blocksize = 128"):
        model.load_adapter(place / "out/adapter")
    model = QLoRAModel.from_pretrained(path, lora, QuantConfig(**QUANT), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_adapter(place / "out/adapter")


def test_the_run_of_an_adapter(place, tmp_path):
    run = place / "out"
    checkpoint = next((run / "checkpoints").iterdir())
    assert find_run(run / "adapter") == find_run(checkpoint) == run
    assert find_run(place / "model") is None
    (tmp_path / "config.yaml").write_text("of another program\n")
    assert find_run(tmp_path / "adapter") is None


class Opened(Exception):
    """Raised in place of loading, with the settings to load with."""


@pytest.fixture
def opened(monkeypatch):
    """Runs a command up to the point where it would load the model; the settings that it has."""

    def stop(source, adapter, settings, observer, reading=None):
        raise Opened(settings)

    # All are imported before: what first imports its own while one is replaced would keep it.
    for module in (opening, evaluation, _opening, resolve, exporting):
        monkeypatch.setattr(module, "load_adapted", stop)

    def run(*args):
        result = CliRunner().invoke(deepcopy(commands), list(map(str, args)))
        assert isinstance(result.exception, Opened), result.output
        return result.exception.args[0], " ".join(result.output.split())

    return run


COMMANDS = {
    "generate": ("--prompt", "what is"),
    "chat": (),
    "merge": ("--out", "merged"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command(place, tmp_path, opened, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = [command, "--model", place / "model", *COMMANDS[command], "--adapter"]
    by_run, printed = opened(*args, place / "out/adapter")
    assert by_run.quant == QuantConfig(**QUANT)
    assert (by_run.train.compute_dtype, by_run.device.backend) == ("float32", "wgpu")
    assert "note" not in printed
    shutil.rmtree(tmp_path / "merged", ignore_errors=True)
    asked, _ = opened(*args, place / "out/adapter", "--scheme", "none", "--gpu", "1")
    assert (asked.quant.scheme, asked.quant.blocksize, asked.device.gpu) == ("none", 128, "1")
    shutil.rmtree(tmp_path / "merged", ignore_errors=True)
    shutil.copytree(place / "out/adapter", tmp_path / "alone")
    unknown, printed = opened(*args, tmp_path / "alone")
    assert unknown.quant == QuantConfig() and unknown.train.compute_dtype == "bfloat16"
    assert "belongs to no run" in printed
    shutil.rmtree(tmp_path / "merged", ignore_errors=True)
    named, printed = opened(*args, tmp_path / "alone", "--config", place / "out/config.yaml")
    assert named.quant == QuantConfig(**QUANT) and "note" not in printed
    shutil.rmtree(tmp_path / "merged", ignore_errors=True)
    run, printed = opened(command, place / "out", *COMMANDS[command])
    assert run == by_run and "note" not in printed


def test_eval_and_its_overrides(place, tmp_path, opened):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(settings(place)))
    by_run, printed = opened("eval", path)
    assert by_run.quant == QuantConfig(**QUANT) and by_run.device.backend == "wgpu"
    assert "quant.blocksize = 128" in printed
    with pytest.warns(RenamedKeyWarning, match="renamed to device.gpu"):
        asked, _ = opened("eval", path, "quant.blocksize=32", "device.adapter=1")
    assert (asked.quant.blocksize, asked.quant.double_quant) == (32, False)
    assert asked.device.gpu == "1"


def test_a_damaged_config_of_a_run(place, tmp_path):
    shutil.copytree(place / "out", tmp_path / "out")
    (tmp_path / "out/config.yaml").write_text("quant: {blocksize: 63}\n")
    with pytest.raises(ConfigError, match="blocksize"):
        qlora_wgpu.open_adapter(tmp_path / "out/adapter", place / "model")


def recorded_base(case, folder):
    recorded = np.load(REFERENCES / f"{case}.npz")
    folder.mkdir()
    (folder / "config.json").write_text(str(recorded["config"]))
    shapes = json.loads(str(recorded["shapes"]))
    save_file(weights(shapes, float(recorded["norm_offset"])), folder / "model.safetensors")
    return folder


def seeded(model):
    shapes = {name: array.shape for name, array in model.adapter_state_dict().items()}
    model.load_adapter(adapter(shapes))
    return model


def reopened(path, base, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    quant = QuantConfig(scheme="none")
    return qlora_wgpu.open_adapter(path, base, quant=quant, compute_dtype="float32")


def test_dense_layers_of_a_mixture(device, tmp_path):
    base = recorded_base("qwen3_moe-experts", tmp_path / "base")
    quant = QuantConfig(scheme="none")
    model = seeded(QLoRAModel.from_pretrained(base, None, quant, "float32", device))
    model.save_adapter(tmp_path / "adapter")
    ids, mask, _ = batch()
    expected = model.logits(ids, mask)
    assert np.array_equal(reopened(tmp_path / "adapter", base).logits(ids, mask), expected)
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    old = reopened(tmp_path / "adapter", base, target_modules=leaves, target_parameters=None)
    assert np.array_equal(old.logits(ids, mask), expected)


def test_adapters_of_peft_with_other_settings(device, tmp_path):
    base = recorded_base("llama-dora", tmp_path / "base")
    lora = LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["q_proj", "up_proj"])
    quant = QuantConfig(scheme="none")
    model = seeded(QLoRAModel.from_pretrained(base, lora, quant, "float32", device))
    model.save_adapter(tmp_path / "adapter")
    ids, mask, _ = batch()
    same = reopened(tmp_path / "adapter", base, lora_dropout=0.1)
    assert np.array_equal(same.logits(ids, mask), model.logits(ids, mask))
    assert same.accumulate(*same.checked(ids, ids), dropout_key=1)  # and goes on in training
    half = reopened(tmp_path / "adapter", base, lora_alpha=7.5)
    assert half.adapter.config.scaling == 7.5 / 4
    assert np.abs(half.logits(ids, mask) - model.logits(ids, mask)).max() > 1e-3


def test_an_adapter_of_another_base_names_both(place, tmp_path):
    """Of a wider base, of one with more layers, and of one with fewer."""
    for changes, reason in (
        ({"hidden_size": 60}, "has shape (36, 4), this model expects (60, 4)"),
        ({"num_hidden_layers": 1}, "it adapts model.layers.1."),
        ({"num_hidden_layers": 3}, "it has no weights for model.layers.2."),
    ):
        other = tmp_path / "-".join(changes) / str(*changes.values())
        write_model(other, **changes)
        with pytest.raises(CheckpointError) as caught:
            qlora_wgpu.open_adapter(place / "out/adapter", other)
        base = place / "model"
        assert f"out/adapter was trained on {base} and does not fit {other}: " in str(caught.value)
        assert reason in str(caught.value)
    with pytest.raises(CheckpointError, match=r"was trained on .* and does not fit"):
        merge(tmp_path / "hidden_size/60", place / "out/adapter", tmp_path / "merged")
    model = QLoRAModel.from_pretrained(tmp_path / "hidden_size/60", LoraConfig(r=4, lora_alpha=8))
    with pytest.raises(CheckpointError, match=r"was trained on .* and does not fit"):
        model.load_adapter(place / "out/adapter")
