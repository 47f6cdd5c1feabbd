"""Keys under their old names, and files and numbers out of all proportion."""

from __future__ import annotations

import time

import pytest
from support.yaml_texts import MODEL, failure

from qlora_wgpu.config import DataConfig, loading
from qlora_wgpu.config.section import RenamedKeyWarning
from qlora_wgpu.errors import ConfigError

OLD_NAME = r"device\.adapter was renamed to device\.gpu"


@pytest.mark.parametrize(
    ("text", "overrides", "gpu"),
    [
        (MODEL + "device: {adapter: 1}\n", [], "1"),
        (MODEL, ["device.adapter=radeon"], "radeon"),
        (MODEL + "device: {adapter: 1}\n", ["device.gpu=2"], "2"),
        (MODEL + "device: {gpu: 1}\n", ["device.adapter=2"], "2"),
    ],
)
def test_a_key_is_read_under_its_old_name(load, text, overrides, gpu):
    with pytest.warns(RenamedKeyWarning, match=OLD_NAME) as notes:
        config = load(text, overrides)
    assert config.device.gpu == gpu and len(notes) == 1
    with pytest.deprecated_call():
        assert config.device.adapter == gpu


def test_an_old_name_beside_the_new_one_is_an_error(load):
    with pytest.raises(ConfigError, match=r"unknown key 'device\.adapter'"):
        load(MODEL + "device: {adapter: 1, gpu: 2}\n")


def test_an_old_name_s_value_is_checked_and_its_line_named(load):
    with pytest.warns(RenamedKeyWarning), pytest.raises(ConfigError, match=r"device\.gpu.*line 3"):
        load(MODEL + "device:\n  adapter: [1]\n")


N = 1 << 17  # bytes; all of these took over ten seconds at a MiB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"lora: {{layers_to_transform: [{'-1,' * (N // 4)}]}}", "10,000 keys and values"),
        (f"a: [{'[],' * (N // 4)}]", "10,000 keys and values"),
        (f"a: [{'a: 1,' * (N // 6)}]", "10,000 keys and values"),
        ("".join(f"key{i}:\n" for i in range(4000)), "and 3980 more"),
        (f"log: {{report_to: [{'a,' * 4000}]}}", "and 3980 more"),
        (f"? {'k' * (N // 2)}\n: 1", "has a key that is longer than 500 characters"),
        ('"a\\nb": 1', "or contains a control character"),
        (f"lora: {{target_modules: '{'(' * 1500 + ')' * 1500}'}}", "not a regular expression"),
        (f"lora: {{target_modules: 'a{{{2**80}}}'}}", "not a regular expression"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_far_too_much_ends_soon_with_few_lines(load, text, expected) -> None:
    start = time.process_time()
    message = failure(load, MODEL + text + "\n")
    assert expected in message and len(message) < 6000
    assert time.process_time() - start < 5.0  # of computing, whatever else is running


@pytest.mark.parametrize("place", ["", "train:\n"])
def test_what_was_meant_is_looked_for_where_it_is_shown(load, monkeypatch, place) -> None:
    calls = []
    monkeypatch.setattr(loading, "suggest_key", lambda loc: calls.append(loc) or f": key {loc[-1]}")
    keys = "".join(f"{' ' * bool(place)}key{i}: 1\n" for i in range(100))
    message = failure(load, MODEL + place + keys)
    assert len(calls) == 20 and "and 80 more" in message and ": key key19" in message


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("train: {max_steps: 1000000000000}", "must be from 1 to 1,000,000,000, or -1"),
        ("lora: {r: 1000000}", "must be at most 4,096, got 1000000"),
        ("lora: {rank_pattern: {q_proj: 1000000}}", "must be at most 4,096"),
        ("train: {per_device_train_batch_size: 10000000000}", "must be at most 2,147,483,647"),
        ("data: {max_seq_length: 9223372036854775808}", "must be at most 16,777,216"),
        ("output: {save_steps: 9223372036854775808}", "must be at most 2,147,483,647"),
        ("optim: {learning_rate: 1e-300}", "must be at least 1e-12, got 1e-300"),
        ("optim: {learning_rate: 1e7}", "must be at most 1000000, got"),
        ("optim: {max_grad_norm: 1e-300}", "must be 0 or from 1e-30 to 1e+15, got 1e-300"),
        ("optim: {adam_epsilon: 1e-300}", "must be 0 or from 1e-30 to 1e+15"),
        ("optim: {adam_beta2: 0.9999999999999999}", "must be at most 0.999999"),
        ("eval: {early_stopping_threshold: 1e300}", "must be 0 or from 1e-30 to 1e+15"),
    ],
)
def test_numbers_out_of_all_proportion(load, section, expected) -> None:
    assert expected in failure(load, MODEL + section + "\n")


def test_numbers_end_where_32_bits_do(load):
    """The largest that is taken of most, and the first that is not."""
    text = "model: {path: x}\ndata: {train: a.jsonl}\ntrain: {gradient_accumulation_steps: N}\n"
    most = 2**31 - 1
    taken = load(text.replace("N", str(most)))
    assert taken.train.gradient_accumulation_steps == most
    for wrong in (most + 1, 0):
        with pytest.raises(ConfigError, match=r"train\.gradient_accumulation_steps"):
            load(text.replace("N", str(wrong)))


@pytest.mark.parametrize(("count", "name"), [
    (1, "a0"), (2, "a0 and a1"), (3, "a0, a1 and a2"), (4, "a0, a1 and 2 more"),
    (9, "a0, a1 and 7 more"),
])  # fmt: skip
def test_the_name_of_several_sources(count, name):
    sources = [{"path": f"a{n}"} for n in range(count)]
    assert DataConfig.model_validate({"sources": sources}).train_name == name
