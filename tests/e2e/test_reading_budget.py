"""Texts and evaluations under ``device.memory``: what has no room waits, and all else stays."""

import json
import re
from collections import Counter

import pytest
from support.commands import run_here
from support.observing import observed

from e2e.tiny import write_chats, write_model
from qlora_wgpu import Config, LoraConfig, QuantConfig, open_adapter, train
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.gpu.kernel_config import cpu_profile
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.budget import reading_memory
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.runs import placement as required
from qlora_wgpu.runs.placement import Placement, fit, host_memory, of_other_lengths
from qlora_wgpu.runs.workload import GenerationWorkload, LossWorkload
from qlora_wgpu.training import Observer

PROMPT = ["--prompt", "what is 1 and 2?", "--max-new-tokens", 12]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("reading")
    write_model(
        path / "model", num_hidden_layers=6, tie_word_embeddings=False, hidden_size=128,
        head_dim=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=2048,
        vocab_size=1024, store="bfloat16",
    )  # fmt: skip
    write_chats(path / "chats.jsonl", rows=12)
    settings = {
        "model": {"path": str(path / "model")},
        "data": {"train": str(path / "chats.jsonl"), "max_seq_length": 64, "eval_split": 4},
        "lora": {"r": 4},
        "train": {"max_steps": 1, "gradient_accumulation_steps": 1},
        "output": {"dir": str(path / "run")},
    }
    train(Config.model_validate(settings))
    return path


@pytest.fixture(scope="module")
def budget(place, device):
    """A budget, by what is computed, for which layers have to come and go."""
    base = Pretrained.open(place / "model")
    layout = device_layout(base, LoraConfig(r=4), QuantConfig(), "bfloat16", device)

    def less_than_all(planned):
        memory = reading_memory(planned.plans(layout))
        return sum(memory.values()) + of_other_lengths(memory) - layout.embedding_bytes - MIB

    return less_than_all


