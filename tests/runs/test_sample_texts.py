"""Samples of a run: how many texts are generated before training."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.runs import prompts
from qlora_wgpu.runs.prompts import SamplePrompt, SampleTexts

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
