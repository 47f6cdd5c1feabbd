"""Model shapes to measure: by a preset's name, a config.json or a model folder."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_wgpu.bench.random_folder import RandomFolder
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.checkpoint.model_folder import GGUF
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.presence import exists, is_dir, is_file

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# Dimensions only: what else a model of that name has (biases, rescaled RoPE) costs next to nothing.
SHAPES: dict[str, dict[str, int | bool]] = {
    "S": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048},
    "M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                     "max_position_embeddings": 8192},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
                     "max_position_embeddings": 32768},
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                     "max_position_embeddings": 131072},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                     "max_position_embeddings": 131072, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model to be measured.

    Attributes:
        name: The preset's, or the path as it was given.
        folder: The configuration and the weights, real or random.
        weights: ``"random"``, or the folder that they come from.
    """

    name: str
    folder: ModelFolder
    weights: str

    @property
    def config(self) -> Mapping[str, Any]:
        """The contents of config.json."""
        return self.folder.config


def config_of(shape: str) -> dict[str, Any]:
    """A preset's config.json, a Llama of its dimensions."""
    return {**_LLAMA, **SHAPES[shape]}


def find_shape(text: str) -> Shape:
    """Finds a shape; nothing is downloaded.

    Args:
        text: A preset's name (any case), a config.json, a folder that holds one, or a GGUF file.
            A folder's safetensors are used where it has some; otherwise the weights are random.

    Raises:
        ConfigError: If there is no such preset and no such path.
        CheckpointError: If the file or folder is damaged.
        UnsupportedModelError: If it asks for something that is not computed here.
    """
    preset = next((name for name in SHAPES if name.lower() == text.lower()), None)
    if preset is not None:
        return _random(preset, config_of(preset))
    path = Path(text).expanduser()
    if text and is_dir(path):
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            folder = ModelFolder.open(path)
            find_family(folder.config).read(folder.config)
            return Shape(text, folder, str(path))
        if exists(path / "config.json"):
            return _random(text, read_json_object(path / "config.json"))
        raise ConfigError(
            f"{path} has no config.json: give a model folder, a config.json or one of "
            f"{', '.join(SHAPES)}"
        )
    if path.suffix == GGUF and is_file(path):
        return Shape(text, ModelFolder.open(path), str(path))
    if text and exists(path):
        return _random(text, read_json_object(path))
    close = difflib.get_close_matches(text.lower(), [name.lower() for name in SHAPES], 1)
    meant = next((f" (did you mean {n!r}?)" for n in SHAPES if n.lower() in close), "")
    raise ConfigError(
        f"there is no shape {text!r}{meant}: give one of {', '.join(SHAPES)}, or the path of a "
        "model folder or of a config.json"
    )


def _random(name: str, config: dict[str, Any]) -> Shape:
    return Shape(name, RandomFolder(config, quant=QuantConfig()), "random")
