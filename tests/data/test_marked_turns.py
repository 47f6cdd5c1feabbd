"""Turns with flags that exclude them from the loss or include them in it."""

import json
import re

import numpy as np
import pytest
from support.tiny_tokenizer import tiny_tokenizer, trained_text

from qlora_wgpu.data import PreprocessConfig, encoded_examples, load_dataset
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.errors import DataError

G, E = "{% generation %}", "{% endgeneration %}"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    f"{G}{{{{ m.content }}}}{E}|{G}</s>{E}"
    "{% else %}{{ m.content }}|</s>{% endif %}{% endfor %}" + PROMPT
)
# Turns before the last question are written otherwise (as Qwen's, whose thoughts go).
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}{% for m in messages %}[{{ m.role }}]"
    f"{{% if m.role == 'assistant' %}}{G}{{% if loop.index0 > ns.last %}}(thinks){{% endif %}}"
    f"{{{{ m.content }}}}</s>{E}"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}" + PROMPT
)
NOT = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"train": 0},
       {"loss": False}, {"loss_weight": 0.0}]  # fmt: skip
YES = [{}, {"weight": 1}, {"weight": None}, {"train": True}, {"training": True, "weight": 1.0},
       {"loss": True}, {"loss_weight": 1.0}]  # fmt: skip


def user(text, **marks):
    return {"role": "user", "content": text, **marks}


def answer(text, **marks):
    return {"role": "assistant", "content": text, **marks}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def read(tokenizer, *rows, template=PLAIN, length=512, **more):
    return encode_rows(list(rows), tokenizer, PreprocessConfig(length, template, **more))


def read_as(tokenizer, row, **how):
    """The text of a row that is trained on."""
    example = read(tokenizer, row, **how)[0]
    return trained_text(tokenizer, example.input_ids.tolist(), example.labels.tolist())


