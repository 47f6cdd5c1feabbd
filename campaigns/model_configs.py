"""Mutated config.json, generation_config.json, tokenizer_config.json and adapter_config.json.

Each is opened as ``train`` and ``estimate`` open it, up to the first weight: a model, or one short
sentence, soon and in little memory.

``python -m campaigns.model_configs --count N --seed S``
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from references.sized import family_configs
from support.tiny_tokenizer import tiny_backend

from campaigns.support import Tally, campaign, peak_bytes
from qlora_wgpu.checkpoint import write_safetensors
from qlora_wgpu.checkpoint.json_file import read_json_object
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.targets import lora_config
from qlora_wgpu.model.memory import plan_training_memory
from qlora_wgpu.model.pretrained import Pretrained

SLOW, MUCH = 10.0, 2**30
LONGEST_MESSAGE = 1500
DEEP = "a value that is written as a deep one"
Case = tuple[str, Callable[[], object]]

NUMBERS = [
    0, -1, 1, 2, 3, 7, 63, 256, 257, 1025, 4097, 10**6, 2**31 - 1, 2**31, 2**32, 10**9, 10**12,
    2**63,
    2**64, 10**400,
    -(10**30), 0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 1e-40, 1e-30, 1e15, 1e30, 1e300, float("nan"),
    float("inf"),
    float("-inf"),
]  # fmt: skip
THINGS: list[Any] = [
    None, True, False, "", "x", "0", "gelu", "silu", "default", "yarn", "longrope", "dynamic",
    "llama3", "linear",
    "full_attention", "sliding_attention", "\ud800", "\x1b[2J", "é" * 3000, [], {}, [[]], [{}],
    {"": {}}, [None] * 5,
    [0] * 5000, [1.0] * 12, ["full_attention"] * 4, [["full_attention"]] * 4, {"a": [1]},
    {"rope_type": "yarn"},
    {"rope_type": []}, {"type": "su", "short_factor": [1] * 4, "long_factor": [1e300] * 4},
    {"full_attention": 3, "sliding_attention": None}, {"rope_type": "dynamic", "factor": 1e15},
    {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [1.0] * 12},
    {"load_in_8bit": True}, {"quant_method": ["x"]}, {"quant_method": "bitsandbytes",
    "load_in_4bit": []},
]  # fmt: skip
KEYS = [
    "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window",
    "quantization_config",
    "head_dim", "text_config", "mlp_only_layers", "no_rope_layers", "num_experts",
    "num_local_experts",
    "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings",
    "model_type",
    "hidden_act", "attention_bias", "use_sliding_window", "max_window_layers",
    "sliding_window_pattern",
    "query_pre_attn_scalar", "eos_token_id", "bos_token_id", "pad_token_id",
    "attn_logit_softcapping",
]  # fmt: skip


def anything(rng: random.Random) -> Any:
    if rng.random() < 0.02:
        return DEEP
    return copy.deepcopy(rng.choice(NUMBERS if rng.random() < 0.5 else THINGS))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key or index in it."""
    if isinstance(value, dict):
        own = [(value, key) for key in value]
    elif isinstance(value, list):
        own = [(value, i) for i in range(len(value))][:40]
    else:
        return []
    return own + [place for container, key in own for place in places(container[key])]


