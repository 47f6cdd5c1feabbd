"""A run under ``device.memory``: the same adapter, within the budget, or a sentence."""

import re

import pytest

from e2e.tiny import write_chats, write_model
from qlora_wgpu import Config, Observer, train
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device

MIB = 1 << 20
TOKENS = {"embed_tokens": [0, 5, 12287], "lm_head": [12287, 5]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("budget")
    write_model(
        path / "model", num_hidden_layers=6, tie_word_embeddings=False, hidden_size=128,
        head_dim=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
        vocab_size=12288,
    )  # fmt: skip
    write_chats(path / "chats.jsonl", rows=24)
    return path


class Notes(Observer):
    def __init__(self):
        self.texts, self.plans = [], []

    def note(self, text):
        self.texts.append(text)

    def planned(self, memory):
        self.plans.append(sum(memory.values()))


def trained(place, name, notes=None, resume=False, steps=3, r=4, **memory):
    settings = Config.model_validate({
        "model": {"path": str(place / "model")},
        "data": {"train": str(place / "chats.jsonl"), "max_seq_length": 64, "eval_split": 4},
        "lora": {"r": r, "trainable_token_indices": TOKENS},
        "train": {"max_steps": steps, "gradient_accumulation_steps": 2},
        "output": {"dir": str(place / name), "save_steps": 2},
        "device": memory,
    })  # fmt: skip
    result = train(settings, notes, resume=resume)
    return result, (place / name / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def plain(place):
    return trained(place, "plain")


def test_a_budget_changes_no_bit(place, plain):
    plain, expected = plain
    budget = plain.peak_bytes - MIB // 2
    notes = Notes()
    result, got = trained(place, "less", notes, memory=budget)
    assert got == expected
    assert result.peak_bytes <= budget
    assert abs(notes.plans[0] - result.peak_bytes) < 0.01 * result.peak_bytes
    assert any("in host memory" in text and "GB a step" in text for text in notes.texts)
    assert result.train_loss == plain.train_loss and result.eval_loss == plain.eval_loss
    # Begun in one way, gone on with in another.
    trained(place, "resumed", steps=2)
    _, resumed = trained(place, "resumed", memory=f"{budget}B", resume=True)
    assert resumed == expected


def test_the_least_memory_streams_the_head_too(place, plain):
    with pytest.raises(OutOfMemoryError) as failure:
        trained(place, "none", memory="1MiB")
    (least,) = re.findall(r"at least (\d+) MiB", str(failure.value))
    notes, budget = Notes(), int(least) * MIB
    result, got = trained(place, "least", notes, memory=budget)
    assert got == plain[1]
    assert any(", lm_head wait" in text or "and lm_head wait" in text for text in notes.texts)
    assert result.peak_bytes <= budget


def test_too_little_memory_is_a_sentence(place):
    with pytest.raises(OutOfMemoryError, match=r"training takes at least .* raise device.memory"):
        trained(place, "none", memory="1MiB")
    assert not (place / "none" / "adapter").exists()


@pytest.mark.parametrize("memory", ["8 apples", -1, True, "1e9", 2.5])
def test_a_wrong_size_is_a_sentence(place, memory):
    with pytest.raises(ConfigError, match="auto, a size such as 8GiB"):
        trained(place, "wrong", memory=memory)


def test_a_matrix_beyond_a_binding_is_a_sentence(place, monkeypatch):
    monkeypatch.setattr(Device, "max_binding", 200_000)
    message = (
        r"adapter of model.layers.0.self_attn.q_proj with r 512 takes 262,144 bytes in one piece, "
        r"and .* allows 200,000: lower lora.r or leave it out of lora.target_modules"
    )
    with pytest.raises(OutOfMemoryError, match=message):
        trained(place, "large", r=512)
