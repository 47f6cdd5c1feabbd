"""Texts that grow together are, to the bit, those that grow alone."""

import numpy as np
import pytest

from e2e.test_generation import opened
from qlora_wgpu.errors import CheckpointError, DataError, OutOfMemoryError, ShapeError
from qlora_wgpu.generation import Engine, generate
from qlora_wgpu.generation import engine as engine_module
from qlora_wgpu.generation.plans import batch_sizes
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.model.derived_weights import CopySizes, packed_sizes
from qlora_wgpu.model.programs import DecodePrograms
from qlora_wgpu.ops.sampling import DECODE_STEPS_AHEAD

PROMPTS = [[5, 6, 7], [9, 1, 4, 4, 2, 8, 30, 12, 3], [11], [7] * 14, [3, 2], [30, 31, 32, 33]]
SAMPLED = Sampling(1.2, top_k=20, top_p=0.95, seed=7, repetition_penalty=1.1)


def written(engine, prompts, sampling=None, count=9):
    texts = [engine.add(ids, sampling, max_new_tokens=count + i) for i, ids in enumerate(prompts)]
    while not engine.is_idle:
        engine.step()
    assert all(text.finish_reason == "length" for text in texts)
    return [text.ids for text in texts]


@pytest.mark.cover(case=["llama"])
@pytest.mark.parametrize(
    "case", ["llama", "gemma3", "lfm2", "qwen3_5", "gemma3n", "gemma4", "qwen3_moe-experts"]
)
def test_together_as_alone(device, tmp_path, case):
    """Six texts of unlike lengths, three at a time: each that ends makes room for another."""
    model = opened(case, tmp_path, device, "bfloat16", "nf4")
    alone = [
        list(generate(model, ids, max_new_tokens=9 + i, temperature=1.2, top_k=20, top_p=0.95,
                      seed=7, repetition_penalty=1.1))
        for i, ids in enumerate(PROMPTS)
    ]  # fmt: skip
    assert written(Engine(model, 3, 40), PROMPTS, SAMPLED) == alone
    assert written(Engine(model, 5, 32), PROMPTS[::-1], SAMPLED, 9)[0] != alone[0]


@pytest.mark.full
def test_sixty_four_as_alone(device, tmp_path):
    """More requests than slots; as they end, batches become smaller."""
    model = opened("llama", tmp_path, device, "bfloat16", "nf4")
    prompts = [[1 + n % 40, 2 + n % 7, *PROMPTS[n % 6]] for n in range(70)]
    engine = Engine(model, 64, 40)
    texts = [engine.add(ids, SAMPLED, max_new_tokens=3 + n % 9) for n, ids in enumerate(prompts)]
    while not engine.is_idle:
        engine.step()
    decoded = {
        rows for made in engine._programs.values() for rows, tokens, *_ in made if tokens == 1
    }
    assert decoded >= {8, 64}
    one = Engine(model, 1, 40)
    for number in (0, 5, 17, 40, 63, 64, 69):
        alone = one.add(prompts[number], SAMPLED, max_new_tokens=3 + number % 9)
        assert list(alone) == texts[number].ids


