"""What is said to be planned is what a run takes: whole runs, of which nothing is computed."""

import pytest
from references.sized import family_configs
from support.allocating import allocating_device
from support.observing import observed

from e2e.test_residency import write_family
from e2e.tiny import write_chats, write_model, write_tokenizer
from qlora_wgpu import Config, train
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE, cpu_profile
from qlora_wgpu.training import Observer

WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "head_dim": 32,
        "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
CASES = {
    "llama": {},
    "gemma3_text": {},
    "qwen3_moe": {},
    "wide": {"model": WIDE, "lora": {"r": 16}, "train": {"gradient_checkpointing": True}},
    "gpu": {"model": WIDE, "profile": GPU_PROFILE},
    "dora, in 8 bits": {
        "lora": {"r": 8, "use_dora": True, "lora_dropout": 0.1},
        "optim": {"name": "adamw_8bit"},
    },
    "packed": {"data": {"packing": True}, "train": {"neftune_noise_alpha": 5.0}},
    "no held-out rows": {"data": {"eval_split": None}, "train": {"gradient_dtype": "bfloat16"}},
    "long prompts": {
        "eval": {"sample_prompts": ["is a1 " * 20, "b2?"], "sample_steps": 2, "eval_steps": 2}
    },
    "completions": {
        "profile": cpu_profile(16),
        "train": {
            "objective": "grpo",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        },
        "grpo": {
            "reward_funcs": [{"length": {"target": 5}}],
            "max_completion_length": 9,
            "beta": 0.1,
        },
    },
    "within a budget": {"model": WIDE, "device": {"memory": 0.92}},
}


class Plans(Observer):
    def __init__(self):
        self.memory = []

    def planned(self, memory):
        self.memory.append(memory)


@pytest.fixture
def allocating(monkeypatch):
    return allocating_device(monkeypatch)


@pytest.mark.parametrize("case", CASES)
def test_a_run_takes_what_was_planned(allocating, tmp_path, case):
    changes = dict(CASES[case])
    if case in family_configs():
        write_family(tmp_path, case)
        write_tokenizer(tmp_path)
    else:
        write_model(tmp_path, **changes.pop("model", {}))
    write_chats(tmp_path / "chats.jsonl", rows=24)
    allocating.profile = changes.pop("profile", allocating.profile)

    def run(name, **memory):
        plans, allocating.memory.peak = Plans(), 0
        settings = {
            "model": {"path": str(tmp_path)},
            "data": {"train": str(tmp_path / "chats.jsonl"), "max_seq_length": 64, "eval_split": 5},
            "lora": {"r": 4},
            "train": {"max_steps": 4, "per_device_train_batch_size": 2},
            "output": {"dir": str(tmp_path / name)},
        }  # fmt: skip
        for section, values in changes.items():
            settings[section] = settings.get(section, {}) | values
        settings["device"] = memory
        taken = allocating.memory.total
        result = train(Config.model_validate(settings), callbacks=observed(plans))
        return sum(plans.memory[-1].values()), result.peak_bytes - taken

    share = changes.pop("device", {}).get("memory")
    planned, peak = run("whole")
    if case == "completions":  # lengths and, by the clock, batches of prompts that do not occur
        assert peak <= planned < 1.1 * peak
        return
    assert abs(planned - peak) < 0.001 * peak
    if share is not None:
        budget = int(share * planned)
        allocating.budget = budget
        less, peak = run("less", memory=budget)
        assert abs(less - peak) < 0.001 * peak and peak <= budget < planned