def done(place, *args, stdin=None):
    ended = run_here(*args, cwd=place, stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_a_budget_changes_no_token(place, budget):
    memory = ["--memory", f"{budget(GenerationWorkload(24, 36))}B"]
    plain = done(place, "generate", "run", *PROMPT)
    budgeted = done(place, "generate", "run", *PROMPT, *memory)
    assert budgeted.stdout == plain.stdout
    assert "to keep within" in budgeted.stderr and "in host memory" in budgeted.stderr
    assert "MiB of device memory, " not in plain.stderr


@pytest.mark.full
def test_a_budget_changes_no_answer(place, budget):
    memory = ["--memory", f"{budget(GenerationWorkload(256, 256))}B"]
    spoken = [
        done(place, "chat", "run", "--max-new-tokens", 6, *more, stdin="hello\nand 2?\n")
        for more in ((), memory)
    ]
    assert spoken[0].stdout == spoken[1].stdout and "in host memory" in spoken[1].stderr


def test_textures_that_are_given_up_are_told(place, device, monkeypatch):
    base = Pretrained.open(place / "model")
    plain = device_layout(base, LoraConfig(r=4), QuantConfig(), "bfloat16", device)
    layout = plain.changed(profile=cpu_profile(8, 10, in_textures=True, short_loops=True))
    buffers = layout.changed(offload=OffloadPlan(in_buffers=True))
    rows, told = LossWorkload(1, 64), Notes()
    within = reading_memory(rows.plans(layout))
    least = sum(reading_memory(rows.plans(buffers)).values())
    assert least < sum(within.values())
    monkeypatch.setattr(device, "budget", least + of_other_lengths(within))
    assert fit(rows, layout, device, told).layout.offload == buffers.offload
    (text,) = told.texts
    assert re.fullmatch(
        "to keep within .* MiB of device memory, intermediates lie in buffers .*", text
    )
    monkeypatch.setattr(device, "budget", sum(within.values()) + of_other_lengths(within))
    assert fit(rows, layout, device, told).layout.offload.in_buffers is False
    assert len(told.texts) == 1


def test_a_budget_changes_no_loss(place, budget):
    least = budget(LossWorkload(1, 32))
    plain = done(place, "eval", "run", "--json")
    budgeted = done(place, "eval", "run", f"device.memory={least}B", "--json")
    assert json.loads(budgeted.stdout) == json.loads(plain.stdout)
    assert "in host memory" in budgeted.stderr


def test_a_model_keeps_its_budget(place, budget):
    least = budget(GenerationWorkload(256, 256))
    with open_adapter(place / "run", memory=least) as model:
        model.generate("what is", max_new_tokens=4)
        assert model.device.memory.peak <= least
        assert model.layout.offload.streamed_layers >= 3


@pytest.mark.parametrize("memory", ["8 apples", "-1"])
def test_a_wrong_size_is_a_sentence(place, memory):
    ended = run_here("generate", "run", *PROMPT, "--memory", memory, cwd=place)
    assert ended.returncode == 2 and "such as 8GiB" in ended.stderr
    with pytest.raises(ConfigError, match="such as 8GiB"):
        open_adapter(place / "run", memory=memory)


def test_too_little_memory_is_a_sentence(place):
    ended = run_here("generate", "run", *PROMPT, "--memory", "100KiB", cwd=place)
    assert ended.returncode == 2
    assert "of device memory" in ended.stderr and "more than" in ended.stderr


class Notes(Observer):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


class Plans(Observer):
    def __init__(self):
        self.host = []

    def planned_on_host(self, memory, mapped):
        self.host.append((memory, mapped))


@pytest.mark.parametrize("keep", [False, True])
def test_too_little_host_memory_is_a_sentence(place, device, monkeypatch, tmp_path, keep):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("qlora_wgpu.model.weight_placement._LEAST_KEPT", 1)
    layout = device_layout(
        Pretrained.open(place / "model"), LoraConfig(r=4), QuantConfig(), "bfloat16", device,
        OffloadPlan(streamed_layers=6), keep=keep,
    )  # fmt: skip
    texts, told = GenerationWorkload(24, 36), Plans()
    waiting, plans = layout.weights_on_host(), texts.plans(layout)

    def placed(on_device):
        return Placement(layout, texts, plans, Counter(base=on_device), waiting, "")

    whole = host_memory(placed(0))
    free = sum(whole.values()) - whole["process"] + 1000
    monkeypatch.setattr(required, "available_bytes", lambda: free + 4 * MIB)  # it goes on growing
    required.check_host_memory(placed(1000), device, told)
    ((memory, mapped),) = told.host
    assert mapped == layout.placement.mapped_bytes and waiting.items() <= memory.items()
    assert {"process", "kernels", "adapter", "work"} <= memory.keys()
    assert (layout.placement.mapped_bytes > 0) is keep
    remedy = "raise device.memory" if keep else "model.cache"
    with pytest.raises(OutOfMemoryError, match=rf"host memory.*MiB too few: .*{remedy}"):
        required.check_host_memory(placed(8 * MIB), device, told)
    monkeypatch.setattr(required, "available_bytes", lambda: 1 << 50)
    monkeypatch.setattr(required, "container_limit", lambda: MIB)  # less than is taken already
    with pytest.raises(OutOfMemoryError, match=r"host memory.* but only 0 MiB are free"):
        required.check_host_memory(placed(0), device, told)


def test_a_run_tells_what_it_keeps_on_the_host(place, monkeypatch):
    plans = Plans()
    settings = Config.model_validate({
        "model": {"path": str(place / "model")},
        "data": {"train": str(place / "chats.jsonl"), "max_seq_length": 64},
        "lora": {"r": 4}, "train": {"max_steps": 1},
        "output": {"dir": str(place / "short")}, "device": {"memory": "10MiB"},
    })  # fmt: skip
    monkeypatch.setattr(required, "available_bytes", lambda: MIB)
    with pytest.raises(OutOfMemoryError, match="of host memory"):
        train(settings, callbacks=observed(plans))
    assert len(plans.host) == 1 and not (place / "short" / "adapter").exists()