@pytest.mark.cover(case=["llama", "qwen3_5"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [("llama", "float32"), ("gemma2", "bfloat16"), ("gpt_oss", "bfloat16"), ("qwen3_5", "float32"),
     ("lfm2", "bfloat16"), ("llama-dynamic", "float32")],
)  # fmt: skip
def test_turns_at_once_as_one_by_one(device, tmp_path, monkeypatch, case, dtype):
    """Stop tokens and ends come in the middle of turns that are computed at once."""
    model = opened(case, tmp_path, device, dtype, "nf4")

    def texts(seconds):
        monkeypatch.setattr(engine_module, "_AHEAD_SECONDS", seconds)
        counts, run = [], DecodePrograms.run

        def noted(*args, count=1, **others):
            counts.append(count)
            return run(*args, count=count, **others)

        monkeypatch.setattr(DecodePrograms, "run", noted)
        engine = Engine(model, 3, 60)
        first = written(engine, PROMPTS, SAMPLED, 15)
        grown = [engine.add(ids, SAMPLED, max_new_tokens=30, stop_ids=ids_of[3:6:2])
                 for ids, ids_of in zip(PROMPTS, first, strict=True)]  # fmt: skip
        list(grown[0])
        grown[3].cancel()
        while not engine.is_idle:
            engine.step()
        monkeypatch.setattr(DecodePrograms, "run", run)
        cancelled = grown.pop(3)
        assert cancelled.ids == first[3][: len(cancelled.ids)]
        assert [text.finish_reason for text in grown] == ["stop"] * 5
        return [first, [text.ids for text in grown]], max(counts)

    one_by_one, least = texts(0.0)
    at_once, most = texts(1e6)
    assert (least, most) == (1, 1 if case == "llama-dynamic" else DECODE_STEPS_AHEAD)
    assert at_once == one_by_one


@pytest.mark.parametrize("case", ["llama-dynamic", "phi3-longrope"])
def test_rotations_follow_each_text(device, tmp_path, case):
    model = opened(case, tmp_path, device)
    alone = [list(generate(model, ids, max_new_tokens=9 + i)) for i, ids in enumerate(PROMPTS)]
    assert written(Engine(model, 4, 64), PROMPTS) == alone


@pytest.mark.slow
def test_greedy_tokens_are_the_likeliest_of_the_whole_context(device, tmp_path):
    model = opened("llama", tmp_path, device)
    for prompt, ids in zip(PROMPTS, written(Engine(model, 6, 30), PROMPTS), strict=True):
        logits = model.logits([prompt + ids])[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids


def test_texts_stop_are_cancelled_and_leave_room(device, tmp_path):
    model = opened("llama", tmp_path, device)
    engine = Engine(model, 2, 30)
    first = engine.add(PROMPTS[0], max_new_tokens=8)
    alone = list(first)
    stopped = engine.add(PROMPTS[0], max_new_tokens=8, stop_ids=[alone[3]])
    others = [engine.add(PROMPTS[1], max_new_tokens=20) for _ in range(3)]
    assert list(stopped) == alone[: alone.index(alone[3])] and stopped.finish_reason == "stop"
    others[0].cancel()
    others[1].cancel()
    kept = list(others[2])
    assert len(kept) == 20 and others[2].finish_reason == "length"
    assert len(others[0].ids) < 20 and others[0].finish_reason == "cancelled"
    engine.step()
    assert engine.is_idle and list(engine.add(PROMPTS[0], max_new_tokens=8)) == alone
    assert engine.add([1], max_new_tokens=0).finish_reason == "length"
    assert len(list(engine.add([1] * 28, max_new_tokens=9))) == 2
    with pytest.raises(DataError, match="the maximum with its answer is 30"):
        engine.add([1] * 30, max_new_tokens=1)
    with pytest.raises(DataError, match="empty"):
        engine.add([], max_new_tokens=1)
    with pytest.raises(ShapeError, match="vocab_size"):
        engine.add([10**6], max_new_tokens=1)


def test_requests_take_turns(device, tmp_path):
    """One for many texts does not hold up a later one, which does not hold up the rest, either."""
    engine = Engine(opened("llama", tmp_path, device, "bfloat16", "nf4"), 1, 30)
    many = [engine.add([1, 2], max_new_tokens=2, number=n) for n in range(6)]
    while many[1].finish_reason is None:
        engine.step()
    later = [engine.add([1, 3], max_new_tokens=2) for _ in range(2)]
    while later[0].finish_reason is None:
        engine.step()
    assert sum(text.finish_reason is not None for text in many) <= 4
    while not engine.is_idle:
        engine.step()
    assert all(text.finish_reason == "length" for text in (*many, *later))


def test_logits_that_are_none_end_a_text(device, tmp_path):
    model = opened("llama", tmp_path, device)
    flat = model.read_flat(model.adapter.parameters).copy()
    engine = Engine(model, 2, 30)
    text = engine.add([1, 2], max_new_tokens=3)
    model.write_parameters(np.full_like(flat, np.nan))
    with pytest.raises(CheckpointError, match="not finite"):
        engine.step()
    assert text.finish_reason == "cancelled"
    model.write_parameters(flat)
    assert len(list(engine.add([1, 2], max_new_tokens=3))) == 3


def test_a_token_is_of_the_logits_that_are_told(device, tmp_path):
    model = opened("qwen2", tmp_path, device, "bfloat16", "nf4")
    text = Engine(model, 1, 30).add(PROMPTS[1], max_new_tokens=12, logprobs=1)
    assert list(text) == list(generate(model, PROMPTS[1], max_new_tokens=12))
    assert text.ids == [told.top[0][0] for told in text.token_logprobs]


@pytest.mark.quick
def test_sizes_of_batches():
    assert [batch_sizes(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_copies_of_weights_are_made_where_memory_is_not_bounded(device, tmp_path, monkeypatch):
    model = opened("llama", tmp_path, device, "bfloat16", "nf4")
    store = model.layout.packed_weights
    alone = list(Engine(model, 1, 30, packs_weights=False).add(PROMPTS[0], max_new_tokens=2))
    assert not store.nbytes
    with monkeypatch.context() as bounded:
        bounded.setattr(device, "budget", 1 << 40)
        assert not Engine(model, 1, 30)._cache.packs_weights
    assert list(Engine(model, 1, 30).add(PROMPTS[0], max_new_tokens=2)) == alone
    assert bool(store.nbytes) == device.profile.textures and not store.needs_fill
    # Whole strips: more than the weights themselves, where those are so few.
    assert store.nbytes >= model.layout.packed_sizes.nbytes * device.profile.textures


@pytest.mark.quick
def test_other_programs_decide_nothing_of_a_texts_digits(device, tmp_path, monkeypatch):
    copied = device.profile.textures
    free = "qlora_wgpu.model.memory_plan.available_bytes"
    sizes = opened("llama", tmp_path, device, "bfloat16", "nf4").layout.packed_sizes
    monkeypatch.setattr("qlora_wgpu.model.derived_weights.machine_bytes", lambda: 3 * sizes.nbytes)
    model = opened("llama", tmp_path, device, "bfloat16", "nf4")
    monkeypatch.setattr(free, lambda: sizes.nbytes)
    assert Engine(model, 1, 30)._cache.packs_weights is copied
    monkeypatch.setattr(free, lambda: sizes.nbytes - 1)
    if copied:
        with pytest.raises(OutOfMemoryError, match=r"copies of its weights.* or set device.memory"):
            Engine(model, 1, 30)


@pytest.mark.quick
def test_copies_take_a_third_of_the_machine_dequantized_or_as_codes(monkeypatch):
    head, weights = 1000, 8000

    def sizes(machine, item=2, weights=weights):
        monkeypatch.setattr("qlora_wgpu.model.derived_weights.machine_bytes", lambda: machine)
        return packed_sizes(head, weights, item)

    assert sizes(3 * 17000) == CopySizes(True, 17000, True)
    assert sizes(3 * 33000, 4) == CopySizes(True, 33000, True)
    assert sizes(3 * 17000 - 1) == sizes(3 * 33000 - 1, 4) == CopySizes(False, 6000, True)
    assert sizes(3 * 6000) == CopySizes(False, 6000, True)
    assert sizes(3 * 6000 - 1) == sizes(None) == CopySizes(False, 6000, False)
    assert sizes(1 << 50, weights=2 << 30).dense and not sizes(1 << 50, weights=(2 << 30) + 1).dense
