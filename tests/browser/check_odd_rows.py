"""Of files and rows that nobody means, the page makes what Python makes, or refuses them."""

import json

import pytest
from browser.check_data import backends, in_python
from browser.odd_rows import OF_TOKENIZER, OTHERWISE, cases, long_cases

from qlora_wgpu import data
from qlora_wgpu.data import find_chat_template
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES, end_of_turn
from qlora_wgpu.data.row_stats import PreprocessConfig

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def given_to_page(name, text, tokenizer, template, how):
    """A case as the page reads it."""
    return {
        "name": name,
        "text": text,
        "tokenizer": kind_for(name),
        "template": template.source,
        "tool_template": template.tool_source,
        "special_tokens": SPECIAL,
        "turn_end": end_of_turn(template, tokenizer),
        "how": {
            "format": "auto",
            "columns": {},
            "train_on": "auto",
            "truncation": how.truncation,
            "max_length": how.max_seq_length,
        },
    }


def kind_for(name):
    """A tokenizer: for most documents one that puts a space before each piece."""
    return "joined" if name == "text.txt" else "bytes"


def in_both(browser, ask, folder, cases):
    """What the page and Python make of some cases: as given to the page, found there, wanted."""
    files = {name: backend for name, backend in backends().items() if name in ("bytes", "joined")}
    known = {name: data.Tokenizer(backend, SPECIAL) for name, backend in files.items()}
    known["bytes"].chat_template, known["bytes"].tool_template = OF_TOKENIZER
    given, wanted = [], []
    for name, text, setting, truncation, longest in cases:
        tokenizer = known[kind_for(name)]
        template = find_chat_template(setting, tokenizer)
        own = None if setting is None else template.source
        how = PreprocessConfig(longest, own, truncation=truncation)
        whole = text if isinstance(text, str) else "".join(part * count for part, count in text)
        (folder / name).write_bytes(whole.encode())
        wanted.append(in_python(folder / name, tokenizer, how))
        given.append(given_to_page(name, text, tokenizer, template, how))
    tokenizers = {
        name: {
            "file": json.loads(backend.to_str()),
            "special_tokens": SPECIAL,
            "eos_ids": sorted(known[name].eos_token_ids),
        }
        for name, backend in files.items()
    }
    task = {"tokenizers": tokenizers, "cases": given, "alpaca": BUILT_IN_TEMPLATES["alpaca"]}
    found = ask(browser, "data.html", task)[0]["found"]
    return zip(given, found, wanted, strict=True)


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_odd_rows(browser, ask, tmp_path):
    wanted = []
    for case, got, want in in_both(browser, ask, tmp_path, cases()):
        wanted.append(want)
        shown = case["name"], case["text"][:300], case["template"][:99]
        if want is None or (case["template"], case["text"]) in OTHERWISE:
            assert "told" in got, shown
        else:
            assert got == want, shown
    assert sum(want is not None for want in wanted) > len(wanted) // 2
    notes = [want["notes"] for want in wanted if want is not None]
    for name in ("endless", "dropped", "unread", "bad", "spared"):
        assert {note[name] for note in notes} == {True, False}


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_long_rows(browser, ask, tmp_path):
    given = [(name, parts, "chatml", "keep_start", 24) for name, parts in long_cases()]
    taken = []
    for case, got, want in in_both(browser, ask, tmp_path, given):
        shown = case["name"], case["text"]
        assert (
            ("told" in got and "longer than 16 MiB" in got["told"]) if want is None else got == want
        ), shown
        taken.append(want is not None)
    assert taken == [True] * (len(taken) // 2) + [False] * (len(taken) // 2)


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_rows_with_images_are_refused_for_a_model_that_reads_them(browser, ask, tmp_path):
    """Other models ignore them with a note."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = json.dumps({"messages": turns, "images": ["a.png"]})
    known = data.Tokenizer(backends()["bytes"], SPECIAL)
    template, how = find_chat_template("chatml", known), PreprocessConfig(24)
    given = [given_to_page("rows.jsonl", row, known, template, how) for _ in range(2)]
    given[1]["how"]["refuses_images"] = True
    tokenizers = {
        "bytes": {"file": json.loads(backends()["bytes"].to_str()), "special_tokens": SPECIAL,
                  "eos_ids": sorted(known.eos_token_ids)}
    }  # fmt: skip
    task = {"tokenizers": tokenizers, "cases": given, "alpaca": BUILT_IN_TEMPLATES["alpaca"]}
    plain, refused = ask(browser, "data.html", task)[0]["found"]
    assert plain["notes"]["unread"]
    assert refused["told"].startswith("rows.jsonl line 1: the row has images ('images'), but")
