"""Requests with the same prompt are prefilled once, with the results of separate ones."""

from dataclasses import replace

import numpy as np
import pytest

from e2e.test_generation import opened
from e2e.test_prompts_together import kept_bits
from qlora_wgpu.generation import Engine
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.model.programs import DecodePrograms

SAMPLED = Sampling(1.2, top_k=20, top_p=0.95, seed=7, repetition_penalty=1.1)
PROMPTS = [[5, 6, 7] * 4, [9, 1, 4]]


@pytest.fixture
def prefilled(monkeypatch):
    """The prompts of each prefill."""
    prompts, write = [], DecodePrograms.write_prefill_inputs

    def noted(program, batch, *rest):
        prompts.append(batch)
        return write(program, batch, *rest)

    monkeypatch.setattr(DecodePrograms, "write_prefill_inputs", noted)
    return prompts


@pytest.mark.cover(case=["llama", "qwen3_5"])
@pytest.mark.parametrize("case", ["llama", "gpt_oss", "qwen3_5", "lfm2", "gemma3n", "gemma4"])
def test_shared_prompts_have_the_results_of_separate_ones(device, tmp_path, prefilled, case):
    model = opened(case, tmp_path, device, "bfloat16", "nf4")
    one, many = Engine(model, 1, 40), Engine(model, 13, 40)
    samplings = [replace(SAMPLED, seed=n) for n in range(11)]
    shared = [many.add(PROMPTS[n == 4], own, max_new_tokens=4) for n, own in enumerate(samplings)]
    while any(not text.ids for text in shared):
        many.step()
    assert sorted(prompt for batch in prefilled for prompt in batch) == PROMPTS
    bits = [kept_bits(many, text) for text in shared]
    while not many.is_idle:
        many.step()
    assert len({tuple(text.ids) for text in shared}) > 5
    for number in (0, 1, 4, 10):
        alone = one.add(shared[number].prompt_ids, samplings[number], max_new_tokens=4)
        one.step()
        for ours, theirs in zip(bits[number], kept_bits(one, alone), strict=True):
            assert np.array_equal(ours, theirs)
        assert (number, list(alone)) == (number, shared[number].ids)


def test_logits_are_shared(device, tmp_path, prefilled):
    model = opened("llama", tmp_path, device, "bfloat16", "nf4")
    engine = Engine(model, 9, 40)
    texts = [engine.add(PROMPTS[0], max_new_tokens=2, logprobs=2) for _ in range(9)]
    other = engine.add(PROMPTS[0], max_new_tokens=2)
    while not engine.is_idle:
        engine.step()
    assert len(prefilled) == 2  # the last one without log probabilities
    assert all(text.token_logprobs == texts[0].token_logprobs for text in texts)
    assert all(text.ids == other.ids for text in texts)


def test_a_cancelled_request_leaves_the_prompt_to_others(device, tmp_path, prefilled, monkeypatch):
    """Prefill pauses while another request decodes."""
    monkeypatch.setattr("qlora_wgpu.generation.engine._PREFILL_SECONDS", 0.0)
    model = opened("llama", tmp_path, device, "bfloat16", "nf4")
    engine = Engine(model, 4, 40)
    expected = list(engine.add(PROMPTS[0], max_new_tokens=3))
    list(engine.add([1], max_new_tokens=1))  # so that its program has run before
    decoding = engine.add([1], max_new_tokens=30)
    engine.step()
    first, second = (engine.add(PROMPTS[0], max_new_tokens=3) for _ in range(2))
    engine.step()
    assert not first.ids and not second.ids
    first.cancel()
    assert list(second) == expected and not first.ids
    decoding.cancel()
    assert len(prefilled) == 4
