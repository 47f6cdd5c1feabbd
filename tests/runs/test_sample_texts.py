"""Samples of a run: how many texts are generated before training."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs import prompts
from qlora_wgpu.runs.prompts import (
    SamplePrompt,
    SampleTexts,
    longest_sample,
    run_prompts,
    sample_prompts,
)

TOKENIZER = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)), eos_token_ids=[0])


@pytest.fixture
def clock(monkeypatch):
    """The time, which tests set."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(prompts, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(prompts, "_MAX_SECONDS", 9.0)
    return now


@pytest.mark.parametrize(
    ("each", "all_of_them", "written"),
    [(1.0, False, 3), (2.0, False, 2), (4.0, False, 1), (4.0, True, 3)],
)
def test_no_text_is_begun_after_a_third_of_the_time(clock, each, all_of_them, written):
    def write(ids, more, stop_ids, longest):
        clock.seconds += each
        return [*ids, 33]

    given = [SamplePrompt([65 + n], [97]) for n in range(3)]
    texts = SampleTexts(write, TOKENIZER, given, all_of_them=all_of_them)
    assert [sample.prompt for sample in texts.before()] == ["A", "B", "C"][:written]
    # Those of later evaluations are the same, and all of them, so that texts can be compared.
    clock.seconds += 100.0
    assert len(list(texts.write())) == written == len(texts.first)


@pytest.mark.parametrize(
    ("answer", "asked", "tokens"),
    [(0, None, 24), (8, None, 24), (9, None, 27), (53, None, 159), (54, None, 160), (9, 7, 7),
     (9, 0, 0)],
)  # fmt: skip
def test_a_text_may_be_three_times_the_datas(monkeypatch, answer, asked, tokens):
    monkeypatch.setattr(prompts, "_MAX_TOKENS", 160)
    assert SamplePrompt([1], [2] * answer, asked).new_tokens == tokens


def test_texts_have_room_for_the_longest():
    assert longest_sample([]) == 0
    given = [SamplePrompt([1] * 3, [], 9), SamplePrompt([1] * 5, [], 6)]
    assert longest_sample(given) == 12


@pytest.mark.parametrize(
    ("rows", "chosen"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (10, [0, 4, 9]), (11, [0, 5, 10])]
)
def test_prompts_are_of_the_beginning_the_middle_and_the_end(rows, chosen):
    data = Dataset([example([-100, 1, 1], first=row) for row in range(rows)])
    assert [each.ids[0] for each in sample_prompts(data)] == chosen


def example(labels, first=0):
    ids = np.arange(first, first + len(labels), dtype=np.int32)
    return Example(ids, np.array(labels, np.int32))


@pytest.mark.parametrize(
    ("labels", "length"),
    [
        ([-100] * 3 + [1] * 2, 3),
        ([-100] * 2 + [1], 2),
        ([-100, 1, 1, 1, 1, 1], 3),  # the beginning of a text is no prompt
        ([1] * 40, 16),
        ([1] * 30, 15),
        ([1], 1),
        ([-100] * 8, 4),
    ],
)
def test_a_prompt_ends_where_labels_begin(monkeypatch, labels, length):
    monkeypatch.setattr(prompts, "_MAX_TOKENS", 20)
    (prompt,) = sample_prompts(Dataset([example(labels)]))
    assert prompt.ids == list(range(length))
    assert prompt.answer == list(range(length, min(len(labels), length + 20)))


def run_prompts_of(own, max_new=None, *, limit=None, objective="sft", count=3):
    config = Config.model_validate({
        "model": {"path": "m"},
        "eval": {"sample_prompts": own, "sample_max_new_tokens": max_new},
    })  # fmt: skip
    if objective != "sft":
        config = SimpleNamespace(
            eval=config.eval, train=SimpleNamespace(objective=objective),
            grpo=SimpleNamespace(max_completion_length=5),
        )  # fmt: skip
    source = SimpleNamespace(
        pretrained=SimpleNamespace(config={"max_position_embeddings": limit}), images=None
    )
    template = SimpleNamespace(ids=lambda messages: [1] * len(messages[0]["content"]))
    data = Dataset([example([-100, -100, 1]) for _ in range(count)])
    return run_prompts(config, source, template, data)


def test_own_prompts_have_answers_of_their_own_length():
    assert [(p.ids, p.max_tokens) for p in run_prompts_of(["abc", "d"])] == [
        ([1] * 3, 64), ([1], 64)
    ]  # fmt: skip
    assert run_prompts_of(["abc"], 9, limit=12)[0].new_tokens == 9
    with pytest.raises(ConfigError, match="prompt 2 has 4 tokens; with the 9 of an answer"):
        run_prompts_of(["abc", "abcd"], 9, limit=12)
    assert [p.max_tokens for p in run_prompts_of([])] == [None] * 3
    assert [p.max_tokens for p in run_prompts_of([], 7)] == [7] * 3


def test_completions_of_a_policy_are_as_long_as_its_own(monkeypatch):
    monkeypatch.setattr(prompts, "_MAX_TOKENS", 160)
    assert run_prompts_of([], objective="grpo")[0].max_tokens == 5
    assert run_prompts_of([], 3, objective="grpo")[0].max_tokens == 3
    monkeypatch.setattr(prompts, "_MAX_TOKENS", 4)
    assert run_prompts_of([], objective="grpo")[0].max_tokens == 4
