"""Model shapes that are measured, and folders of random weights in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHAPES: dict[str, dict[str, int | bool]] = {
    "S": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048},
    "M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def config_of(shape: str) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **SHAPES[shape],
    }


def write_random_model(folder: Path, shape: str) -> Path:
    """Writes a Hugging Face folder of random float16 weights."""
    from qlora_wgpu.models.family import find_family

    config = config_of(shape)
    architecture = find_family(config).read(config)
    random = np.random.default_rng(0)

    def normal(*size: int) -> np.ndarray:
        return (0.02 * random.standard_normal(size, dtype=np.float32)).astype(np.float16)

    tensors = {architecture.embed_name: normal(architecture.vocab_size, architecture.hidden_size)}
    for spec in architecture.linears:
        tensors[f"{spec.name}.weight"] = normal(spec.out_features, spec.in_features)
    for name, size in architecture.norms.items():
        tensors[name] = np.ones(size, np.float16)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
