"""What is damaged, missing or no data: a sentence each."""

import gzip
import json

import pytest
from browser.conftest import user_task

from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES


def row(question, answer):
    """A chat of so many words."""
    turns = {"user": "one " * question, "assistant": "two " * answer}
    return json.dumps({"messages": [{"role": r, "content": text} for r, text in turns.items()]})


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_files_that_are_no_data_are_told(ask, browser):
    """One visit drops them all, and training goes well afterwards."""
    wrong = {
        "picture.png": ("\x89PNG\r\n", "picture.png is not supported"),
        "empty.jsonl": ("", "empty.jsonl has no rows"),
        "blank.csv": ("\n", "blank.csv"),
        "rows.jsonl": ("no JSON\n", "rows.jsonl line 1: not valid JSON"),
        "cut.jsonl": ('{"messages": [{"role": "user", "con', "cut.jsonl line 1: not valid JSON"),
        "binary.jsonl": ("\x00\x01\x02\xff\n", "binary.jsonl line 1: not valid JSON"),
        "number.jsonl": ("5\n", "number.jsonl line 1: a row must be a JSON object, such as"),
        "list.jsonl": ("[\n{}\n]\n", "list.jsonl contains a list: rename it to .json"),
        "inside.json": (
            json.dumps({"a": 1, "b": [{"text": "a"}]}, indent=1),
            "if 'b' has the rows",
        ),
        "pretty.json": (json.dumps({"rows": []}, indent=1), "must contain a list of rows, or one"),
        "within.json": (json.dumps({"data": [{"text": "a"}]}), "if 'data' has the rows, save"),
        "packed.jsonl": ([0x1F, 0x8B, 8, 0], "packed.jsonl is compressed: unpack it first"),
        "packed.txt": ("BZh91AY&SY", "packed.txt is compressed: unpack it first"),
        "table.txt": ("PAR1\x15\x04", "table.txt: Parquet is not supported in a browser: save"),
        "rows.zip": ("PK", "rows.zip is compressed: unpack it first"),
        "asked.csv": ("Question,answer\na,b\n", "its keys are 'Question', 'answer'"),
        "upper.csv": ("Prompt, answer\na,b\n", "its keys are 'Prompt', ' answer'"),
        "named.csv": (
            "question,Completion\na,b\n",
            "rename 'question' to 'prompt' and 'Completion' to 'completion'",
        ),
        "silent.jsonl": (
            json.dumps({"messages": [{"role": "user", "content": "Hello"}]}),
            "it has no assistant turn to train on (roles: 'user').",
        ),
        "kind.jsonl": ('{"a": 3}\n', "kind.jsonl"),
        "turns.jsonl": ('{"messages": "hello"}\n', "turns.jsonl line 1"),
        "roles.jsonl": (
            json.dumps({"conversations": [{"from": "constructor", "value": "a"}] * 2}),
            "turn 1: unknown 'from' 'constructor'",
        ),
        "rows.csv": ("prompt,completion\na\n", "expected 2 cells as in the first line, got 1"),
        "latin.csv": (list("prompt,completion\nä,b\n".encode("latin-1")), "is not UTF-8 text"),
        "wide.txt": (list("Rows".encode("utf-16")), "wide.txt is not UTF-8 text"),
        "rows.json": ("[]", "rows.json has no rows"),
        "keys.jsonl": (json.dumps({"key" * 99: 1}), "its keys are 'keykey"),
        "asks.jsonl": (row(400, 1) + "\n", "it has nothing to train on within 64 tokens"),
        "twice.jsonl": ('{"text": "a", "text": "b"}', "line 1: the key 'text' occurs twice"),
        "long.jsonl": (row(1, 3 << 17), "bytes, more than 1,572,864: split it into several rows"),
        "object.json": ('{"rows": []}', "object.json"),
    }
    dropped = [{"name": name, "text": text} for name, (text, _) in wrong.items()]
    found, _ = ask(browser, "page.html", user_task() | {"wrong": dropped})
    for (name, (_, told)), sentence in zip(wrong.items(), found["sentences"], strict=True):
        assert told in sentence, name
        assert sentence.count(". ") <= 1 and len(sentence) < 300, name
        assert "went wrong" not in sentence and "undefined" not in sentence, name
    assert found["figures"].startswith("Done")


