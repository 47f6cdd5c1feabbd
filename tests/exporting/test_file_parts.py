"""Parts of exported files, each by itself: bytes of tensors, keys, heads of classifiers."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.checkpoint.safetensors_file import Entry
from qlora_wgpu.errors import CheckpointError, ConfigError, UnsupportedModelError
from qlora_wgpu.exporting import gguf_tensors, scored
from qlora_wgpu.exporting.folders import refuse_existing, write_folder
from qlora_wgpu.exporting.gguf import _add, _pad
from qlora_wgpu.exporting.gguf_tensors import BF16, F16, F32, Q8_0, as_bytes
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.exporting.model_card import _usage_of_scores
from qlora_wgpu.exporting.scored import ScoredHead
from qlora_wgpu.ops.score import Scoring

merge = import_module("qlora_wgpu.exporting.merge")  # the package names a function so
NUMBERS = np.linspace(-3, 3, 7 * 64, dtype=np.float32).reshape(7, 64)


@pytest.mark.parametrize(("rows", "pieces"), [(1, 7), (2, 4), (7, 1), (99, 1)])
@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0], ids=str)
def test_bytes_of_a_tensor_some_rows_at_a_time(monkeypatch, kind, rows, pieces):
    monkeypatch.setattr(gguf_tensors, "_AT_ONCE", rows * 64 + 1)
    made = list(as_bytes(NUMBERS, kind, "a"))
    expected = {
        "F32": lambda: NUMBERS, "F16": lambda: NUMBERS.astype(np.float16),
        "BF16": lambda: to_bfloat16(NUMBERS),
        "Q8_0": lambda: gguf.quants.quantize(NUMBERS, gguf.GGMLQuantizationType.Q8_0),
    }[kind.name]()  # fmt: skip
    assert len(made) == pieces
    assert b"".join(each.tobytes() for each in made) == expected.tobytes()


def test_a_row_that_is_too_long_is_written_by_itself(monkeypatch):
    monkeypatch.setattr(gguf_tensors, "_AT_ONCE", 10)
    assert len(list(as_bytes(NUMBERS, F32, "a"))) == 7
    assert len(list(as_bytes(NUMBERS[0], F32, "a"))) == 1
    assert len(list(as_bytes(np.float32(1.0), F32, "a"))) == 1


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("value", "kind", "fits"), [
    (65504.0, F16, True), (65520.0, F16, False), (65504.0, Q8_0, True), (1e5, Q8_0, False),
    (np.nan, F16, False), (1e30, F32, True), (1e30, BF16, True),
])  # fmt: skip
def test_what_is_out_of_range(sign, value, kind, fits):
    array = np.zeros((2, 32), np.float32)
    array[1, 3] = sign * value
    if fits:
        list(as_bytes(array, kind, "blk.0"))
        return
    with pytest.raises(UnsupportedModelError, match=r"blk\.0 contains .*use bf16 or f32"):
        list(as_bytes(array, kind, "blk.0"))


@pytest.mark.parametrize(("shape", "made"), [
    ((1, 5), (5,)), ((5, 1), (5, 1)), ((5,), (5,)), ((1,), (1,)), ((6, 1, 4), (6, 4)),
    ((2, 3), (2, 3)),
])  # fmt: skip
def test_axes_of_size_one_are_left_out(shape, made):
    assert gguf_tensors._squeezed(shape) == made


class Writer:
    """Notes what is added to a file."""

    def __init__(self):
        self.added = []

    def __getattr__(self, name):
        return lambda *given, **named: self.added.append((name, *given, *named.values()))


ARRAY, TYPE = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType


@pytest.mark.parametrize(("value", "added"), [
    (True, [("add_bool", "k", True)]), (0, [("add_uint32", "k", 0)]),
    (2**32 - 1, [("add_uint32", "k", 2**32 - 1)]), (2**32, [("add_uint64", "k", 2**32)]),
    (-1, [("add_int32", "k", -1)]), (0.5, [("add_float32", "k", 0.5)]),
    (np.zeros(0, np.int32), []),
    (np.array([1, 2], np.int32), [("add_key_value", "k", [1, 2], ARRAY, TYPE.INT32)]),
    (np.array([1], np.uint8), [("add_key_value", "k", [1], ARRAY, TYPE.UINT8)]),
    (np.array([0.5], np.float32), [("add_key_value", "k", [0.5], ARRAY, TYPE.FLOAT32)]),
    (np.array([True]), [("add_key_value", "k", [True], ARRAY, TYPE.BOOL)]),
])  # fmt: skip
def test_types_of_keys(value, added):
    writer = Writer()
    _add(writer, "k", value)
    assert writer.added == added


@pytest.mark.parametrize(("size", "padding"), [(0, 0), (1, 31), (31, 1), (32, 0), (33, 31)])
def test_padding(size, padding):
    written = []
    _pad(SimpleNamespace(write=written.append), size)
    assert written == [bytes(padding)]


# ---- classifiers ---------------------------------------------------------------------------------


def head(scoring, padding):
    return ScoredHead(None, np.ones((2, 3), np.float32), scoring, padding, frozenset(), None)


@pytest.mark.parametrize("padding", [None, 0, 5])
@pytest.mark.parametrize("objective", ["reward", "classification"])
def test_the_config_of_a_classifier(padding, objective):
    labels = ("a", "b") if objective == "classification" else ()
    own = head(Scoring(objective, max(len(labels), 1), labels=labels), padding)
    base = {"architectures": ["LlamaForCausalLM"], "num_labels": 7, "pad_token_id": 9, "x": 1}
    made = own.config(base)
    names = labels or ("reward",)
    expected = {
        "architectures": ["LlamaForSequenceClassification"], "x": 1,
        "pad_token_id": 9 if padding is None else padding,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }  # fmt: skip
    if labels:
        expected["problem_type"] = "single_label_classification"
    assert made == expected
    ((name, (entry, read)),) = own.tensors().items()
    assert name == scored.SCORE and entry.shape == (2, 3) and entry.dtype == "F32"
    assert (read() == 1).all()


@pytest.mark.parametrize(("config", "name"), [
    ({"architectures": ["Qwen2ForCausalLM", "Other"], "model_type": "x"}, "Qwen2"),
    ({"architectures": [], "model_type": "gpt_neox"}, "GptNeox"),
    ({"model_type": "llama"}, "Llama"),
])  # fmt: skip
def test_the_class_of_a_classifier(config, name):
    assert scored._class_name(config) == f"{name}ForSequenceClassification"


@pytest.mark.parametrize(("config", "padding"), [
    ({"pad_token_id": 0, "eos_token_id": 2}, 0), ({"eos_token_id": 2}, 2),
    ({"pad_token_id": None, "eos_token_id": [3, 4]}, 3), ({}, None),
])  # fmt: skip
def test_padding_without_a_tokenizer(tmp_path, config, padding):
    folder = SimpleNamespace(text_folder=tmp_path, config=config)
    assert scored._padding(tmp_path, folder) == padding


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_how_a_classifier_is_used(kind):
    text = _usage_of_scores("o/n", kind, ("é", "b"))
    assert text.startswith("```python\nfrom transformers import Auto") and text.endswith("\n```")
    assert ('labels = ["é", "b"]' in text) == (kind == "adapter")
    assert ('\n    "o/n", id2label=dict(enumerate(labels)),' in text) == (kind == "adapter")
    assert ('from_pretrained("o/n")\n```' in text) == (kind == "merged")


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "indexed"), [
    ({"model.safetensors": ["a", "b"]}, False), ({"weights.safetensors": ["a", "b"]}, True),
    ({"model-1.safetensors": ["a"], "model-2.safetensors": ["b"]}, True),
    ({"model.safetensors": ["a", "b"], "more.safetensors": []}, False),
    ({"model.safetensors": ["a"], "more.safetensors": ["b"]}, True),
])  # fmt: skip
def test_a_folder_has_an_index_where_one_file_of_the_usual_name_is_not_all(
    tmp_path, files, indexed
):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.json").write_text("{}")
    source = SimpleNamespace(files=lambda: files, text_folder=tmp_path / "base")
    array, told = np.arange(6, dtype=np.float32).reshape(2, 3), []

    def tensors_of(name):
        return {name: (Entry("F32", (2, 3)), lambda: array)}

    target = tmp_path / "new"
    write_folder(source, target, {"model_type": "llama"}, tensors_of, told.append)
    assert told == ["a", "b"]
    made = {path.name for path in target.iterdir()}
    assert made >= {*files, "config.json", "tokenizer.json"}
    assert ("model.safetensors.index.json" in made) == indexed
    if indexed:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 48}
        assert index["weight_map"] == {name: file for file, own in files.items() for name in own}
    with pytest.raises(ConfigError, match="already exists: choose another folder"):
        write_folder(source, target, {}, tensors_of, told.append)


@pytest.mark.parametrize("path", ["", "/"])
def test_a_folder_has_a_name(path):
    with pytest.raises(ConfigError, match="is not a name for a new folder"):
        refuse_existing(Path(path))


# ---- merged weights ------------------------------------------------------------------------------


def merged(weight, magnitude, **more):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4)).astype(np.float32), np.ones((3, 2), np.float32)
    stored = SimpleNamespace(read=lambda: weight.copy(), shape=weight.shape)
    own = {
        "folder": {"w": stored}, "_quant": None, "_biases": {}, "_wholes": {}, "_rows": {},
        "_linears": {}, "_quantizes": False, "_pairs": {"w": (a, b, 0.5, magnitude)},
        "source_of": lambda name: name, **more,
    }  # fmt: skip
    return SimpleNamespace(**own), a, b


@pytest.mark.parametrize("has_magnitude", [False, True])
def test_what_an_adapter_adds(has_magnitude):
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    magnitude = np.array([1.0, 2.0, 3.0], np.float32) if has_magnitude else None
    own, a, b = merged(weight, magnitude)
    expected = weight + 0.5 * (b @ a)
    if has_magnitude:
        expected *= (magnitude / np.linalg.norm(expected, axis=1))[:, None]
    np.testing.assert_allclose(MergedWeights.float32(own, "w"), expected, rtol=1e-6)
    own._pairs = {}
    assert (MergedWeights.float32(own, "w") == weight).all()
    own._biases, own._wholes = {"w": "a bias"}, {"x": "a whole"}
    assert MergedWeights.float32(own, "w") == "a bias"
    assert MergedWeights.float32(own, "x") == "a whole"


@pytest.mark.parametrize(("stored", "fits"), [
    ({"m.bias": np.zeros(3)}, True), ({"m.bias": np.zeros(4)}, False), ({}, False),
    ({"other.bias": np.zeros(3)}, False),
])  # fmt: skip
def test_a_trained_bias_is_one_of_the_base(monkeypatch, stored, fits):
    class Folder(dict):
        path = "base"

    trained = {"m": np.ones(3, np.float32)}
    monkeypatch.setattr(merge, "split_biases", lambda tensors: ({}, trained))
    own = SimpleNamespace(folder=Folder(stored), stored_name=lambda name: name)
    if fits:
        (found,) = MergedWeights._trained_biases(own, {}, "adapter").items()
        assert found[0] == "m.bias" and found[1] is trained["m"]
        return
    with pytest.raises(CheckpointError, match=r"adapter has a trained m\.bias of 3 numbers, which"):
        MergedWeights._trained_biases(own, {}, "adapter")


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9])
def test_tables_are_written_some_rows_at_a_time(monkeypatch, rows):
    monkeypatch.setattr(gguf_tensors, "_ROWS_AT_ONCE", 4)
    own = SimpleNamespace(
        _architecture=SimpleNamespace(tables={"a": (rows, 7)}, vocab_size=rows),
        _table_reader=lambda name, part: part, _named=lambda name: f"named {name}",
        _matrix=lambda name, shape, reads: (name, shape, reads),
    )  # fmt: skip
    kind = next(
        each for each in vars(gguf_tensors).values()
        if isinstance(each, type) and hasattr(each, "tables")
    )  # fmt: skip
    ((name, shape, reads),) = kind.tables(own)
    assert name == "named a" and shape == (rows, 7)
    found = [number for part in reads for number in range(part.start, part.stop)]
    assert found == list(range(rows)) and all(part.stop - part.start <= 4 for part in reads)
