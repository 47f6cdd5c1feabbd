"""What a model's ``generate`` says of its tokens, and what it refuses, without a model."""

from types import SimpleNamespace

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.errors import DataError
from qlora_wgpu.generation import model as module
from qlora_wgpu.generation.generate import Prompt, generate
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
