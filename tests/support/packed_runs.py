"""Runs of a few steps on packed chats, and what they tell of memory."""

from qlora_wgpu import Config
from qlora_wgpu.runs.training import train
from qlora_wgpu.training import Observer


class Plans(Observer):
    """Keeps the bytes that were planned."""

    def __init__(self):
        self.planned_bytes = []

    def planned(self, memory):
        self.planned_bytes.append(sum(memory.values()))


def packed_run(
    place, name, lora, base="model", observer=None, *, resume=False, steps=3, **sections
):
    """Trains the folder's model on its chats; the result, and the adapter's bytes."""
    given = {
        "model": {"path": str(place / base)},
        "data": {"train": str(place / "chats.jsonl"), "max_seq_length": 96, "packing": True},
        "lora": {"r": 3, "lora_dropout": 0.1, **lora},
        "train": {"max_steps": steps, "gradient_accumulation_steps": 2},
        "optim": {"learning_rate": 1e-2},
        "output": {"dir": str(place / name), "save_steps": 2},
    }
    changed = {key: given.get(key, {}) | sections.get(key, {}) for key in given.keys() | sections}
    result = train(Config.model_validate(changed), observer, resume=resume)
    return result, (place / name / "adapter" / "adapter_model.safetensors").read_bytes()
