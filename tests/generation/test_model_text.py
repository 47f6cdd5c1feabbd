"""What a model's ``generate`` says of its tokens, and what it refuses, without a model."""

from types import SimpleNamespace

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.generation import model as module
from qlora_wgpu.generation.generate import Prompt, generate, token_ids
from qlora_wgpu.generation.model import QLoRAModel
from qlora_wgpu.generation.plans import batch_sizes


def test_nothing_is_generated_behind_what_stops_a_text():
    tokenizer = tiny_tokenizer()
    ids = iter(tokenizer.encode("one. two. three", add_special_tokens=False))
    model = SimpleNamespace(tokenizer=tokenizer)
    prompt = Prompt((), stop=(". t",))
    assert "".join(QLoRAModel._text(model, ids, prompt)) == "one"
    assert tokenizer.decode(list(ids)) == "wo. three"


def test_a_prompt_leaves_room_for_a_token():
    for ids in ([1, 2, 3], [1, 2, 3, 4]):
        with pytest.raises(DataError, match=f"has {len(ids)} tokens, the model.s maximum is 3"):
            next(generate(None, ids, max_new_tokens=5, max_length=3))
    with pytest.raises(DataError, match="the prompt is empty"):
        next(generate(None, [], max_new_tokens=5))
    assert list(generate(None, [1, 2], max_new_tokens=0, max_length=3)) == []


def test_a_model_generates_no_more_than_there_is_room_for(monkeypatch):
    asked = []

    class Text(list):
        def cancel(self):
            asked.append("cancelled")

    engine = SimpleNamespace(add=lambda ids, sampling, *, max_new_tokens, stop_ids, images: (
        asked.append(max_new_tokens), Text([7])
    )[1])  # fmt: skip
    for most, limit, count in ((5, 4, 2), (5, 100, 5), (5, None, 5)):
        given = generate(None, [1, 2], max_new_tokens=most, max_length=limit, engine=engine)
        assert list(given) == [7] and asked == [count, "cancelled"]
        asked.clear()


def test_prompts_are_read_once_of_each_folder(monkeypatch):
    read = []

    def folder_says(folder):
        read.append(folder)
        return f"prompts of {folder}"

    monkeypatch.setattr(module, "read_prompt_files", folder_says)
    model = SimpleNamespace(
        adapters={"one": SimpleNamespace(path=None), "two": SimpleNamespace(path="run")},
        active_adapter="one", prompt_folder="base", read_prompts=folder_says,
    )  # fmt: skip
    model._prompts = QLoRAModel._prompts.func(model)
    for name, folder in (("one", "base"), ("two", "run"), ("one", "base"), ("two", "run")):
        model.active_adapter = name
        assert QLoRAModel.prompts.fget(model) == f"prompts of {folder}"
    assert read == ["base", "run"]


def test_texts_grow_in_batches_of_few_sizes():
    assert {n: batch_sizes(n) for n in (1, 2, 3, 4, 5, 9)} == {
        1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 5: [1, 2, 4, 5], 9: [1, 2, 4, 8, 9]
    }  # fmt: skip


def generating(monkeypatch):
    """A model that notes what is generated of."""
    made = []

    def complete(prompts, max_new_tokens, batch, sampling):
        made.append((prompts, max_new_tokens, batch, sampling.temperature))
        return ["a text"] * len(prompts)

    monkeypatch.setattr(module, "generate", lambda model, ids, **how: iter([7, 8]))
    model = SimpleNamespace(
        _prompt=lambda prompt, template, stop: SimpleNamespace(
            ids=prompt, stop_ids=stop, images=(), has_text=isinstance(prompt, str)
        ),
        _complete=complete, _text=lambda tokens, prompt: (f"<{token}>" for token in tokens),
        max_length=9,
    )  # fmt: skip
    return model, made


@pytest.mark.parametrize(("prompt", "stream", "answer"), [
    ("text", False, "<7><8>"), ("text", True, ["<7>", "<8>"]), ([1, 2], False, [7, 8]),
    ([1, 2], True, [7, 8]), ([{"role": "user"}], False, [7, 8]),
    (["a", "b"], False, ["a text"] * 2),
    ([[1], [2]], False, ["a text"] * 2), ([], False, [7, 8]), (["a", 1], False, [7, 8]),
])  # fmt: skip
def test_one_prompt_is_told_from_several(monkeypatch, prompt, stream, answer):
    model, made = generating(monkeypatch)
    found = QLoRAModel.generate(model, prompt, stream=stream, temperature=0.5)
    assert (found if isinstance(found, str) else list(found)) == answer
    assert [len(prompts) for prompts, *_ in made] == [2] * (answer == ["a text"] * 2)
    assert all(temperature == 0.5 for *_, temperature in made)


@pytest.mark.parametrize(("prompt", "how", "says"), [
    (b"a", {}, "got bytes"), ({"a": 1}, {}, "got dict"), (3, {}, "got int"),
    (["a", "b"], {"stream": True}, "stream=True takes one prompt, got a list"),
    ("a", {"stop_ids": "ab"}, "stop_ids must be"),
    ("a", {"max_tokens": 3}, "unknown option max_tok"),
])  # fmt: skip
def test_what_is_no_prompt(monkeypatch, prompt, how, says):
    with pytest.raises(ConfigError, match=says):
        QLoRAModel.generate(generating(monkeypatch)[0], prompt, **how)


def test_token_ids_are_integers():
    assert token_ids(iter([1, True])) == [1, 1]
    for ids in ([1.0], ["a"], [None]):
        with pytest.raises(ConfigError, match="prompt_ids must be token ids"):
            token_ids(ids)
