"""What becomes of a GGUF file by how far it drifts, without a model."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.errors import CheckpointError, ConfigError, DataError
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.runs import exporting
from qlora_wgpu.runs.exporting import Drift
from qlora_wgpu.training.observers import Unwatched


def drift(lost):
    return Drift(9, "of a text", 0.0, 0.0, lost, 1.0, 1.0)


@pytest.fixture
def exported(monkeypatch, tmp_path):
    """Exports what has lost such shares of what was trained, on NF4 and on the stored weights."""

    def run(nf4, none=0.0, *, scheme="nf4", base="original", type_name="q8_0"):
        lost, (out, *_) = {"nf4": nf4, "none": none}, (tmp_path / "new.gguf",)
        folder = SimpleNamespace(text_folder=tmp_path, config={"model_type": "llama"})
        made = SimpleNamespace(
            file_type=find_file_type(type_name), keys={}, notes=("a note",),
            check_room=lambda path: None,
            write=lambda path, progress: path.write_bytes(b"GGUF"),
        )  # fmt: skip
        written = SimpleNamespace(template=None, kind="text", tokenizer=None)
        for name, value in {
            "MergedWeights": lambda *given: SimpleNamespace(folder=folder),
            "_text_folder": lambda *given: nullcontext(tmp_path),
            "read_prompt_files": lambda folder: written, "tokenizer_folder": lambda folder: None,
            "gguf_model": lambda *given: made, "_modelfile": lambda *given: "FROM ./new.gguf\n",
            "_difference": lambda *given, **options: None,
            "OpenedModel": SimpleNamespace(open=lambda path: None),
            "measure_trained": lambda source, adapter, settings, observer: settings.quant.scheme,
            "measure_drift": lambda trained, *given: drift(lost[trained]),
        }.items():  # fmt: skip
            monkeypatch.setattr(exporting, name, value)
        settings = Config.model_validate({"model": {"path": "base"}, "quant": {"scheme": scheme}})
        return exporting.export_model("base", "adapter", out, base=base, settings=settings)

    return run


def test_a_file_that_has_lost_little_is_kept(exported, tmp_path):
    for lost, type_name in ((0.0, "q8_0"), (0.1, "q8_0"), (0.25, "q4_0"), (0.1, "bf16")):
        result = exported(lost, 9.0, type_name=type_name)
        assert result.drift.lost == lost and result.notes == ("a note",)
        assert result.nbytes == 4 and (tmp_path / "new.Modelfile").exists()
        (tmp_path / "new.gguf").unlink()


def test_what_nf4_took_is_no_fault_of_the_file(exported):
    result = exported(0.4, 0.1)
    assert result.drift.lost == 0.4
    (own, note) = result.notes
    assert own == "a note" and "is due to training on NF4, not to the file" in note
    assert "10 % of what it knows" in note


@pytest.mark.parametrize(("lost", "options"), [
    ((0.11, 0.11), {}), ((float("nan"), 0.2), {}), ((0.26, 0.26), {"type_name": "q4_0"}),
    ((0.4, 0.0), {"base": "dequantized"}), ((0.11, 0.11), {"type_name": "f16"}),
    ((0.0, 0.4), {"scheme": "none"}),
])  # fmt: skip
def test_a_file_that_has_lost_much_is_not_kept(exported, tmp_path, lost, options):
    with pytest.raises(CheckpointError, match="is not kept, because its predictions differ"):
        exported(*lost, **options)
    assert not list(tmp_path.iterdir())


def test_a_name_that_cannot_be_is_refused_before_anything_is_done(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.gguf"):
        exporting.export_model("base", "adapter", tmp_path / "new.bin")
    (tmp_path / "new.gguf").touch()
    with pytest.raises(ConfigError, match="already exists"):
        exporting.export_model("base", "adapter", tmp_path / "new.gguf")


def test_a_modelfile_of_somebody_else_stays(exported, tmp_path):
    (tmp_path / "new.Modelfile").write_text("SYSTEM mine\n")
    with pytest.raises(ConfigError, match=r"new\.Modelfile already exists"):
        exported(0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["new.Modelfile"]


@pytest.mark.parametrize(
    ("settings", "lost", "told"),
    [
        ({"eval_split": 2}, set(), "of held-out data"),
        ({"eval_split": None}, set(), "of training data"),
        ({"eval_split": 2}, {True}, "of training data"),
        ({"eval_split": 2}, {True, False}, "of a sample text"),
    ],
)
def test_what_an_export_is_compared_on(monkeypatch, settings, lost, told):
    """Held-out rows, else those of training, else a text, whatever of them can still be read."""
    run = Config.model_validate({"model": {"path": "base"}, "data": settings})

    def rows(settings, tokenizer, observer, *, held_out):
        if held_out in lost:
            raise DataError("moved")
        return [SimpleNamespace(input_ids=[number, 1, 2]) for number in range(9)]

    for name, value in {
        "tokenizer_for": lambda *given: SimpleNamespace(encode=lambda text: [7, 99, 8]),
        "find_run": lambda adapter: "run", "config_of_run": lambda folder: run, "read_data": rows,
    }.items():  # fmt: skip
        monkeypatch.setattr(exporting, name, value)
    architecture = SimpleNamespace(vocab_size=20)
    source = SimpleNamespace(for_adapter=lambda adapter: SimpleNamespace(architecture=architecture))
    expected = [[7, 8]] if "sample" in told else [[number, 1, 2] for number in (0, 2, 4, 6)]
    assert exporting._texts(source, "adapter", Unwatched()) == (expected, told)


PHI3 = ["</s>", "<unk>", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "a"]


@pytest.mark.parametrize(
    ("model", "run", "kind", "tokens", "name"),
    [
        ("org/tiny", None, "gpt2", ["a"], "tiny"),
        ("org/tiny", "my run", "gpt2", ["a"], "tiny my run"),
        ("folder/tiny.gguf", None, "gpt2", ["a"], "tiny"),
        (".gguf", None, "gpt2", ["a"], ".gguf"),
        ("org/Phi-3-mini", None, "gpt2", PHI3, "Phi 3-mini"),
        ("org/phi3", "of phi-3", "llama", PHI3[1:], "Phi 3 of Phi 3"),
        ("org/phi3", None, "llama", PHI3, "phi3"),
        ("org/tiny", None, "llama", PHI3, "Phi-3 tiny"),
    ],
)
def test_a_file_is_named_by_its_base_and_run_as_llama_cpp_reads_it(
    monkeypatch, model, run, kind, tokens, name
):
    found = None if run is None else SimpleNamespace(name=run)
    monkeypatch.setattr(exporting, "find_run", lambda adapter: found)
    keys = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens}
    assert exporting._name(model, "adapter", keys) == name


@pytest.mark.parametrize(
    ("model", "base", "has_tokenizer"),
    [("folder/tiny.gguf", "folder/tiny.gguf", True), ("org/tiny", "./base.gguf", True),
     ("org/tiny", None, False)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_an_adapter_of_llama_cpp_names_its_base(monkeypatch, tmp_path, model, base, has_tokenizer):
    if has_tokenizer:
        (tmp_path / "tokenizer.json").touch()
    asked = []
    folder = SimpleNamespace(without_weights=lambda path: path)
    for name, value in {
        "ModelFolder": folder, "_text_folder": lambda *given: nullcontext(tmp_path),
        "export_gguf": lambda model, adapter, path: path.write_bytes(b"GGUF"),
        "_modelfile": lambda path, texts, base: asked.append(base) or f"FROM {base}\n",
    }.items():  # fmt: skip
        monkeypatch.setattr(exporting, name, value)
    assert exporting.export_adapter(model, "adapter", tmp_path / "new.gguf") == 4
    assert asked == ([] if base is None else [base])
    written = tmp_path / "new.Modelfile"
    assert (written.read_text() if written.exists() else None) == (base and f"FROM {base}\n")


@pytest.mark.parametrize("before", [None, "FROM a\n"])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.cover("all")
def test_a_modelfile_goes_with_a_file_that_failed_unless_it_was_there(tmp_path, before, fails):
    path, target = tmp_path / "new.gguf", tmp_path / "new.Modelfile"
    if before is not None:
        target.write_text(before)
    ends = pytest.raises(KeyError) if fails else nullcontext()
    with ends, exporting._with_modelfile(path, "FROM a\n"):
        assert target.read_text() == "FROM a\n"
        if fails:
            raise KeyError
    assert target.exists() == (before is not None or not fails)


def test_prompts_of_a_chat_are_compared_if_it_has_a_template():
    encode = lambda text, add_special_tokens: [len(text), add_special_tokens]  # noqa: E731
    refused = exporting.PROBES[0]

    def render(messages, add_generation_prompt):
        if messages == refused:
            raise DataError("no")
        return SimpleNamespace(text="a" * len(messages) + "b" * add_generation_prompt)

    template = SimpleNamespace(render=render)
    tokenizer = SimpleNamespace(encode=encode)
    made = SimpleNamespace(kind="chat", template=template, tokenizer=tokenizer)
    found = [(text, ids) for text, ids in exporting._rendered(made)]
    rest = [messages for messages in exporting.PROBES if messages != refused]
    assert found == [("a" * len(m) + "b", [len(m) + 1, False]) for m in rest] and found
    for kind, own in (("text", template), ("chat", None)):
        made.kind, made.template = kind, own
        assert list(exporting._rendered(made)) == []


def test_rows_of_the_run_are_compared_if_they_are_there(monkeypatch):
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "a"}})
    rows = [SimpleNamespace(text=None if n == 1 else str(n), ids=[n]) for n in range(9)]
    asked = []
    for name, value in {
        "find_run": lambda adapter: adapter if adapter == "of a run" else None,
        "config_of_run": lambda run: config,
        "encoded_examples": lambda path, *given: asked.append(path) or iter(rows),
    }.items():
        monkeypatch.setattr(exporting, name, value)
    found = list(exporting._trained_rows("of a run", None))
    assert [text for text, _ in found] == ["0", "2", "3"] and asked == ["a"]
    assert list(exporting._trained_rows("of none", None)) == []

    def moved(*given):
        raise DataError("moved")

    monkeypatch.setattr(exporting, "encoded_examples", moved)
    assert list(exporting._trained_rows("of a run", None)) == []
