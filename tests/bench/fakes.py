"""A small config.json, and a device that is none."""

from types import SimpleNamespace

from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE

CONFIG = {
    "model_type": "llama",
    "vocab_size": 83,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_bias": True,
}


def fake_device(**changes):
    info = {"adapter_type": "CPU", "backend_type": "Vulkan", "description": "driver 1"}
    given = {
        "name": "card",
        "is_cpu": True,
        "max_binding": 1 << 27,
        "pace": CostModel.of_kind("CPU", 0.1),
        "profile": CPU_PROFILE,
        "gpu": SimpleNamespace(info=info),
        "backend": SimpleNamespace(name="wgpu", package="wgpu"),
    }
    return SimpleNamespace(**{**given, **changes})
