"""Parts of reading data that need no tokenizer: values of odd types, and arrays in pieces."""

from pathlib import Path

import numpy as np
import pytest

from qlora_wgpu.data import columns, conversations, examples, json_rows, messages, tokenizer
from qlora_wgpu.data.examples import Counts, Dataset
from qlora_wgpu.data.gguf_vocabulary import _looks_special
from qlora_wgpu.data.splits import in_words
from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import MAX_DEPTH
from qlora_wgpu.mapped_files import map_file


def nested(depth, kind):
    value = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("beside", [False, True])
def test_how_deep_a_row_may_be(kind, beside):
    """The row itself is one more."""
    rows = [nested(depth - beside, kind) for depth in (1, MAX_DEPTH + 1, MAX_DEPTH + 2)]
    if beside:
        rows = [{"first": [], "other": 1, "deep": row} for row in rows]
    assert [json_rows._is_deep(row) for row in rows] == [False, False, True]


@pytest.mark.parametrize(("value", "found"), [
    ("a", False), ("\ud800", True), (["a", ["\udfff"]], True), ({"a": {"b": "\ud800"}}, True),
    ({"\ud800": 1}, True), ({"a": [1, None]}, False), (1, False),
])  # fmt: skip
def test_half_characters_are_found_anywhere(value, found):
    assert json_rows._has_lone_surrogate(value) == found


@pytest.mark.parametrize(("names", "text"), [
    ("abcd", "a, b, c, d"), ("abcde", "a, b, c, d and 1 more"), ("", ""),
    (list(map(str, range(1004))), "0, 1, 2, 3 and 1,000 more"),
])  # fmt: skip
def test_the_first_names_are_listed(names, text):
    assert in_words(names) == text


@pytest.mark.parametrize(("text", "is_special"), [
    ("<|a|>", True), ("<|a>", False), ("a|>", False), ("<unused3>", True), ("<unused3", False),
    ("unused3>", False), ("<a>", False),
])  # fmt: skip
def test_texts_of_special_tokens(text, is_special):
    assert _looks_special(text) == is_special


@pytest.mark.parametrize(("value", "ids"), [
    (0, [0]), ([0, 2**32 - 1, 2**32, -1, True, "3", 4.0, None], [0, 2**32 - 1]), (None, []),
    ([], []), (True, []),
])  # fmt: skip
def test_token_ids_of_a_file(value, ids):
    assert tokenizer._id_list(value) == ids


@pytest.mark.parametrize(("value", "text"), [
    ("a", "a"), ({"content": "a"}, "a"), ({"other": "a"}, None), ("", None), (3, None),
    ("\ud800", None), ({"content": 3}, None),
])  # fmt: skip
def test_a_token_of_a_file(value, text):
    assert tokenizer._token_text(value) == text


@pytest.mark.parametrize(("given", "expected"), [
    ('{"a": 1}', {"a": 1}), ("[1]", "[1]"), ("{", "{"), ("  ", "  "), ("", {}), (None, {}),
    ({"a": None}, {"a": None}), ([1], [1]), (0, {}), (7, 7), ({}, {}),
])  # fmt: skip
def test_arguments_of_a_call(given, expected):
    assert messages._object(given) == expected


@pytest.mark.parametrize(("call", "expected"), [
    ({"name": "f", "parameters": {"a": 1}},
     {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}),
    ({"name": "f", "id": "7", "type": "tool", "more": 1, "arguments": '{"a": 1}'},
     {"type": "tool", "id": "7", "function": {"name": "f", "more": 1, "arguments": {"a": 1}},
      "name": "f", "more": 1, "arguments": '{"a": 1}'}),
    ({"id": "7", "function": {"name": "f", "id": "8"}},
     {"type": "function", "id": "7", "function": {"name": "f", "id": "8", "arguments": {}}}),
])  # fmt: skip
def test_calls_in_both_notations(call, expected):
    made = messages._canonical_call(call, "message 1")
    assert made["function"] == expected["function"] and made["type"] == expected["type"]
    assert made.get("id") == expected.get("id")


@pytest.mark.parametrize("call", [None, "f", {}, {"name": 3}, {"function": "f"},
                                  {"function": {"arguments": {}}}])  # fmt: skip
def test_a_call_names_its_function(call):
    with pytest.raises(DataError, match="message 1 has a tool call without the 'name'"):
        messages._canonical_call(call, "message 1")


@pytest.mark.parametrize(("call", "text"), [
    ({"id": 1, "function": {"name": "f", "arguments": {"é": 1}}}, '{"é": 1}'),
    ({"function": {"name": "f", "arguments": "{}"}}, None), ({"function": "f"}, None), ({}, None),
])  # fmt: skip
def test_arguments_as_text_where_a_template_wants_them_so(call, text):
    made = conversations._with_text(call)
    if text is None:
        assert made == call and made is not call
        return
    assert made == {"id": 1, "function": {"name": "f", "arguments": text}}
    assert isinstance(call["function"]["arguments"], dict)


