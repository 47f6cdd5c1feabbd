"""The commands as functions of the package: they return what a script needs, and print nothing."""

import numpy as np
import pytest

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.runs import hub_upload

TRL = """\
model_name_or_path: model
dataset_name: train.jsonl
learning_rate: 1.0e-4
packing: false
push_to_hub: true
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 4, seed=1)
    sections = {
        "model": {"path": str(folder / "model")},
        "lora": {"r": 4},
        "data": {
            "train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"),
            "max_seq_length": 64,
        },
        "train": {"max_steps": 2, "gradient_accumulation_steps": 1},
        "output": {"dir": str(folder / "run")},
        "device": {"tune": "never"},
    }  # fmt: skip
    qlora_wgpu.train(sections, quiet=True)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_printed(place, capfd):
    yield
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_init_then_estimate(place, tmp_path):
    out = tmp_path / "new.yaml"
    written = qlora_wgpu.init(
        place / "model", place / "train.jsonl", eval=place / "eval.jsonl", out=out
    )
    assert written.path == out and written.converted_from is None
    assert qlora_wgpu.load_config(out).data.eval == str(place / "eval.jsonl")
    assert qlora_wgpu.estimate(out, rank=4, seq=64).total > 0
    with pytest.raises(ConfigError, match=r"already exists: pass another out, or use overwrite"):
        qlora_wgpu.init(place / "model", place / "train.jsonl", out=out)
    for missing, given in (("model", {}), ("data", {"model": "m"})):
        with pytest.raises(ConfigError, match=f"^{missing} is required"):
            qlora_wgpu.init(**given, out=tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=r"^out 'x\.json' must end in \.yaml"):
        qlora_wgpu.init("model", "data", out="x.json")


def test_init_from_another_trainer(place, tmp_path):
    (tmp_path / "trl.yaml").write_text(TRL)
    written = qlora_wgpu.init(
        place / "model", place / "train.jsonl", from_=tmp_path / "trl.yaml",
        out=tmp_path / "run.yaml",
    )  # fmt: skip
    assert written.converted_from == "TRL" and written.converted > 2 and written.dropped >= 1
    assert qlora_wgpu.load_config(written.path).optim.learning_rate == 1e-4


def test_merge(place, tmp_path):
    merged = qlora_wgpu.merge(place / "run", out=tmp_path / "merged")
    assert merged.path == tmp_path / "merged" and 0 <= merged.drift.lost < 1
    assert "KL divergence" in str(merged.drift)
    plain = qlora_wgpu.merge(place / "run", check=False)
    assert plain.path == place / "run" / "merged" and plain.drift is None
    weights = [path / "model.safetensors" for path in (merged.path, plain.path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    with qlora_wgpu.QLoRAModel.from_pretrained(merged.path) as model:
        assert np.isfinite(model.logits([[5, 6, 7]])).all()
    with pytest.raises(ConfigError, match=r"or an adapter with adapter=\.\.\."):
        qlora_wgpu.merge()
    with pytest.raises(ConfigError, match="is a model"):
        qlora_wgpu.merge(place / "model")


def test_export_of_an_adapter(place, tmp_path):
    written = qlora_wgpu.export(place / "run", gguf=tmp_path / "a.gguf", adapter_only=True)
    assert written.path == tmp_path / "a.gguf" and written.nbytes == written.path.stat().st_size
    with pytest.raises(ConfigError, match=r"already exists: choose another name with gguf=\.\.\."):
        qlora_wgpu.export(place / "run", gguf=tmp_path / "a.gguf", adapter_only=True)
    with pytest.raises(ConfigError, match=r"^gguf .* must end in \.gguf"):
        qlora_wgpu.export(place / "run", gguf=tmp_path / "a.bin", adapter_only=True)
    with pytest.raises(ConfigError, match="type and adapter_only are mutually exclusive"):
        qlora_wgpu.export(place / "run", type="q8_0", adapter_only=True)


def test_quantize(place, tmp_path):
    out = qlora_wgpu.quantize(place / "model", tmp_path / "nf4", blocksize=32)
    assert out == tmp_path / "nf4" and (out / "config.json").exists()
    with pytest.raises(UnsupportedModelError):
        qlora_wgpu.quantize(out, tmp_path / "again")
    with pytest.raises(ConfigError, match="blocksize"):
        qlora_wgpu.quantize(place / "model", tmp_path / "other", blocksize=5)


@pytest.mark.quick
def test_push(place, monkeypatch):
    sent = {}

    def upload(name, files, *, private):
        sent.update(files, name=name, private=private)
        return f"https://huggingface.co/{name}"

    monkeypatch.setattr(hub_upload, "check_reachable", lambda: None)
    monkeypatch.setattr(hub_upload, "upload", upload)
    page = qlora_wgpu.push(place / "run", "me/mine", base="owner/tiny", private=False)
    assert page == "https://huggingface.co/me/mine"
    assert sent["name"] == "me/mine" and sent["private"] is False
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(sent)
    with pytest.raises(ConfigError, match="mutually exclusive"):
        qlora_wgpu.push(place / "run", "me/mine", merged="a", gguf="b")
    with pytest.raises(CheckpointError):
        qlora_wgpu.push(place / "run", "me/mine", merged=place / "nowhere")


def test_generate_one_and_several(place):
    chat = [{"role": "user", "content": "what is 4 and 5?"}]
    with qlora_wgpu.open_adapter(place / "run") as model:
        one = model.generate("what is", max_new_tokens=8)
        assert "".join(model.generate("what is", max_new_tokens=8, stream=True)) == one
        several = model.generate(["what is", "one", "what is"], max_new_tokens=8, batch_size=2)
        assert several == [one, model.generate("one", max_new_tokens=8), one]
        assert model.generate([chat, chat], max_new_tokens=8) == [
            model.generate(chat, max_new_tokens=8)
        ] * 2  # fmt: skip
        ids = model.tokenizer.encode("what is")
        tokens = model.generate(ids, max_new_tokens=8)
        assert list(model.generate(ids, max_new_tokens=8, stream=True)) == tokens
        assert model.generate([ids, ids], max_new_tokens=8) == [tokens, tokens]
        assert model.generate(np.array([ids, ids]), max_new_tokens=8) == [tokens, tokens]
        assert model.generate(["one"], max_new_tokens=0) == [""]
        with pytest.raises(ConfigError, match="takes one prompt"):
            model.generate(["one"], stream=True)
        with pytest.raises(ConfigError, match="batch_size must be at least 1"):
            model.generate(["one"], batch_size=0)
        for name, meant in (
            ("max_tokens", "max_new_tokens"), ("temprature", "temperature"),
            ("do_sample", "temperature"), ("eos_token_id", "stop_ids"), ("streamer", "stream"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=f"unknown option {name}; did you mean {meant}"):
                model.generate("one", **{name: 1})
        for name in ("num_beams", "pad_token_id", "stop"):
            with pytest.raises(ConfigError, match=rf"unknown option {name}$"):
                model.generate("one", **{name: 2})
        for ids in (5, "one", [1.5]):
            with pytest.raises(ConfigError, match="stop_ids must be"):
                model.generate("one", stop_ids=ids)
            with pytest.raises(ConfigError, match="stop_ids must be"):
                next(qlora_wgpu.generate(model, [5], stop_ids=ids))
        for wrong in (None, 5, {"role": "user"}, ["one", 5]):
            with pytest.raises(ConfigError, match="a prompt must be a string"):
                model.generate(wrong)


@pytest.mark.quick
def test_peft_s_methods(place, tmp_path):
    with qlora_wgpu.open_adapter(place / "run") as model:
        trained, total = model.get_nb_trainable_parameters()
        arrays = model.adapter_state_dict().values()
        assert trained == sum(array.size for array in arrays) < total
        assert model.active_adapters == ["default"] and model.peft_config["default"].r == 4
        model.save_pretrained(tmp_path / "saved")
        saved = (tmp_path / "saved/adapter_model.safetensors").read_bytes()
        assert saved == (place / "run/adapter/adapter_model.safetensors").read_bytes()
        with pytest.raises(AttributeError, match=r"merge it with qlora_wgpu\.merge"):
            model.merge_and_unload()
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            model.nothing  # noqa: B018
        tokenizer = model.tokenizer
        chat = [{"role": "user", "content": "hi"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        assert ids == model.prompts.ids(chat)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>hi</s>"
    opened = qlora_wgpu.Tokenizer.from_pretrained(place / "model")
    assert opened.fingerprint == tokenizer.fingerprint


@pytest.mark.quick
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: qlora_wgpu.merge(run, base="nf4", out="x"), "base must be 'original' or"),
        (lambda run: qlora_wgpu.export(run, type="q4_k_m"), "^type q4_k_m is not supported"),
        (lambda run: qlora_wgpu.evaluate(run, observer=object()), "observer must be an Observer"),
        (lambda run: qlora_wgpu.estimate(run, compute_dtype="fp16"), "compute_dtype must be 'bf"),
        (lambda run: qlora_wgpu.estimate(run, batch="a"), "^batch must be a positive integer"),
        (lambda run: qlora_wgpu.init("m", "d", columns=["a"]), "columns must be a mapping such"),
        (lambda run: qlora_wgpu.init("m", None), "data is required"),
        (lambda run: qlora_wgpu.register_family("new", None), "must have the methods read and for"),
    ],
)
def test_arguments_of_functions_are_checked(place, monkeypatch, tmp_path, call, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        call(place / "run")


def test_functions_take_the_folder_of_a_run(place):
    assert qlora_wgpu.estimate(place / "run").workload.lora.r == 4
    measured = qlora_wgpu.evaluate(place / "run", generate=True)
    assert measured.base_predictions and measured.adapter_predictions
