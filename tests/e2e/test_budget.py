"""A run under ``device.memory``: the same adapter, within the budget, or a sentence."""

import re

import pytest
from support.observing import observed

from e2e.tiny import write_chats, write_model
from qlora_wgpu import Config, train
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.model import memory_plan
from qlora_wgpu.training import Observer

MIB = 1 << 20
TOKENS = {"embed_tokens": [0, 5, 12287], "lm_head": [12287, 5]}
pytestmark = pytest.mark.usefixtures("in_buffers")


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
        self.dequantized = memory["dequantized weights"]


def trained(place, name, notes=None, resume=False, steps=3, r=4, **memory):
    settings = Config.model_validate({
        "model": {"path": str(place / "model")},
        "data": {"train": str(place / "chats.jsonl"), "max_seq_length": 64, "eval_split": 4},
        "lora": {"r": r, "trainable_token_indices": TOKENS},
        "train": {"max_steps": steps, "gradient_accumulation_steps": 2},
        "output": {"dir": str(place / name), "save_steps": 2},
        "device": memory,
    })  # fmt: skip
    result = train(settings, callbacks=observed(notes), resume=resume)
    return result, (place / name / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def plain(place, in_buffers):
    return trained(place, "plain", keep_dequantized=False)


@pytest.mark.full
def test_a_budget_changes_no_bit(place, plain):
    plain, expected = plain
    budget = plain.peak_bytes - MIB // 2
    notes = Notes()
    result, got = trained(place, "less", notes, memory=budget)
    assert got == expected
    assert result.peak_bytes <= budget
    assert abs(notes.plans[0] - result.peak_bytes) < 0.01 * result.peak_bytes
    assert any("in host memory" in text and "GB per step" in text for text in notes.texts)
    assert result.train_loss == plain.train_loss and result.eval_loss == plain.eval_loss
    # Begun in one way, gone on with in another.
    trained(place, "resumed", steps=2)
    _, resumed = trained(place, "resumed", memory=f"{budget}B", resume=True)
    assert resumed == expected


@pytest.mark.full
def test_textures_change_no_bit(place, plain, in_textures):
    plain, expected = plain
    notes = Notes()
    result, got = trained(place, "textures", notes, keep_dequantized=False)
    assert got == expected and result.eval_loss == plain.eval_loss
    assert result.peak_bytes > plain.peak_bytes  # sums take two
    assert abs(notes.plans[0] - result.peak_bytes) < 0.01 * result.peak_bytes
    # Begun with them, gone on where a budget has no room for them.
    trained(place, "resumed textures", steps=2, keep_dequantized=False)
    notes, budget = Notes(), int(1.01 * plain.peak_bytes)
    assert budget < result.peak_bytes
    resumed, got = trained(
        place, "resumed textures", notes, memory=f"{budget}B", resume=True, keep_dequantized=False,
    )  # fmt: skip
    assert got == expected and resumed.peak_bytes <= budget
    (text,) = [text for text in notes.texts if text.startswith("to keep within")]
    assert "lie in buffers instead of textures" in text and "host memory" not in text


@pytest.fixture(scope="module")
def kept(place, in_buffers):
    notes = Notes()
    return *trained(place, "kept", notes), notes


@pytest.mark.full
def test_software_keeps_weights_dequantized(place, plain, kept):
    result, got, notes = kept
    assert got == plain[1] and result.eval_loss == plain[0].eval_loss
    assert notes.dequantized > 0 and not notes.texts
    assert abs(notes.plans[0] - result.peak_bytes) < 0.01 * result.peak_bytes
    # Begun with them, gone on without.
    trained(place, "resumed kept", steps=2)
    _, resumed = trained(place, "resumed kept", resume=True, keep_dequantized=False)
    assert resumed == got


@pytest.mark.full
@pytest.mark.parametrize("spare", [0, -1])
def test_they_are_kept_where_a_budget_has_room(place, kept, spare):
    result, expected, notes = kept
    budget, less = notes.plans[0] + spare, Notes()
    result, got = trained(place, f"room {spare}", less, memory=budget)
    assert got == expected and result.peak_bytes <= budget
    assert (less.dequantized > 0) == (spare == 0) and not less.texts
    if spare == 0:
        assert less.plans == notes.plans
        _, got = trained(place, "asked", memory=budget, keep_dequantized=True)
        assert got == expected
    else:
        with pytest.raises(OutOfMemoryError, match=r"keep_dequantized does not fit: .* to auto"):
            trained(place, "none", memory=budget, keep_dequantized=True)


@pytest.mark.full
@pytest.mark.parametrize("there", [None, 3.0, 2.9])
def test_software_leaves_most_of_its_machine_alone(place, kept, monkeypatch, there):
    notes, less = kept[-1], Notes()
    nbytes = None if there is None else int(there * notes.plans[0])
    monkeypatch.setattr(memory_plan, "machine_bytes", lambda: nbytes)
    trained(place, f"machine {there}", less, steps=3)
    assert (less.dequantized > 0) == (there == 3.0)
    trained(place, f"asked {there}", less, steps=3, keep_dequantized=True)
    assert less.dequantized == notes.dequantized


@pytest.mark.parametrize("value", ["always", 1, None])
def test_a_wrong_word_is_a_sentence(place, value):
    with pytest.raises(ConfigError, match=r"keep_dequantized .* must be auto, true or false"):
        trained(place, "wrong", keep_dequantized=value)


@pytest.mark.full
def test_the_least_memory_streams_the_head_too(place, plain):
    with pytest.raises(OutOfMemoryError) as failure:
        trained(place, "none", memory="1MiB")
    (least,) = re.findall(r"at least (\d+) MiB", str(failure.value))
    notes, budget = Notes(), int(least) * MIB
    result, got = trained(place, "least", notes, memory=budget)
    assert got == plain[1]
    assert any("lm_head are kept in host memory" in text for text in notes.texts)
    assert result.peak_bytes <= budget


def test_too_little_memory_is_a_sentence(place):
    with pytest.raises(OutOfMemoryError, match=r"training needs at least .* raise device.memory"):
        trained(place, "none", memory="1MiB")
    assert not (place / "none" / "adapter").exists()


@pytest.mark.quick
@pytest.mark.parametrize("memory", ["8 apples", -1, True, "1e9", 2.5, 8, "8"])
def test_a_wrong_size_is_a_sentence(place, memory):
    with pytest.raises(ConfigError, match="auto, a size such as 8GiB"):
        trained(place, "wrong", memory=memory)


def test_a_matrix_beyond_a_binding_is_a_sentence(place, monkeypatch):
    monkeypatch.setattr(Device, "max_binding", 200_000)
    message = (
        r"adapter of model.layers.0.self_attn.q_proj with r 512 needs 262,144 bytes in one piece, "
        r"but .* allows 200,000: lower lora.r or leave it out of lora.target_modules"
    )
    with pytest.raises(OutOfMemoryError, match=message):
        trained(place, "large", r=512)
