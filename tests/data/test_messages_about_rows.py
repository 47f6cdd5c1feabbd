"""What is told of rows that are otherwise than they should be: the cause, and what to do."""

from __future__ import annotations

import codecs
import gzip
import json

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import PreprocessConfig, load_dataset
from qlora_wgpu.errors import DataError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
GZIP = gzip.compress(b"{}", mtime=0)  # a time would name the test anew in each process
CHATML = PreprocessConfig(256, chat_template="chatml")


def load(tmp_path, rows, how=CHATML, tokenizer=None):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(path, tokenizer or tiny_tokenizer(), 256, how=how)


def chat(*roles):
    return {"messages": [{"role": role, "content": f"{role} says"} for role in roles]}


def test_unknown_roles_are_named(tmp_path):
    with pytest.raises(DataError) as caught:
        load(tmp_path, [chat("human", "bot"), chat("human", "bot", "human")])
    assert str(caught.value) == (
        "a.jsonl has nothing to train on: all of its 2 rows have no assistant turn to train on "
        "(roles: 'bot', 'human'); rename the role that answers to assistant"
    )


def test_some_rows_without_an_answer(tmp_path):
    dataset = load(tmp_path, [chat("user", "assistant"), chat("user", "ai")])
    assert len(dataset) == 1 and "1 of 2 rows has no assistant turn" in dataset.warnings[0]
    assert not any("max_seq_length" in text for text in dataset.warnings)


def test_roles_that_a_template_drops(tmp_path):
    template = (
        "{% for m in messages if m.role != 'narrator' %}{{ m.role }}:{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rows = [chat("user", "narrator", "assistant"), chat("user", "assistant")]
    dataset = load(tmp_path, rows, PreprocessConfig(256, chat_template=template))
    assert any("omits messages of the role 'narrator' from 1 row" in t for t in dataset.warnings)


QUESTION = {"question": "a", "answer": "b"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (QUESTION, "set data.columns: {prompt: question, completion: answer}"),
        ({"prompt": "a", "response": "b"}, "set data.columns: {completion: response}"),
        ({"instruction": "a", "response": "b"}, "set data.columns: {"),
        (
            {"dialogue": [{"role": "user", "content": "a"}]},
            "set data.columns: {messages: dialogue}",
        ),
        ({"story": "a"}, "set data.columns: {text: story}"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            ": set train.objective: dpo to train on 'chosen' and 'rejected', or data.columns: "
            "{completion: chosen} to train on the chosen answers only (init: --columns)",
        ),
        ({"chosen": [{"role": "user"}], "rejected": []}, "or data.columns: {messages: chosen}"),
        ({"chosen": "ab", "rejected": "ac"}, "or data.columns: {text: chosen}"),
        ({"zzz": "a"}, "map them with data.columns, such as {text: zzz}"),
    ],
)
def test_other_columns_name_the_setting(tmp_path, row, expected):
    with pytest.raises(DataError) as caught:
        load(tmp_path, [row])
    assert expected in str(caught.value)


def test_another_format_than_is_set(tmp_path):
    how = PreprocessConfig(256, row_format="instruction/output")
    with pytest.raises(DataError, match=r"which is the format 'messages': set data\.format"):
        load(tmp_path, [chat("user", "assistant")], how)


def test_columns_the_wrong_way_round(tmp_path):
    how = PreprocessConfig(256, columns={"question": "prompt"})
    with pytest.raises(DataError, match=r"did you mean \{prompt: question\}\?"):
        load(tmp_path, [QUESTION], how)


def test_unknown_tokens_are_counted(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"text": "ab"}, {"text": "ab"}]
    dataset = load(tmp_path, rows, tokenizer=tokenizer)
    assert not any("does not know" in text for text in dataset.warnings)
    letter = tokenizer.decode(tokenizer.encode("b", False))
    tokenizer.special_tokens["unk_token"] = letter  # whatever stands for it
    tokenizer.special_tokens["pad_token"] = letter  # as of many Llamas
    dataset = load(tmp_path, [*rows, {"text": "a"}], tokenizer=tokenizer)
    assert any("2 tokens in 2 of 3 rows are b: the vocabulary lacks" in t for t in dataset.warnings)
    (tmp_path / "a.txt").write_text("abba" * 20)
    document = load_dataset(tmp_path / "a.txt", tokenizer, 64)
    assert any("40 tokens in 2 of 2 rows are b: the voc" in text for text in document.warnings)
    tokenizer.special_tokens["bos_token"] = letter  # which says nothing of what is known
    dataset = load(tmp_path, rows, tokenizer=tokenizer)
    assert not any("does not know" in text for text in dataset.warnings)


def text_of(tmp_path, row):
    tokenizer = tiny_tokenizer()
    return tokenizer.decode(load(tmp_path, [row], tokenizer=tokenizer)[0].input_ids.tolist())


def test_alpaca_rows_have_a_system_text_and_a_history(tmp_path):
    row = {"instruction": "c", "output": "d", "system": "be kind.", "history": [["a", "b"]]}
    assert text_of(tmp_path, row) == (
        "be kind.\n\n### Instruction:\na\n\n### Response:\nb\n\n### Instruction:\nc\n\n"
        "### Response:\nd"
    )
    plain = text_of(tmp_path, {"instruction": "c", "output": "d"})
    assert text_of(tmp_path, {**row, "system": "", "history": []}) == plain
    assert plain.startswith("Below is an instruction")


@pytest.mark.parametrize("history", ["a", [["a"]], [["a", 1]], {"a": "b"}])
def test_a_history_of_another_form(tmp_path, history):
    row = {"instruction": "c", "output": "d", "history": history}
    with pytest.raises(DataError, match="'history' must"):
        load(tmp_path, [row])


