"""Which requests an engine prefills and decodes when: a model of which a token follows from all
before it, in slots that are as easily mixed up as a KV cache's."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError, DataError
from qlora_wgpu.generation import engine as module
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.ops.sampling import NONE

CAPACITY = 40


def following(tokens, version=0):
    return (sum(token * (place + 1) for place, token in enumerate(tokens)) + version) % 37 + 1


def expected(prompt, count, stop=(), version=0):
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        token = following(ids, version)
        if token in stop:
            break
        ids.append(token)
    return ids[len(prompt) :]


class Program:
    """A shape of batches; what it is asked for is kept by the model."""

    def __init__(self, model, rows, length, samples, keep_logits):
        self.model, self.rows, self.length = model, rows, length
        self.samples, self.kept = samples or rows, "kept" if keep_logits else None
        self.batch = SimpleNamespace(image_rows=None, angles=model.angles)
        self.hidden = SimpleNamespace(run=self._fill, run_preemptible=self._fill_in_turns)
        self.most_ahead = 4

    def write_prefill_inputs(self, prompts, places, images):
        assert len(prompts) <= self.rows and max(map(len, prompts)) <= self.length
        self.model.asked.append(("prefill", [len(prompt) for prompt in prompts]))
        self.inputs = list(zip(prompts, places, strict=True))

    def _fill(self):
        for prompt, place in self.inputs:
            self.model.cache[place] = list(prompt)

    def _fill_in_turns(self):
        for _ in range(3):
            self.model.now += 1.0
            yield
        self._fill()

    def end_prompts(self, prompts, rows, slots, choices):
        assert len(slots) <= self.samples
        for prompt, slot in zip(prompts, slots, strict=True):
            assert self.model.cache[slot][: len(prompt)] == prompt
        return [self.model.token(prompt) for prompt in prompts]

    def run(self, ids, past, places, choices, *, count, rotated):
        assert len(choices) == len(ids) == self.rows and ids.shape == (self.rows, 1)
        self.model.asked.append(("decode", self.rows, count))
        self.model.now += 0.01 * count
        tokens = [[] for _ in ids]
        for row in range(self.rows):
            slot, begin, token = int(places[row, 0]), int(past[row, 0]), int(ids[row, 0])
            if begin == CAPACITY:  # a row that nobody has
                continue
            assert len(self.model.cache[slot]) >= begin and rotated[row, 0] == begin
            for _ in range(count):
                self.model.cache[slot] = [*self.model.cache[slot][:begin], token]
                token, begin = self.model.token(self.model.cache[slot]), begin + 1
                tokens[row].append(token)
        return tokens

    def logits(self):
        return np.zeros((self.rows, 50), np.float32)


class Model:
    """What an engine asks of a model."""

    def __init__(self):
        self.cache, self.asked, self.now, self.parameters_version = {}, [], 0.0, 0
        self.angles, self.broken = [], False
        self.architecture = SimpleNamespace(vocab_size=50)
        self.device = SimpleNamespace(in_turn=nullcontext(), budget=None)
        self.layout = None
        self.programs = self

    def checked_ids(self, ids):
        return ids

    def token(self, tokens):
        return NONE if self.broken else following(tokens, self.parameters_version)

    def tokens(self, rows, length, cache, seen, *, samples, keep_logits, with_images):
        self.asked.append(("program", rows, length > 1, samples))
        return Program(self, rows, length, samples, keep_logits)

    def copies(self, cache):
        return SimpleNamespace(run=self._copy)

    def _copy(self, source, tokens, others):
        self.asked.append(("copy", tokens, len(others)))
        for place in others:
            self.cache[place] = self.cache[source][:tokens]

    def count(self, what):
        return [each[1:] for each in self.asked if each[0] == what]


@pytest.fixture
def made(monkeypatch):
    def engine(texts, *, states=()):
        model = Model()
        cache = SimpleNamespace(capacity=CAPACITY, texts=texts, layers=[1], states=states)
        monkeypatch.setattr(module, "are_copied", lambda layout, budget: False)
        monkeypatch.setattr(module, "fitting_sequences", lambda *given: texts)
        monkeypatch.setattr(module, "KVCache", lambda *given, **named: cache)
        monkeypatch.setattr(module, "make_seen", lambda *given: None)
        clock = SimpleNamespace(perf_counter=lambda: model.now)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr("qlora_wgpu.generation.prefill.time", clock)
        return Engine(model, texts, CAPACITY), model

    return engine


def finish(engine):
    for _ in range(1000):
        if engine.is_idle:
            return
        engine.step()
    raise AssertionError("it hangs")


PROMPTS = [[3], [5, 1], [7] * 20, [1, 2, 3, 4], [9, 9], [2] * 33, [5, 1]]


@pytest.mark.parametrize("states", [(), ("a state",)])
@pytest.mark.parametrize("texts", [1, 2, 3, 8])
def test_every_request_gets_its_own_tokens(made, texts, states):
    engine, model = made(texts, states=states)
    added = [engine.add(prompt, max_new_tokens=9) for prompt in PROMPTS]
    finish(engine)
    for prompt, text in zip(PROMPTS, added, strict=True):
        count = min(9, CAPACITY - len(prompt))
        assert text.ids == expected(prompt, count) and text.finish_reason == "length"
    assert sorted(engine._free) == list(range(texts)) and model.count("decode")
    assert max(rows for rows, _ in model.count("decode")) <= texts
    if states:
        assert all(len(lengths) == 1 for (lengths,) in model.count("prefill"))


def test_requests_with_one_prompt_are_prefilled_once(made):
    engine, model = made(4)
    added = [engine.add([4, 5, 6], max_new_tokens=3) for _ in range(4)]
    finish(engine)
    assert model.count("prefill") == [([3],)] and model.count("copy") == [(3, 3)]
    assert model.count("program")[0] == (1, True, 4)  # whose tokens are sampled at once
    assert all(text.ids == expected([4, 5, 6], 3) for text in added)


def test_prompts_of_about_one_length_are_prefilled_together(made):
    engine, model = made(4)
    added = [engine.add([number, 1], max_new_tokens=2) for number in range(1, 5)]
    finish(engine)
    assert model.count("prefill") == [([2, 2, 2, 2],)] and not model.count("copy")
    assert model.count("program") == [(4, True, 0), (4, False, 0)]
    assert [text.ids for text in added] == [expected([n, 1], 2) for n in range(1, 5)]


def test_what_stops_a_request_frees_its_slot(made):
    engine, _ = made(1)
    tokens = expected([3], 9)
    first = engine.add([3], max_new_tokens=9, stop_ids=[tokens[4]])
    second = engine.add([5], max_new_tokens=2)
    third = engine.add([5], max_new_tokens=0)
    finish(engine)
    end = tokens.index(tokens[4])
    assert first.ids == tokens[:end] and first.finish_reason == "stop"
    assert second.ids == expected([5], 2) and third.ids == [] and third.finish_reason == "length"


def test_several_steps_are_submitted_at_once_where_they_are_short(made):
    engine, model = made(2)
    text = engine.add([3], max_new_tokens=20)
    finish(engine)
    counts = [count for _, count in model.count("decode")]
    assert text.ids == expected([3], 20) and counts[0] == 1 and max(counts) == 4
    assert sum(counts) >= 19 and len(counts) <= 8
    engine._seconds = 1.0  # longer steps are read back each
    engine.add([4], max_new_tokens=3)
    engine.step()
    engine.step()
    assert model.count("decode")[-1] == (1, 1)


def test_log_probabilities_are_those_of_each_token(made):
    engine, model = made(2)
    noted, plain = (engine.add([3], max_new_tokens=5, logprobs=n) for n in (2, None))
    finish(engine)
    assert noted.ids == plain.ids == expected([3], 5)
    assert len(noted.token_logprobs) == 5 and not plain.token_logprobs
    assert {count for _, count in model.count("decode")} == {1}  # only the last logits are kept


def test_another_adapter_begins_anew_with_what_was_written(made):
    engine, model = made(2)
    texts = [engine.add(prompt, max_new_tokens=8) for prompt in ([3], [5, 1])]
    while len(texts[0].ids) < 3:
        engine.step()
    before = [list(text.ids) for text in texts]
    model.parameters_version = 7
    finish(engine)
    assert len(model.count("prefill")) >= 2
    for text, own in zip(texts, before, strict=True):
        assert text.ids[: len(own)] == own
        assert text.ids == own + expected(text.prompt_ids + own, 8 - len(own), version=7)
    count = len(model.count("prefill"))
    engine.add([3], max_new_tokens=3)
    finish(engine)
    assert len(model.count("prefill")) == count + 1


@pytest.mark.parametrize("same", [True, False])
def test_angles_that_depend_on_the_length_are_computed_anew(made, same):
    engine, model = made(1)

    class Angles:
        def is_same(self, now, then):
            return same or now == then

    model.angles = [Angles()]
    text = engine.add([3], max_new_tokens=6)
    finish(engine)
    assert text.ids == expected([3], 6)
    assert (len(model.count("prefill")) > 1) != same


def test_cancelled_requests_leave_others_alone(made):
    engine, _ = made(2)
    texts = [engine.add([number], max_new_tokens=9) for number in (3, 4, 5)]
    engine.step()
    texts[0].cancel()
    texts[2].cancel()
    finish(engine)
    assert texts[1].ids == expected([4], 9) and not texts[2].ids
    assert [text.finish_reason for text in texts] == ["cancelled", "length", "cancelled"]
    assert sorted(engine._free) == [0, 1]


def test_clients_take_turns(made):
    engine, _ = made(1)
    began = []
    many = [engine.add([3, number], max_new_tokens=1, number=number) for number in range(3)]
    engine.step()
    other = engine.add([4], max_new_tokens=1)
    while not engine.is_idle:
        began += engine.step()
    assert began[0] is other or began.index(other) < began.index(many[2])


def test_a_long_prefill_is_interrupted_by_tokens_of_others(made, monkeypatch):
    monkeypatch.setattr(module, "_AHEAD_SECONDS", 0.0)
    engine, model = made(2)
    first = engine.add([3], max_new_tokens=12)
    engine.step()
    second = engine.add([5] * 30, max_new_tokens=4)
    engine.step()
    assert len(first.ids) == 2 and not second.ids and model.now < 1.5
    finish(engine)
    assert first.ids == expected([3], 12) and second.ids == expected([5] * 30, 4)
    assert model.count("prefill") == [([1],), ([30],)]


def test_a_prefill_whose_prompts_have_left_is_not_continued(made, monkeypatch):
    monkeypatch.setattr(module, "_AHEAD_SECONDS", 0.0)
    engine, model = made(3)
    engine.add([3], max_new_tokens=30)
    engine.step()
    second = engine.add([5] * 30, max_new_tokens=4)
    engine.step()
    second.cancel()
    third = engine.add([6] * 5, max_new_tokens=4)
    engine.step()
    assert model.count("prefill") == [([1],), ([30],), ([5],)] and not second.ids
    finish(engine)
    assert third.ids == expected([6] * 5, 4)


def test_logits_that_are_not_finite(made):
    engine, model = made(2)
    texts = [engine.add([3], max_new_tokens=5), engine.add([4, 4], max_new_tokens=5)]
    engine.step()
    model.broken = True
    with pytest.raises(CheckpointError, match="the model's logits are not finite"):
        finish(engine)
    assert {text.finish_reason for text in texts} == {"cancelled"}


@pytest.mark.parametrize(("ids", "new", "says"), [
    ([], 3, "the prompt is empty"), ([1] * CAPACITY, 3, "has 40 tokens, the maximum"),
])  # fmt: skip
def test_prompts_without_room(made, ids, new, says):
    engine, _ = made(1)
    with pytest.raises(DataError, match=says):
        engine.add(ids, Sampling(), max_new_tokens=new)
    assert engine.add([1] * CAPACITY, max_new_tokens=0).finish_reason == "length"
    assert engine.is_idle
