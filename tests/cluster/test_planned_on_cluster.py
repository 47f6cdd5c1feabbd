"""What is planned for workers and owner is what they take: whole runs that compute nothing."""

import pytest
from e2e.test_residency import write_family
from e2e.tiny import write_chats, write_model, write_pairs, write_tokenizer
from support.allocating import allocating_device
from support.observing import observed
from support.workers_here import WorkersHere

from qlora_wgpu import Config, estimate, train
from qlora_wgpu.cluster.blocks import Expected
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.runs import cluster, opening
from qlora_wgpu.training import Observer

WIDE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
CASES = {
    "gemma3_text": {},
    "qwen3_moe": {},
    "dora, in 8 bits": {"lora": {"use_dora": True}, "optim": {"name": "adamw_8bit"}},
    "packed": {"data": {"packing": True}, "train": {"gradient_dtype": "bfloat16"}},
    "no held-out rows": {"data": {"eval_split": None}},
    "dpo": {"train": {"objective": "dpo"}},
    "kto": {"train": {"objective": "kto"}},
    "completions": {
        "train": {
            "objective": "grpo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        },
        "grpo": {
            "reward_funcs": [{"length": {"target": 5}}], "max_completion_length": 9, "beta": 0.1,
        },
    },
    "long prompts": {"eval": {"sample_prompts": ["is a1 " * 20, "b2?"], "sample_steps": 2}},
}  # fmt: skip


class Plans(Observer):
    def __init__(self):
        self.memory = []

    def planned(self, memory):
        self.memory.append(sum(memory.values()))


@pytest.fixture
def devices(monkeypatch):
    """The owner's and the worker's, and what is planned of the latter."""
    own, owner, plans = Device(), allocating_device(monkeypatch), Plans()
    monkeypatch.setattr("qlora_wgpu.runs.cluster.Cluster", WorkersHere)
    monkeypatch.setattr("qlora_wgpu.runs.cluster.verified_layout", lambda *given: given[3])
    monkeypatch.setattr(opening, "verified_layout", lambda *given: given[3])
    monkeypatch.setattr("qlora_wgpu.runs.cluster.device_of", lambda settings: own)
    monkeypatch.setattr("qlora_wgpu.runs.estimation.device_of", lambda settings: owner)
    # What was not computed counts no tokens.
    monkeypatch.setattr(Expected, "check", lambda expected, asked, sums: sums)
    monkeypatch.setattr(cluster._Notes, "planned", lambda notes, memory: plans.planned(memory))
    return owner, own, plans


def settings_of(place, changes):
    objective = changes.get("train", {}).get("objective")
    write = write_pairs if objective in ("dpo", "kto") else write_chats
    write(place / "chats.jsonl", rows=24)
    settings = {
        "model": {"path": str(place)},
        "data": {"train": str(place / "chats.jsonl"), "max_seq_length": 64, "eval_split": 5},
        "lora": {"r": 4},
        "train": {"max_steps": 4, "per_device_train_batch_size": 2},
        "output": {"dir": str(place / "run")},
        "cluster": {"scheduler": "local", "workers": 1},
    }
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    return Config.model_validate(settings)


@pytest.mark.cover(case=["qwen3_moe", "dora, in 8 bits", "packed", "dpo"])
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_workers_and_owner_take_what_was_planned(devices, tmp_path, case):
    if case in ("gemma3_text", "qwen3_moe"):
        write_family(tmp_path, case)
        write_tokenizer(tmp_path)
    else:
        write_model(tmp_path, **WIDE)
    (owner, own, of_worker), of_owner = devices, Plans()
    settings = settings_of(tmp_path, CASES[case])
    train(settings, callbacks=observed(of_owner))
    assert of_owner.memory == [owner.memory.peak]
    (planned,) = of_worker.memory
    if case == "completions":  # lengths and batches of prompts that do not occur
        assert own.memory.peak <= planned < 1.1 * own.memory.peak
    else:
        assert abs(planned - own.memory.peak) < 0.01 * own.memory.peak
    assert own.memory.by_kind["optimizer"] == 0
    told = estimate(settings, by_data=True).on_cluster
    assert told.owner == owner.memory.peak
    beside = own.memory.peak - told.worker  # texts and other lengths, but no moments
    assert 0 < beside < 0.5 * told.worker


@pytest.mark.slow
def test_a_workers_budget_is_used_up(devices, tmp_path):
    write_model(tmp_path, **WIDE)
    _, own, plans = devices
    settings = settings_of(tmp_path, {})
    train(settings)
    # Of what is planned, not of what moments would take, or all lengths that there could be.
    (whole,) = plans.memory
    for budget in (whole, int(0.93 * whole)):
        own.budget, own.memory.peak = budget, 0
        taken = own.memory.total
        train(settings, overwrite=True)
        assert own.memory.peak - taken <= budget
        assert abs(plans.memory[-1] - own.memory.peak + taken) < 0.01 * budget
        assert (plans.memory[-1] == whole) is (budget == whole)


def test_an_owner_without_room_is_told_before_workers_are_asked(devices, tmp_path, monkeypatch):
    write_model(tmp_path)
    devices[0].budget = 10_000
    monkeypatch.setattr("qlora_wgpu.runs.cluster.Cluster", None)
    with pytest.raises(OutOfMemoryError, match=r"the owner of this run.*more than the 0\.0 MiB"):
        train(settings_of(tmp_path, {}))