def chat(*marks):
    """A question and an answer for each, as letters: a, b, c, d and so on."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    return [m for each in marks for m in (user(next(letters)), answer(next(letters), **each))]


def sharegpt(messages):
    names = {"user": "human", "assistant": "gpt"}
    return [
        {"from": names[m["role"]], "value": m["content"]}
        | {key: value for key, value in m.items() if key not in ("role", "content")}
        for m in messages
    ]


@pytest.mark.parametrize("no", NOT)
@pytest.mark.parametrize("yes", YES)
def test_a_turn_that_says_so_is_read_and_not_trained_on(tokenizer, no, yes):
    row = {"messages": chat(no, yes)}
    dataset = read(tokenizer, row)
    plain = read(tokenizer, {"messages": chat({}, {})})
    assert np.array_equal(dataset[0].input_ids, plain[0].input_ids)
    assert read_as(tokenizer, row) == "d</s>"
    assert not dataset.warnings


def test_numbers_and_truth_values_of_numpy(tokenizer):
    """In a template of strangers, too, whose process knows no NumPy."""
    marks = [{"train": np.bool_(False)}, {"train": np.bool_(True)}, {"weight": np.float32(0)}]
    row = {"messages": chat(*marks, {"weight": np.int64(1)})}
    assert read_as(tokenizer, row) == "d</s>h</s>"


def forms_of(messages):
    return [
        {"messages": messages},
        {"messages": json.dumps(messages)},
        {"messages": sharegpt(messages)},
        {"conversations": sharegpt(messages)},
        {"conversations": messages, "system": "s"},
        {"prompt": messages[:1], "completion": messages[1:]},
        {"prompt": [], "completion": messages},
    ]


@pytest.mark.parametrize("number", range(len(forms_of([]))))
def test_in_every_form_of_chats(tokenizer, number):
    row = forms_of(chat({}, {"weight": 0}, {"train": True}))[number]
    assert read_as(tokenizer, row) == "b</s>f</s>"


@pytest.mark.slow
@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETS, *BUILT_IN_TEMPLATES])
def test_what_is_left_is_trained_on_as_it_would_be(tokenizer, template):
    """Each set of four turns: whose tokens are whose is told by the answers, which are digits."""

    def labels(*marks):
        messages = [m for i, each in enumerate(marks) for m in (user("?"), answer(str(i), **each))]
        return read(tokenizer, {"messages": messages}, template=template)[0].labels

    whole = labels({}, {}, {}, {})
    tokens = [tokenizer.decode([i], False) for i in whole[whole != -100].tolist()]
    turns = re.findall(r"(?:\(thinks\)| )?\d(?:(?! ?\d)[^(])*", "".join(tokens))
    assert "".join(turns) == "".join(tokens) and len(turns) == 4
    ends = np.cumsum([len(turn) for turn in turns])
    owners = np.searchsorted(ends, np.cumsum([len(token) for token in tokens]))
    for kept in range(1, 16):
        expected = whole.copy()
        expected[whole != -100] = np.where(kept >> owners & 1, whole[whole != -100], -100)
        marks = [{} if kept >> i & 1 else {"weight": 0} for i in range(4)]
        assert np.array_equal(labels(*marks), expected)


def test_two_answers_in_a_row(tokenizer):
    messages = [user("a"), answer("b", weight=0), answer("c"), user("d"), answer("e", weight=0)]
    for template in (PLAIN, MARKED):
        assert read_as(tokenizer, {"messages": messages}, template=template) == "c</s>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_turn_of_someone_else_that_is_to_be_trained_on(tokenizer, template):
    end = "|</s>" if template == MARKED else "</s>"
    for mark in ("train", "training"):
        messages = [user("a", **{mark: True}), answer("b"), user("c"), answer("d", train=False)]
        assert read_as(tokenizer, {"messages": messages}, template=template) == f"a{end}b</s>"
        row = {"conversations": sharegpt(messages)}
        assert read_as(tokenizer, row, template=template) == f"a{end}b</s>"
    # OpenAI's weights are of the assistant's turns alone, and a mark of 0 goes before.
    messages = [user("a", weight=1), answer("b"), user("c", train=True, weight=0), answer("d")]
    assert read_as(tokenizer, {"messages": messages}, template=template) == "b</s>d</s>"
    row = {"prompt": [user("a", train=True)], "completion": [answer("b")]}
    assert read_as(tokenizer, row, template=template) == "b</s>"


def test_a_system_message_that_is_to_be_trained_on(tokenizer):
    """Within a turn of the user what it says is told, and not what ends it."""

    def messages(**marks):
        return {"messages": [{"role": "system", "content": "S", **marks}, *chat({})]}

    for template, said in (("chatml", "S<|im_end|>\n"), ("llama2", "S"), (PLAIN, "S</s>")):
        following = read_as(tokenizer, messages(), template=template)
        found = read_as(tokenizer, messages(train=True), template=template)
        assert found == said + following
        whole = read(tokenizer, messages(), template=template, train_on="all")[0]
        rest = read(tokenizer, messages(weight=0), template=template, train_on="all")[0]
        left_out = [i for i in whole.labels[whole.labels != rest.labels].tolist() if i != -100]
        assert tokenizer.decode(left_out, False) == said
    # One that a template leaves out is neither.
    silent = PLAIN.replace("in messages %}", "in messages if m.role != 'system' %}")
    for train_on in ("auto", "all"):
        plain = read_as(tokenizer, messages(), template=silent, train_on=train_on)
        for mark in (True, False):
            row = messages(train=mark)
            assert read_as(tokenizer, row, template=silent, train_on=train_on) == plain


def test_turns_that_are_trained_on_alone_are_someone_else_s(tokenizer):
    row = {"messages": [user("a"), {"role": "tool", "content": "b", "train": True}, user("c")]}
    assert read_as(tokenizer, row) == "b</s>"


def test_the_last_turn_alone(tokenizer):
    kept = {"messages": [user("a", train=True), answer("b", train=True), user("c"), answer("d")]}
    for train_on in ("last_turn", "completion"):
        assert read_as(tokenizer, kept, train_on=train_on) == "d</s>"
        with pytest.raises(
            DataError, match="nothing to train on: its only row has only assistant turns"
        ):
            read(tokenizer, {"messages": chat({}, {"weight": 0})}, train_on=train_on)
        row = {"messages": chat({"weight": 0}, {})}
        assert read_as(tokenizer, row, train_on=train_on) == "d</s>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_where_everything_is_trained_on_these_turns_are_not(tokenizer, template):
    bar = "|" if template == MARKED else ""
    messages = [user("a"), answer("b", train=False), user("c", weight=0), answer("d")]
    whole = read_as(tokenizer, {"messages": messages}, template=template, train_on="all")
    assert whole == f"[user]a{bar}</s>[assistant][user][assistant]d{bar}</s>"


def test_where_everything_is_trained_on_no_turn_has_to_be_told_apart(tokenizer):
    shouts = "{% for m in messages %}{{ m.content | upper }}{{ loop.length }}</s>{% endfor %}"
    row = {"messages": chat({}, {"weight": 1})}
    with pytest.raises(DataError, match="cannot locate"):
        read(tokenizer, row, template=shouts)
    assert read_as(tokenizer, row, template=shouts, train_on="all") == ("A4</s>B4</s>C4</s>D4</s>")


def test_a_template_that_marks_by_what_turns_say_decides(tokenizer):
    knowing = (
        "{% for m in messages %}[{{ m.role }}]{% if m.weight == 0.5 %}"
        f"{G}{{{{ m.content }}}}</s>{E}"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    row = {"messages": chat({"weight": 0.5}, {"weight": 1})}
    assert read_as(tokenizer, row, template=knowing) == "b</s>"
    # One that only writes them marks nothing.
    row = {"messages": chat({"weight": 0}, {"weight": 1})}
    writes = PLAIN.replace("{{ m.content }}", "{{ m.weight }}{{ m.content }}")
    assert read_as(tokenizer, row, template=writes) == "1d</s>"
    everything = read_as(tokenizer, row, template=knowing + PROMPT, train_on="all")
    assert everything == "[user]a</s>[assistant][user]c</s>[assistant]d</s>"


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (
            {"weight": 0.5},
            r"has the weight 0\.5, but the weight of a turn must be 0 or 1: use data\.co",
        ),
        ({"weight": 2}, "has the weight 2, but the weight of a turn"),
        ({"weight": -1}, "has the weight -1, but the weight of a turn"),
        ({"weight": "0"}, "has the weight '0', but the weight of a turn"),
        ({"weight": [0]}, r"has the weight \[0\], but the weight of a turn"),
        ({"train": "false"}, "has train: 'false', which must be true or false"),
        ({"training": 0.5}, "has training: 0.5, which must be true or false"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
            "has train_detail, which is not supported: set train: true or false for the whole",
        ),
    ],
)
def test_other_values_are_refused_by_their_place(tokenizer, marks, message):
    good, bad = {"messages": chat({})}, chat({}, marks)
    with pytest.raises(DataError, match=rf"^rows\[1\]: message 4 {message}"):
        read(tokenizer, good, {"messages": bad, "system": "s"})
    with pytest.raises(DataError, match=rf"^rows\[0\]: turn 4 {message}"):
        read(tokenizer, {"conversations": sharegpt(bad)})
    with pytest.raises(DataError, match=rf"^rows\[0\]: message 1 of 'completion' {message}"):
        read(tokenizer, {"prompt": bad[:3], "completion": bad[3:]})
    for nothing in (None, []):
        detail = {"messages": chat({"train_detail": nothing})}
        assert read_as(tokenizer, detail) == "b</s>"


def test_passages_of_a_turn_that_is_not_trained_on_do_not_matter(tokenizer):
    row = {"messages": chat({"train": False, "train_detail": [{"train": True}]}, {})}
    assert read_as(tokenizer, row) == "d</s>"


def test_a_turn_that_cannot_be_told_apart_is_refused_by_its_place(tokenizer):
    hides = "{% for m in messages %}{{ m.content | length }}</s>{% endfor %}"
    row = {"messages": [user("a", train=True), answer("b")]}
    with pytest.raises(
        DataError, match=r"rows\[0\]: cannot locate the turn in message 1, which has a flag"
    ):
        read(
            tokenizer,
            row,
            template=hides.replace("<", G + "<", 1).replace("{% endfor", E + "{% endfor"),
        )
    # Earlier turns change with later ones, and what turns say is not in the text as it is.
    changing = (
        "{% for m in messages %}{{ loop.length }}"
        f"{{% if m.role == 'assistant' %}}{G}{{{{ m.content | upper }}}}{E}"
        "{% endif %}</s>{% endfor %}"
    )
    row = {"messages": chat({"weight": 0}, {})}
    with pytest.raises(DataError, match="cannot locate the assistant's last turn"):
        read(tokenizer, row, template=changing)
    assert read_as(tokenizer, row, template=changing.replace(" | upper", "")) == "d"


def test_rows_with_nothing_left_are_left_out_and_counted(tokenizer):
    none, some = {"messages": chat({"weight": 0})}, {"messages": chat({}, {"weight": 0})}
    dataset = read(tokenizer, none, some, none)
    assert len(dataset) == 1 and dataset.counts.without_labels == 2
    told = "has only assistant turns with weight 0 or train: false"
    assert dataset.warnings == (
        f"rows: 2 of 3 rows {told.replace('has', 'have')} and were dropped",
    )
    assert read(tokenizer, some, none).warnings == (f"rows: 1 of 2 rows {told} and was dropped",)
    with pytest.raises(DataError, match=f"^rows has nothing to train on: its only row {told}$"):
        read(tokenizer, none)
    # What is cut away was to be trained on.
    long = {"messages": [user("a" * 40), answer("b"), user("c"), answer("d", weight=0)]}
    warnings = read(tokenizer, some, long, length=30).warnings
    assert "rows: 1 of 2 rows has nothing to train on within max_seq_length=30 and was dropped" in (
        warnings
    )


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_message_of_nothing_but_a_mark_says_nothing(tokenizer, key):
    messages = [user(" "), answer("", weight=1, train=True)]
    row = {key: messages if key == "messages" else sharegpt(messages)}
    dataset = read(tokenizer, row, {key: chat({})})
    assert dataset.counts.empty == 1


def test_rows_that_are_cut_keep_what_is_left(tokenizer):
    row = {"messages": chat({}, {"weight": 0}, {})}
    whole = read(tokenizer, row)[0]
    assert read_as(tokenizer, row) == "b</s>f</s>"
    for truncation, part in (("keep_start", slice(30)), ("keep_end", slice(-30, None))):
        found = read(tokenizer, row, length=30, truncation=truncation)[0]
        assert np.array_equal(found.labels, whole.labels[part])
        assert np.array_equal(found.input_ids, whole.input_ids[part])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_long_chats(tokenizer, template):
    marks = [{"train": i % 3 == 0} for i in range(40)]
    messages = [
        m
        for i, each in enumerate(marks)
        for m in (user("q", train=i % 7 == 0), answer("a", **each))
    ]
    end = "|</s>" if template == MARKED else "</s>"
    expected = "".join(
        ("q" + end if i % 7 == 0 else "") + ("a</s>" if i % 3 == 0 else "") for i in range(40)
    )
    assert read_as(tokenizer, {"messages": messages}, template=template, length=4096) == expected


def test_a_file_says_what_rows_in_memory_say(tokenizer, tmp_path):
    rows = [{"messages": chat({"weight": i % 2}, {"train": True})} for i in range(70)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = PreprocessConfig(512, PLAIN)
    wanted = read(tokenizer, *rows)
    assert wanted.fingerprint != read(tokenizer, *[{"messages": chat({}, {})}] * 70).fingerprint
    for cache in (False, True, True):
        found = load_dataset(path, tokenizer, 512, how=how, cache=cache)
        assert found.fingerprint == wanted.fingerprint
    shown = [each.labels for each in encoded_examples(path, tokenizer, how)]
    assert shown == [example.labels.tolist() for example in wanted]
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps({"messages": chat({"weight": 3})}))
    with pytest.raises(DataError, match=r"^rows\.jsonl line 2: message 2 has the weight 3"):
        load_dataset(path, tokenizer, 512, how=how)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize("key", ["role", "from"])
def test_answers_that_are_compared_count_whatever_they_say(tokenizer, objective, key):
    def row(**marks):
        chosen, rejected = [*chat({}), user("c")], [*chat(marks), user("c")]
        sides = [*chosen, answer("good", weight=1)], [*rejected, answer("bad", **marks)]
        sides = map(sharegpt, sides) if key == "from" else sides
        return dict(zip(("chosen", "rejected"), sides, strict=True))

    usual = read(tokenizer, row(), objective=objective)
    assert not usual.warnings
    found = read(tokenizer, row(weight=0), row(weight=0.3), objective=objective)
    assert len(found) == 2 * len(usual)
    for example, plain in zip(found, [*usual, *usual], strict=True):
        assert np.array_equal(example.labels, plain.labels)
    assert found.warnings == (
        "rows: 1 of 2 rows has answers with weight 0 or train: false, which train.objective: "
        f"{objective} ignores",
    )