def test_a_template_shows_words_if_all_are_there_and_not_as_a_list():
    first, *others = conversations._WORDS
    every = " ".join([first, *others])
    assert conversations._shows_words(every)
    assert others and not conversations._shows_words(first)
    assert not conversations._shows_words(None) and not conversations._shows_words("")
    assert not conversations._shows_words(f"[{{'type': 'text', 'text': '{every}'}}]")


@pytest.mark.parametrize(("message", "thinking"), [
    ({"reasoning": "r"}, "r"), ({"thinking": "t", "reasoning_content": ""}, "t"), ({}, None),
    ({"reasoning_content": ""}, None),
])  # fmt: skip
def test_reasoning_has_both_of_its_names(message, thinking):
    made = conversations._with_reasoning(message)
    assert made.get("reasoning_content") == (thinking or message.get("reasoning_content"))
    assert made.get("thinking") == thinking


def test_a_column_is_looked_for_among_the_first_of_a_row(monkeypatch):
    monkeypatch.setattr(columns, "_COMPARED_KEYS", 12)
    many = {**{str(number): 0 for number in range(12)}, "text_of_row": 3}
    with pytest.raises(DataError) as told:
        columns.with_columns(many, {"text": "text_of_rows"})
    assert "did you mean" not in str(told.value)
    del many["3"]
    with pytest.raises(DataError, match="did you mean 'text_of_row'"):
        columns.with_columns(many, {"text": "text_of_rows"})
    row = {"a": 1, "b": 2, "text_of_row": 3}
    with pytest.raises(DataError, match=r"did you mean \{prompt: a\}"):
        columns.with_columns(row, {"a": "prompt"})
    with pytest.raises(DataError, match="unknown key 'promt': did you mean 'prompt'"):
        columns.with_columns(row, {"promt": "a"})
    with pytest.raises(DataError, match=r"unknown key 'zzzz' \(supported: "):
        columns.with_columns(row, {"zzzz": "a"})
    assert columns.with_columns(row, {"prompt": "b"}) == {**row, "prompt": 2}


# ---- arrays in pieces ----------------------------------------------------------------------------

ENDS = [3, 3, 4, 9, 12]
LABELS = [9, 1, -100, 5, 7, -100, 2, 3, -100, -100, 4, 5]


@pytest.fixture(params=["in memory", "mapped"])
def dataset(request, tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "_AT_ONCE", 5)
    monkeypatch.setattr(examples, "_RESIDENT", 4)
    ids, labels = np.arange(12, dtype=np.int32), np.array(LABELS, np.int32)
    if request.param == "mapped":
        arrays = []
        for name, array in (("ids", ids), ("labels", labels)):
            path = Path(tmp_path / name)
            path.write_bytes(array.tobytes())
            with path.open("rb") as file:
                arrays.append(map_file(path, file).view(np.int32))
        ids, labels = arrays
    return Dataset.of_arrays(
        ids, labels, np.array(ENDS), Counts(), (), continues=np.array([0, 1, 0, 0, 1], np.uint8),
        targets=np.arange(10, dtype=np.float32),
    )  # fmt: skip


def test_examples_of_concatenated_arrays(dataset):
    begins = [0, *ENDS[:-1]]
    for _ in range(2):
        for number, (begin, end) in enumerate(zip(begins, ENDS, strict=True)):
            each = dataset[number]
            assert each.input_ids.tolist() == list(range(begin, end))
            assert each.labels.tolist() == LABELS[begin:end]
            assert each.weight == 1.0 and each.targets.tolist() == [2 * number, 2 * number + 1]
    assert dataset[-1].input_ids.tolist() == [9, 10, 11]
    assert [len(each) for each in dataset[1:4]] == [0, 1, 5]
    for number in (5, -6):
        with pytest.raises(IndexError):
            dataset[number]


def test_counts_of_concatenated_arrays(dataset):
    assert len(dataset) == dataset.num_rows == 5 and dataset.num_tokens == 12
    assert dataset.lengths.tolist() == [3, 0, 1, 5, 3]
    # The first token of an example is never predicted
    assert dataset.label_counts.tolist() == [1, 0, 0, 2, 2] and dataset.num_label_tokens == 5
    assert dataset.groups.tolist() == [0, 0, 1, 2, 2] and dataset.has_windows
    assert dataset.max_token_id == 11
    assert list(dataset._parts()) == [(0, 3), (3, 4), (4, 5)]
    pieces = [piece.tolist() for piece in dataset._pieces(dataset._labels)]
    assert pieces == [LABELS[:5], LABELS[5:10], LABELS[10:]]


def test_examples_without_targets_and_windows():
    ids = np.arange(2, dtype=np.int32)
    none = np.zeros(0, np.float32)
    plain = Dataset.of_arrays(ids, ids, np.array([1, 2]), Counts(), (), targets=none)
    assert plain[0].targets is None and not plain.has_windows
    assert plain.groups.tolist() == [0, 1]
