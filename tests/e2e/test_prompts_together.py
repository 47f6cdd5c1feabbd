"""Prompts that are computed beside others give, to the bit, what they give by themselves."""

from dataclasses import replace

import numpy as np
import pytest

from e2e.test_generation import opened
from e2e.tiny import write_model
from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.generation import Engine
from qlora_wgpu.generation.prefill import batch_size, largest_batch, prefill_batch, prompt_length
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.model.programs import DecodePrograms

SAMPLED = Sampling(1.2, top_k=20, top_p=0.95, seed=7, repetition_penalty=1.1)
LENGTHS = (33, 3, 31, 32, 9, 1, 20, 32, 17, 40, 45, 47, 2)


def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(1, 40, length).tolist() for length in LENGTHS]


def kept_bits(engine, text):
    """Keys and values of a text, as they lie on the device."""
    made = [program for each in engine._programs.values() for program in each.values()]
    bits = []
    for pair in engine._cache.layers:
        for tensor in pair:
            raw = np.frombuffer(made[0].hidden.read(tensor), np.uint8)
            rows = raw.reshape(engine.texts, engine.capacity, -1)
            bits.append(rows[text.slot, : len(text.prompt_ids)].copy())
    return bits


@pytest.mark.cover(case=["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "case", ["llama", "gemma3", "gpt_oss", "gemma3n", "gemma4", "llama-dynamic"]
)
def test_beside_others_as_alone(device, tmp_path, monkeypatch, case):
    """Keys, values and logits of each, whatever its batch: of one to eight, padded as they come."""
    model = opened(case, tmp_path, device, "bfloat16", "nf4")
    together_sizes, read = [], DecodePrograms.end_prompts

    def noted(program, texts, *others):
        together_sizes.append(len(texts))
        return read(program, texts, *others)

    monkeypatch.setattr(DecodePrograms, "end_prompts", noted)
    one, many = Engine(model, 1, 64), Engine(model, 13, 64)
    list(many.add([1, 2], max_new_tokens=1))
    beside = [many.add(ids, SAMPLED, max_new_tokens=4, logprobs=2) for ids in prompts()]
    many.step()
    assert max(together_sizes) == 8 and sum(together_sizes) == 14 and len(together_sizes) < 7
    for ids, text in zip(prompts(), beside, strict=True):
        alone = one.add(ids, SAMPLED, max_new_tokens=4, logprobs=2)
        one.step()
        for ours, theirs in zip(kept_bits(many, text), kept_bits(one, alone), strict=True):
            assert np.array_equal(ours, theirs)
        while not one.is_idle:
            one.step()
        assert alone.token_logprobs[0] == text.token_logprobs[0] and alone.ids[0] == text.ids[0]
        text.expected = alone.ids
    while not many.is_idle:
        many.step()
    assert [text.ids for text in beside] == [text.expected for text in beside]


@pytest.mark.full
def test_no_sum_is_cut_by_the_rows_that_there_are(device, tmp_path, monkeypatch):
    """GPUs cut long sums of few results into parts; here as many as rows leave room for."""
    monkeypatch.setattr(device, "profile", replace(GPU_PROFILE, least_workgroups=16))
    folder = write_model(tmp_path / "model", intermediate_size=2048, hidden_size=128)
    model = QLoRAModel.from_pretrained(folder, None, QuantConfig(scheme="none"), "float32", device)
    found = []
    for count in (1, 8):
        engine = Engine(model, 8, 64)
        list(engine.add([1], max_new_tokens=1))
        texts = [engine.add(ids, max_new_tokens=3, logprobs=2) for ids in prompts()[:count]]
        engine.step()
        found.append((kept_bits(engine, texts[0]), texts[0].token_logprobs))
    (alone, told), (beside, told_beside) = found
    assert told == told_beside
    assert all(np.array_equal(*each) for each in zip(alone, beside, strict=True))


def waiting(*lengths, logprobs=None):
    return [Request(None, [1] * n, Sampling(), 1, (), logprobs) for n in lengths]


@pytest.mark.quick
def test_who_is_computed_with_whom():
    def lengths(texts, capacity=2048):
        return [text.length for text in prefill_batch(texts, capacity)]

    assert lengths(waiting(3, 30, 60, 12)) == [3, 30]
    assert lengths(waiting(60, 30, 40, 64, 50, 3)) == [60, 40, 64, 50][:4]
    assert lengths(waiting(*[20] * 13)) == [20] * 8
    assert lengths(waiting(300, 300, 200)) == [300]
    assert lengths(waiting(200, 250, 256, 100)) == [200, 250]
    assert lengths([*waiting(9), *waiting(9, logprobs=0), *waiting(9)]) == [9, 9]
    assert [batch_size(n, 5) for n in (32, 96, 128, 192, 384, 4096)] == [4, 4, 4, 2, 1, 1]
    assert prompt_length(1, 1) == 2


@pytest.mark.quick
def test_the_largest_batch_is_planned():
    assert largest_batch(2000, 2048, 4) == (1, 2048)
    assert largest_batch(60, 128, 8) == (8, 64)
    assert largest_batch(60, 128, 1) == (1, 64)
    assert largest_batch(200, 300, 4) == (4, 128)
