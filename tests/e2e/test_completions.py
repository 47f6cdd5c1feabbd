"""Files of prompts completed several at a time, and answers compared with the data's."""

import json

import pytest
from support.commands import run_here

from e2e.tiny import write_chats, write_model
from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import PromptFormat, read_prompt_files
from qlora_wgpu.errors import DataError
from qlora_wgpu.generation.generate import Prompt, complete
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.generation.text import TextStream
from qlora_wgpu.runs.evaluation import Prediction, eval_prompts
from qlora_wgpu.runs.prompts import prompts_of

ROWS = [
    {"prompt": "what is 1?", "number": 7},
    {"messages": [{"role": "user", "content": "what is this?"}]},
    {"text": "the quick brown"},
    {
        "prompt": "what is this?",
        "note": "\x7f\u202e\ufeff, which no terminal obeys",
    },
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completions")
    write_model(folder / "model")
    write_chats(folder / "eval.jsonl", 4, seed=1)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "run.yaml").write_text(
        "model: {path: model}\ndata: {train: eval.jsonl, eval: eval.jsonl, max_seq_length: 256, "
        "cache: false, chat_template: chatml}\noutput: {dir: out}\n"
    )
    return folder


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_file_of_prompts(place):
    args = ("generate", "--model", "model", "--max-new-tokens", 3, "--chat-template", "chatml")
    done = run_here(*args, "--chat", "--prompts", "rows.jsonl", "--batch", 2, cwd=place)
    assert done.returncode == 0, done.stderr
    rows = lines(done.stdout)
    assert [{k: row[k] for k in own} for row, own in zip(rows, ROWS, strict=True)] == ROWS
    assert all(row["finish_reason"] == "length" for row in rows) and any(
        r["completion"] for r in rows
    )
    one = run_here(*args, "--chat", "--prompts", "rows.jsonl", "--batch", 1, cwd=place)
    assert one.stdout == done.stdout
    for wrong, told in (((), "either --prompt"), (("--prompts", "gone.jsonl"), "gone.jsonl")):
        refused = run_here(*args, *wrong, cwd=place)
        assert refused.returncode == 2 and told in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_answers_are_compared(place):
    args = ("eval", "run.yaml", "--json", "--max-new-tokens", 4)
    done = run_here(*args, "--predictions", "out.jsonl", cwd=place)
    assert done.returncode == 0, done.stderr
    rows = lines((place / "out.jsonl").read_text())
    assert len(rows) == 4
    assert all(set(row) == {"prompt", "reference", "prediction", "exact_match"} for row in rows)
    assert json.loads(done.stdout)["base"]["exact_match"] == 0.0
    assert all("what is" in row["prompt"] and row["reference"] for row in rows)


@pytest.mark.quick
def test_a_place_for_answers_is_looked_at_before_they_are_written(place):
    (place / "folder").mkdir()
    for name, told in (
        ("none/out.jsonl", "the folder none does not exist"),
        ("folder", "must be a file name"),
    ):
        done = run_here("eval", "run.yaml", "--predictions", name, cwd=place)
        assert (done.returncode, done.stdout) == (2, "") and told in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.quick
def test_what_counts_as_a_match():
    assert Prediction("p", " a b\n", "a b").exact_match
    assert not Prediction("p", "a b", "a  b").exact_match


@pytest.mark.quick
def test_rows_that_are_no_prompts_are_refused(place):
    written = PromptFormat.text(read_prompt_files(place / "model").tokenizer)
    for row in ({"question": "?"}, {"prompt": 3}, {"messages": []}, {"messages": [{"role": "a"}]}):
        with pytest.raises(DataError, match=r"^row 1: a row must be"):
            prompts_of([("row 1", row)], written, answered=True)
    with pytest.raises(DataError, match="no message before the answer"):
        answer = {"messages": [{"role": "assistant", "content": "x"}]}
        prompts_of([("row 1", answer)], written, answered=True)
    with pytest.raises(DataError, match=r"^row 1: the row has images, but the model reads none"):
        prompts_of([("row 1", {"prompt": "?", "images": ["a.png"]})], written, answered=True)


@pytest.mark.quick
@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_a_row_s_system_message_comes_first(place, key):
    written = read_prompt_files(place / "model")
    asked = [{"role": "user", "content": "a b"}]
    said = [{"role": "system", "content": "c d"}, *asked]
    rows = [{key: asked, "system": "c d"}, {key: said}, {key: said, "system": "e"}, {key: asked}]
    ids = [prompts_of([("row", row)], written, answered=True)[0][0].ids for row in rows]
    assert ids[0] == ids[1] == ids[2] != ids[3]


@pytest.mark.quick
@pytest.mark.parametrize("answered", [True, False])
def test_a_prompt_that_is_too_long_is_told_with_its_row(place, answered):
    written = read_prompt_files(place / "model")
    with pytest.raises(DataError, match=r"^row 1: the prompt has 2,097,\d+ bytes of text"):
        prompts_of([("row 1", {"prompt": "x" * (2 << 20)})], written, answered=answered)


@pytest.mark.quick
def test_rows_without_prompts_have_no_questions():
    with pytest.raises(DataError, match="no held-out row has a prompt"):
        eval_prompts([])


def test_completions_stop_at_strings_and_have_seeds_of_their_own(place, device):
    model = QLoRAModel.from_pretrained(place / "model", quant=QuantConfig(), device=device)
    ids = model.tokenizer.encode("the quick", False)
    how = {"max_new_tokens": 12, "sampling": Sampling(1.0, seed=3)}
    same = [Prompt(ids)] * 3
    first, second, third = complete(model, model.tokenizer, same, batch=2, **how)
    assert len({first.text, second.text, third.text}) == 3
    stop = second.text[4:7]
    prompts = [Prompt(ids), Prompt(ids, stop=[stop]), Prompt(ids)]
    again = list(complete(model, model.tokenizer, prompts, batch=3, **how))
    assert again[0] == first and again[2] == third
    assert again[1].text == second.text.partition(stop)[0]
    assert again[1].finish_reason == "stop"
    with pytest.raises(DataError, match="prompt 2: the prompt is empty"):
        list(complete(model, model.tokenizer, [Prompt(ids), Prompt([])], **how))


@pytest.mark.quick
def test_the_earliest_of_several_strings_ends_a_text(place):
    tokenizer = read_prompt_files(place / "model").tokenizer
    stream = TextStream(tokenizer, ["brown", "", "quick"])
    shown = ""
    for token in tokenizer.encode("the quick brown fox", False):
        shown += stream.push(token)
        if stream.stopped:
            break
    assert stream.stopped and shown + stream.rest() == stream.text == "the "