def mutate(rng: random.Random, config: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """A copy with one to four things changed."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        everywhere = places(config)
        container, key = rng.choice(everywhere) if everywhere else (config, "x")
        kind = rng.randrange(5) if everywhere else 1
        if kind == 0:
            del container[key]
        elif kind == 1:
            config[rng.choice(keys)] = anything(rng)
        else:
            container[key] = anything(rng)
    return config


def text_of(rng: random.Random, config: dict[str, Any]) -> bytes:
    depth = rng.choice([3, 50, 300, 900, 2000])
    raw = bytearray(json.dumps(config).encode("utf-8", "surrogatepass"))
    raw = raw.replace(json.dumps(DEEP).encode(), b"[" * depth + b"1" + b"]" * depth)
    if rng.random() < 0.1:
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.02:
        first = json.dumps(rng.choice(KEYS)).encode() + b":" + json.dumps(anything(rng)).encode()
        raw[1:1] = first + b","  # a key twice
    if rng.random() < 0.01:
        raw = bytearray(
            rng.choice([b"", b"[" * 10**5, b'{"a":' * 10**5, b"null", b"\xff\xfe", b"3" * 5000])
        )
    return bytes(raw)


TOKENIZER_FILES: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": [2, 4], "bos_token_id": 1, "pad_token_id": 0},
    "tokenizer_config.json": {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    },
    "special_tokens_map.json": {"unk_token": "<unk>", "pad_token": {"content": "<unk>"}},
}


def write_adapter(folder: Path) -> None:
    """A sound adapter of one layer."""
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    arrays = {f"{name}.lora_A.weight": (2, 8), f"{name}.lora_B.weight": (8, 2)}
    write_safetensors(
        folder / "adapter_model.safetensors",
        {key: np.zeros(shape, np.float32) for key, shape in arrays.items()},
    )
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj"], "bias": "none", "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
        "init_lora_weights": True,
        "modules_to_save": None, "base_model_name_or_path": "x", "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


class Folders:
    """Sound folders of every family, whose files are changed one at a time."""

    def __init__(self, place: Path) -> None:
        self.configs = family_configs()
        self.place = place
        for name, config in self.configs.items():
            self._write_model(place / name, config)
        write_adapter(place / "adapter")
        (place / "tokenizer").mkdir()
        tiny_backend().save(str(place / "tokenizer" / "tokenizer.json"))
        self.adapter = json.loads((place / "adapter" / "adapter_config.json").read_text())

    def _write_model(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir()
        architecture = Pretrained.from_config(config).architecture
        shapes: dict[str, tuple[int, ...]] = {
            architecture.embed_name: (architecture.vocab_size, architecture.hidden_size),
            **architecture.norm_shapes,
            **architecture.routers,
        }
        if not architecture.tied:
            shapes[architecture.head_name] = shapes[architecture.embed_name]
        for spec in architecture.every_linear:
            shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
            if spec.bias:
                shapes[f"{spec.name}.bias"] = (spec.out_features,)
        arrays = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
        write_safetensors(folder / "model.safetensors", arrays)

    def model(self, rng: random.Random) -> Case:
        """A mutated config.json beside sound weights."""
        name = rng.choice(sorted(self.configs))
        raw = text_of(rng, mutate(rng, self.configs[name], KEYS))
        folder = self.place / name
        (folder / "config.json").write_bytes(raw)
        return f"{name}: {raw[:1500]!r}", lambda: Pretrained.open(folder)

    def plan(self, rng: random.Random) -> Case:
        """A mutated config.json alone, whose training is planned."""
        name = rng.choice(sorted(self.configs))
        raw = text_of(rng, mutate(rng, self.configs[name], KEYS))

        path = self.place / "config.json"
        path.write_bytes(raw)

        def planned() -> None:
            plan_training_memory(
                read_json_object(path),
                LoraConfig(r=4),
                QuantConfig(),
                "bfloat16",
                batch_size=1,
                seq=64,
                gradient_checkpointing=True,
            )

        return f"plan {name}: {raw[:1500]!r}", planned

    def tokenizer(self, rng: random.Random) -> Case:
        """A mutated file beside a sound tokenizer.json."""
        folder = self.place / "tokenizer"
        for name, value in TOKENIZER_FILES.items():
            (folder / name).write_text(json.dumps(value))
        name = rng.choice(sorted(TOKENIZER_FILES))
        raw = text_of(rng, mutate(rng, TOKENIZER_FILES[name], [*TOKENIZER_FILES[name], "x"]))
        (folder / name).write_bytes(raw)
        return f"tokenizer {name}: {raw[:1500]!r}", lambda: Tokenizer.from_folder(folder)

    def adapters(self, rng: random.Random) -> Case:
        """A mutated adapter_config.json beside sound matrices."""
        folder = self.place / "adapter"
        raw = text_of(
            rng, mutate(rng, self.adapter, [*self.adapter, "lora_bias", "exclude_modules"])
        )
        (folder / "adapter_config.json").write_bytes(raw)
        return f"adapter: {raw[:1500]!r}", lambda: lora_config(load_adapter(folder)[1])


def outcome_of(body: Callable[[], object]) -> str:
    begin = time.monotonic()
    try:
        body()
        outcome = "read"
    except QLoRAError as err:
        outcome = f"refused with a sentence ({type(err).__name__})"
        if "\n" in str(err) or len(str(err)) > LONGEST_MESSAGE:
            outcome = "WRONG: the message is not one short line"
    except Exception as err:
        outcome = f"WRONG: {type(err).__name__}: {err}"[:160]
    if time.monotonic() - begin > SLOW:
        outcome = f"WRONG: {time.monotonic() - begin:.0f} s"
    return outcome


def run(count: int, seed: int, tally: Tally) -> None:
    rng, before = random.Random(seed), peak_bytes()
    slowest, which = 0.0, ""
    warnings.simplefilter("error", RuntimeWarning)
    with tempfile.TemporaryDirectory() as place:
        folders = Folders(Path(place))
        for number in range(count):
            if tally.over:
                break
            makers = (
                [folders.model] * 13
                + [folders.adapters] * 4
                + [folders.tokenizer]
                + [folders.plan] * 2
            )
            how, body = makers[number % 20](rng)
            begin = time.monotonic()
            outcome = outcome_of(body)
            if time.monotonic() - begin > slowest:
                slowest, which = time.monotonic() - begin, how
            if outcome.startswith("WRONG: "):
                tally.fail(outcome.removeprefix("WRONG: "), f"number {number}: {how}")
            else:
                tally.add(outcome)
    grown = peak_bytes() - before
    if grown > MUCH:
        tally.fail("too much memory", f"{grown / 2**20:.0f} MB")
    print(f"{grown / 2**20:.0f} MB more at most, {slowest:.1f} s ({which[:120]})")


if __name__ == "__main__":
    campaign("mutated configurations of models and adapters", run, 40_000)