def test_a_list_where_a_row_should_be(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match=r"line 1: .* not a list: .* to \.json"):
        load_dataset(path, tiny_tokenizer(), 256, how=CHATML)


def test_compressed_files(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"x")
    with pytest.raises(DataError, match="is compressed: unpack it first"):
        load_dataset(path, tiny_tokenizer(), 256, how=CHATML)


def test_an_odd_role_that_a_template_refuses_is_named(tmp_path):
    how = PreprocessConfig(64, chat_template="mistral")
    with pytest.raises(DataError, match=r"refuses .* \(its roles are 'assistnat', 'user'\)"):
        load(tmp_path, [chat("user", "assistnat")], how)


def test_one_row_in_place_of_a_list():
    with pytest.raises(DataError, match="rows must be a list of rows, got one mapping"):
        load_dataset({"text": "a"}, tiny_tokenizer(), 64)
    with pytest.raises(DataError, match="rows must be a path or a list of rows, got int"):
        load_dataset(5, tiny_tokenizer(), 256)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"promt": "question"},
            "data.columns: unknown key 'promt': did you me",
        ),
        (
            {"about": "question"},
            r"unknown key 'about' \(supported: ",
        ),
        (
            {"prompt": "qestion"},
            "maps 'prompt' to the column 'qestion', .*: did you me",
        ),
    ],
)
def test_misspelt_columns(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path, [{"question": "a", "answer": "b"}], PreprocessConfig(64, columns=columns))


@pytest.mark.parametrize("mark", [";", "\t", ","])
def test_columns_are_separated_as_the_first_line_shows(tmp_path, mark):
    path = tmp_path / "a.csv"
    rows = [["prompt", "completion"], ["a,b" if mark != "," else "a;b", "c"]]
    path.write_text("\ufeff" + "".join(mark.join(row) + "\n" for row in rows), "utf-8")
    assert load_dataset(path, tiny_tokenizer(), 64)[0].num_label_tokens == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl is UTF-16 text: save it as UTF-8"),
        ("a.csv", codecs.BOM_UTF16_BE + "a".encode("utf-16-be"), "a.csv is UTF-16 text: save it"),
        ("a.jsonl", LFS, "a.jsonl is a Git LFS pointer, not the data: run git lfs pull"),
        ("a.parquet", LFS, "a.parquet is a Git LFS pointer, not the data"),
        ("a.arrow", b"PAR1 and more", r"a.arrow is a Parquet file"),
        ("a.txt", "a".encode("utf-16"), "a.txt is UTF-16 text: save it"),
        ("a.jsonl", GZIP, r"a.jsonl is compressed \(gzip\): unpack it first"),
        ("a.csv", b"PK\x03\x04 and more", r"a.csv is compressed \(zip\)"),
        ("a.json", b"PAR1 and more", r"a.json is a Parquet file: rename it to end in .parquet"),
    ],
)
def test_files_of_another_kind_than_their_name_says(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_dataset(tmp_path / name, tiny_tokenizer(), 64)


def test_a_row_of_a_folder_is_named_with_its_folder(tmp_path):
    chats = tmp_path / "chats"
    (chats / "more").mkdir(parents=True)
    (chats / "config.json").write_text("{}")  # a model's, no rows
    (chats / "more" / "a.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(DataError, match=r"^chats/more/a\.jsonl line 2: a row must have"):
        load_dataset(chats, tiny_tokenizer(), 64)
    (chats / "more" / "a.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"^chats/more/a\.jsonl line 1"):
        load_dataset(chats, tiny_tokenizer(), 64)


def test_rows_that_are_all_cut_away(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "x" * 900}, chat("assistant")["messages"][0]]}
    ]
    for truncation, advice in (
        ("keep_start", "raise data.max_seq_length, or keep the ends of rows (data.truncation: "),
        ("drop", "raise data.max_seq_length, or keep the ends of rows (data.truncation: "),
    ):
        with pytest.raises(DataError) as caught:
            load(
                tmp_path, rows, PreprocessConfig(16, truncation=truncation, chat_template="chatml")
            )
        assert advice in str(caught.value)


ROWS = {
    "text": {"text": "a b"},
    "prompt/completion": {"prompt": "a", "completion": "b"},
    "messages": chat("user", "assistant"),
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "kto": {"prompt": "a", "completion": "b", "label": True},
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("weights", [1, 0.5]),
        ("loss_mask", [True, False]),
        ("completion_mask", "[0, 1]"),  # as a .csv has it
        ("assistant_masks", [0]),
        ("labels", [-100, 5]),
    ],
)
def test_a_column_that_says_which_tokens_are_trained_on_is_refused(tmp_path, kind, column, value):
    how = PreprocessConfig(256, "chatml", objective=kind if kind in ("dpo", "kto") else "sft")
    rows = [{**ROWS[kind], column: None}, {**ROWS[kind], column: value}]
    with pytest.raises(DataError) as caught:
        load(tmp_path, rows, how)
    begin = f"a.jsonl line 2: the column '{column}' is a loss mask"
    assert str(caught.value).startswith(begin)


@pytest.mark.parametrize(
    "column",
    [
        {"labels": [27, 3]},  # classes of the text
        {"weights": [[1], [1, 2]]},
        {"weights": 2},
        {"loss_mask": []},
        {"weights": "[w]"},
    ],
)
def test_other_columns_of_these_names_are_not_read(tmp_path, column):
    assert len(load(tmp_path, [{**ROWS["text"], **column}])) == 1
