"""Changed config.json, generation_config.json, tokenizer_config.json and adapter_config.json.

Each is opened as ``train`` and ``estimate`` open it, up to the first weight: a model, or one short
sentence, soon and in little memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references.sized import family_configs
from support.gguf_models import adapter_of
from support.tiny_tokenizer import tiny_backend

from campaigns.strangers import Content, attempt, changed, damaged
from qlora_wgpu.checkpoint import write_safetensors
from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.targets import lora_config
from qlora_wgpu.model.memory_plan import plan_training_memory
from qlora_wgpu.model.pretrained import Pretrained

pytestmark = pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")
LONGEST = 1500
DEEP = "a value that is written as a deep one"
CONFIGS = family_configs()
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


TOKENIZER_FILES: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": [2, 4], "bos_token_id": 1, "pad_token_id": 0},
    "tokenizer_config.json": {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    },
    "special_tokens_map.json": {"unk_token": "<unk>", "pad_token": {"content": "<unk>"}},
}


WHOLE = [b"", b"[" * 10**5, b'{"a":' * 10**5, b"null", b"\xff\xfe", b"3" * 5000]
anything = st.one_of(*map(st.sampled_from, (NUMBERS, NUMBERS, THINGS, THINGS, [*THINGS, DEEP])))


@st.composite
def files(draw: st.DrawFn, config: dict[str, Any], keys: Sequence[str]) -> Content:
    """A JSON file with one to four things changed; some are no JSON any more."""
    kind = draw(st.sampled_from([""] * 12 + ["bytes", "key twice", "whole"]))
    if kind == "whole":
        return Content(draw(st.sampled_from(WHOLE)))
    depth = draw(st.sampled_from((3, 50, 300, 900, 2000)))
    raw = json.dumps(draw(changed(config, anything, keys))).encode()
    raw = raw.replace(json.dumps(DEEP).encode(), b"[" * depth + b"1" + b"]" * depth)
    if kind == "key twice":
        key, value = draw(st.sampled_from(keys)), draw(anything)
        raw = b"{" + f"{json.dumps(key)}: {json.dumps(value)}, ".encode() + raw[1:]
    return draw(damaged(raw)) if kind == "bytes" else Content(raw)


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Weights of a family, all of them zero."""
    folder.mkdir()
    architecture = Pretrained.from_config(config).architecture
    shapes: dict[str, tuple[int, ...]] = {
        architecture.embed_name: (architecture.vocab_size, architecture.hidden_size),
        **architecture.norm_shapes,
        **architecture.router_shapes,
    }
    if not architecture.tied:
        shapes[architecture.head_name] = shapes[architecture.embed_name]
    for spec in architecture.every_linear:
        shapes[f"{spec.name}.weight"] = (spec.out_features, spec.in_features)
        if spec.bias:
            shapes[f"{spec.name}.bias"] = (spec.out_features,)
    arrays = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", arrays)


@pytest.fixture(scope="module")
def models(place: Path) -> Path:
    """Sound weights of every family."""
    for name, config in CONFIGS.items():
        write_weights(place / name, config)
    return place


of_families = st.sampled_from(sorted(CONFIGS)).flatmap(
    lambda name: st.tuples(st.just(name), files(CONFIGS[name], KEYS))
)


@given(of_families)
def test_a_changed_model_is_opened_or_refused(models: Path, drawn: tuple[str, bytes]) -> None:
    name, raw = drawn
    (models / name / "config.json").write_bytes(raw)
    attempt(lambda: Pretrained.open(models / name), LONGEST)


@given(of_families)
def test_a_changed_model_is_planned_or_refused(place: Path, drawn: tuple[str, bytes]) -> None:
    path = place / "config.json"
    path.write_bytes(drawn[1])
    given = LoraConfig(r=4), QuantConfig(), "bfloat16"
    how = {"batch_size": 1, "seq": 64, "gradient_checkpointing": True}
    attempt(lambda: plan_training_memory(read_json_object(path), *given, **how), LONGEST)


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Path:
    """A folder with a sound tokenizer.json."""
    folder = place / "tokenizer"
    folder.mkdir()
    tiny_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", TOKENIZER_FILES)
@given(data=st.data())
def test_a_changed_file_of_a_tokenizer_is_read_or_refused(
    tokenizer: Path, name: str, data: st.DataObject
) -> None:
    for other, value in TOKENIZER_FILES.items():
        (tokenizer / other).write_text(json.dumps(value))
    keys = [*TOKENIZER_FILES[name], "x"]
    (tokenizer / name).write_bytes(data.draw(files(TOKENIZER_FILES[name], keys)))
    attempt(lambda: Tokenizer.from_folder(tokenizer), LONGEST)


@pytest.fixture(scope="module")
def adapter(place: Path) -> tuple[Path, dict[str, Any]]:
    """A sound adapter's folder, and its settings."""
    adapter_of(place, CONFIGS["llama"], ("q_proj",))
    folder = place / "adapter"
    return folder, json.loads((folder / "adapter_config.json").read_text())


@given(data=st.data())
def test_a_changed_adapter_is_opened_or_refused(
    adapter: tuple[Path, dict[str, Any]], data: st.DataObject
) -> None:
    folder, config = adapter
    keys = [*config, "lora_bias", "exclude_modules"]
    (folder / "adapter_config.json").write_bytes(data.draw(files(config, keys)))
    attempt(lambda: lora_config(load_adapter(folder)[1]), LONGEST)