def test_a_role_that_may_be_the_assistants_is_told(ask, site):
    manifest = json.loads((site / "site.json").read_text())
    manifest["text"]["template"] = BUILT_IN_TEMPLATES["chatml"]  # which writes any role
    turns = [{"role": role, "content": "Hello"} for role in ("Human", "AI")]
    task = user_task() | {"text": json.dumps({"messages": turns})}
    told = r"roles: 'AI', 'Human'\); rename the role that answers to 'assistant'"
    with pytest.raises(AssertionError, match=told):
        ask("firefox", "page.html", task, {"site.json": json.dumps(manifest).encode()})


def test_rows_that_are_too_long_are_counted(ask):
    found, _ = ask("firefox", "page.html", user_task(58, row(1, 400), row(400, 1)))
    assert "1 truncated, 1 without labels skipped" in found["rows"]


def test_more_rows_than_a_call_takes_arguments(ask):
    """In Chromium alone: Firefox takes half a million."""
    text = '{"text": "a b"}\n' * 150_000
    task = {"name": "many.jsonl", "text": text, "only": "data"}
    found, _ = ask("chromium", "page.html", task)
    assert found["rows"].startswith("many.jsonl: 149,936 rows to train on")


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("weights/000.bin", lambda content: content[:-512], "bytes instead of"),
        ("weights/000.bin", lambda content: content[:-4] + b"\1\2\3\4", "000.bin is damaged"),
        ("weights/000.bin", None, "weights/000.bin cannot be downloaded (404)"),
        ("plans/r16/variant.plan", lambda content: content[:-1] + b"\7", "variant.plan is damaged"),
        ("shaders.plan", lambda content: gzip.compress(b"[]"), "shaders.plan has 22 bytes"),
        ("site.json", lambda content: content[:-50], "site.json is damaged"),
        ("site.json", lambda content: content.replace(b'mat": 1', b'mat": 9'), "of format 9"),
    ],
)  # fmt: skip
def test_a_damaged_site_is_told(ask, site, name, change, told):
    content = None if change is None else change((site / name).read_bytes())
    with pytest.raises(AssertionError, match=told.replace("(", r"\(").replace(")", r"\)")):
        ask("firefox", "page.html", user_task(), {name: content})


@pytest.mark.parametrize(
    ("module", "told"),
    [("chart.mjs", "The page does not run"), ("memory.mjs", "The page's worker failed")],
)
@pytest.mark.parametrize("content", [b"const text = 'it's damaged';", None])
@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_damaged_module_is_told(ask, browser, content, module, told):
    with pytest.raises(AssertionError, match=told):
        ask(browser, "page.html", user_task(), {module: content})


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_any_static_server_will_do(ask, browser):
    """In a folder of its own, packed, and with types of its own."""
    types = {".mjs": "application/javascript", ".plan": "text/html", ".bin": "text/plain"}
    served = {"under": "people/me/", "packs": True, "types": types | {".json": "text/plain"}}
    found, _ = ask(browser, "page.html?under=people/me/", user_task(), served=served)
    assert found["figures"].startswith("Done")


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_server_that_knows_no_modules_is_told(ask, browser):
    with pytest.raises(AssertionError, match=r"does not run .* that knows \.mjs"):
        ask(browser, "page.html", user_task(), served={"types": {".mjs": "text/plain"}})


@pytest.mark.parametrize(
    ("browser", "remedy"), [("firefox", "about:config"), ("chromium", "flags")]
)
def test_no_webgpu_is_told_with_what_to_switch_on(ask, browser, remedy):
    with pytest.raises(AssertionError, match=remedy):
        ask(browser, "page.html", user_task(), webgpu=False)
