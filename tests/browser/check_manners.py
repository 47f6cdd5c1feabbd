"""What the page asks of people, and what it spares them."""

import json

import pytest
from browser.check_mistakes import row
from browser.conftest import user_task

BROWSERS = pytest.mark.parametrize("browser", ["firefox", "chromium"])


@BROWSERS
def test_the_page_is_kind(browser, ask):
    task = user_task() | {
        "name": "rows" * 50 + ".jsonl",
        "odd": [["epochs", "1e12"], ["rate", ""], ["rate", "2"]],
        "dropped": [{"name": f"{n}.jsonl", "text": row(3, 3)} for n in ("a", "b")],
    }
    found, _ = ask(browser, "page.html", task)
    rate = "The learning rate must be between 0 and 1."
    files = "Expected one file, got 2: put all rows into one file."
    busy = "The page is busy: drop a.jsonl again when it has finished."
    # Of an error in another's script nothing is told: the page runs.
    steps = (
        "Training would take 4,000,000,000,000 steps, more than 1,000,000,000: set fewer epochs."
    )
    assert found["sentences"] == ["nothing is told", steps, rate, rate, files, busy]
    # A text that is dragged into a field stays the field's, and so does the end of a composed word.
    assert found["texts"] and found["composes"]
    # A name without a space is broken, and the page is no wider for it.
    assert not found["wide"]
    # From what was switched off the keyboard goes to what is next, or to what stops it.
    assert found["places"] == ["file", "stop"]
    # The same file can be chosen again, since the field forgets it.
    assert found["left"] == 0
    # The screen stays on while it trains, and no longer.
    assert found["screen"] == ["screen", "released"]
    # A screen reader waits for an answer and for the reading of a file, and says who speaks.
    assert found["busy"][0] == "true" and found["busy"][-1] == "false"
    assert found["reading"] == ["true", "false"]
    assert found["speakers"] == [["You", True], ["The model", True]]


@BROWSERS
def test_the_first_question_may_be_too_long_for_a_sample(browser, ask):
    task = user_task(58)
    lines = [row(400, 1), *task["text"].splitlines()]
    found, _ = ask(browser, "page.html", task | {"text": "\n".join(lines) + "\n"})
    assert "1 without labels skipped" in found["rows"]
    assert found["figures"].startswith("Done") and found["before"] and found["after"]


def test_steps_count_in_place_of_passes(ask, site):
    manifest = json.loads((site / "site.json").read_text())
    manifest["training"]["max_steps"] = 3
    over = {"site.json": json.dumps(manifest).encode()}
    found, _ = ask("firefox", "page.html", user_task(), over)
    assert found["figures"].startswith("Done, 3 steps.") and not found["asks"]


@pytest.mark.parametrize(("packing", "length"), [(False, 32), (True, 64)])
def test_memory_is_told_for_the_rows_that_are_trained(ask, site, packing, length):
    manifest = json.loads((site / "site.json").read_text())
    manifest["training"]["packing"] = packing
    over = {"site.json": json.dumps(manifest).encode()}
    task = user_task() | {"text": row(3, 3) + "\n" + row(4, 4) + "\n" + row(5, 5), "only": "data"}
    found, _ = ask("firefox", "page.html", task, over)
    assert f"(rows of {length} tokens)" in found["memory"]


def test_training_that_would_learn_nothing_is_told(ask):
    """A single step has a learning rate of 0, if there is a warm-up."""
    task = user_task(4) | {"tolerates": "there is only one step"}
    found, _ = ask("firefox", "page.html", task)
    assert found["told"] == [
        "The model does not change: warm-up starts with a learning rate of 0, and there is only "
        "one step. Set more epochs, or use more rows."
    ]
    assert found["figures"].startswith("Done, 1 step.")


def test_what_a_text_file_holds_is_told(ask, site):
    """It is one text, and a model may not know all that stands there."""
    manifest = json.loads((site / "site.json").read_text())
    manifest["text"]["special_tokens"]["unk_token"] = "<|pad|>"  # the demo's model knows all bytes
    over = {"site.json": json.dumps(manifest).encode()}
    task = {"name": "rows.txt", "text": "Ben <|pad|> went <|pad|> home.", "only": "data"}
    found, _ = ask("firefox", "page.html", task, over)
    assert found["rows"].startswith("rows.txt: one document in 1 piece to train on (")
    assert " 2 tokens in 1 of 1 rows are <|pad|>: the model cannot represent" in found["rows"]


def test_what_a_chat_template_lacks_is_told(ask, site):
    manifest = json.loads((site / "site.json").read_text())
    manifest["text"]["template"] = (
        "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    over = {"site.json": json.dumps(manifest).encode()}
    turns = {"system": "Be short.", "user": "Who?", "assistant": "Ben."}
    messages = [{"role": role, "content": text} for role, text in turns.items()]
    task = {"name": "a.jsonl", "text": json.dumps({"messages": messages}), "only": "data"}
    found, _ = ask("firefox", "page.html", task, over)
    assert (
        "The loss is taken on no end-of-turn token, so the model will not learn when to"
        in found["rows"]
    )
    assert " leaves the system message out of 1 row." in found["rows"]
    whole, _ = ask("firefox", "page.html", user_task() | {"only": "data"})
    assert "is taken on no end-of-turn token" not in whole["rows"]
