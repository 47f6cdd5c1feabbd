"""Texts that grow go on while another one's prompt is computed, and neither knows of the other."""

import numpy as np
import pytest

from e2e.test_generation import opened
from qlora_wgpu.generation import Engine
from qlora_wgpu.generation import engine as engine_module
from qlora_wgpu.generation.sampling import Sampling

SAMPLED = Sampling(1.2, top_k=20, seed=7, repetition_penalty=1.1)
SHORT, LONG = [5, 6, 7], [7, 1, 9, 30, 12] * 7


def alone(model, ids, count):
    return list(Engine(model, 1, 80).add(ids, SAMPLED, max_new_tokens=count))


@pytest.fixture
def begun(device, tmp_path, monkeypatch):
    """A text that grows in an engine, and another one whose prompt has begun and pauses."""
    monkeypatch.setattr(engine_module, "_PREFILL_SECONDS", 0.0)
    monkeypatch.setattr(engine_module, "_AHEAD_SECONDS", 0.0)

    def begin(case):
        model = opened(case, tmp_path, device, "bfloat16", "nf4")
        expected = alone(model, SHORT, 20), alone(model, LONG, 6)
        engine = Engine(model, 3, 80)
        engine.add(LONG, max_new_tokens=1)  # programs are there, and have been measured
        engine.step()
        growing = engine.add(SHORT, SAMPLED, max_new_tokens=20)
        engine.step()
        coming = engine.add(LONG, SAMPLED, max_new_tokens=6)
        engine.step()
        return model, engine, growing, coming, expected

    return begin


def finish(engine):
    while not engine.is_idle:
        engine.step()


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_oss"])
def test_texts_go_on_while_a_prompt_is_computed(begun, case):
    _, engine, growing, coming, expected = begun(case)
    before, turns = len(growing.ids), 0
    while not coming.ids:
        assert engine.step()[0] is growing
        turns += 1
    assert turns >= 2 and len(growing.ids) == before + turns
    finish(engine)
    assert (growing.ids, coming.ids) == expected


def test_another_program_in_between(begun):
    """It has the same memory for what it computes: the prompt is computed anew."""
    model, engine, growing, coming, expected = begun("llama")
    model.logits(np.array([LONG[::-1]]))
    finish(engine)
    assert (growing.ids, coming.ids) == expected


def test_another_adapter_in_between(begun):
    model, engine, _, coming, expected = begun("llama")
    model.write_parameters(9 * model.read_flat(model.adapter.parameters))
    finish(engine)
    assert coming.ids == alone(model, LONG, 6) != expected[1]


def test_who_is_cancelled_in_between_leaves_room(begun):
    _, engine, growing, coming, expected = begun("llama")
    coming.cancel()
    others = [engine.add(LONG, SAMPLED, max_new_tokens=6) for _ in range(2)]
    finish(engine)
    assert coming.ids == [] and coming.finish_reason == "cancelled"
    assert growing.ids == expected[0] and [text.ids for text in others] == [expected[1]] * 2


def test_states_are_whole_at_a_prompts_end(begun):
    """A layer that keeps states is not interrupted: spare rows would write where they are."""
    _, engine, growing, coming, expected = begun("lfm2")
    assert coming.ids
    finish(engine)
    assert (growing.ids, coming.ids) == expected
