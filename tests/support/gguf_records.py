"""What models become as GGUF files, and what such files are read as, in hashes to compare.

``tools/gguf_records.py`` records them. A case is a model of a kind that llama.cpp has: its file, an
adapter's file, and what both ways make of it where something in it is otherwise.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.exporting.gguf import export_gguf
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gguf.architectures import architecture_for, model_type_of
from qlora_wgpu.gguf.config import model_keys, read_config, rope_tensors
from qlora_wgpu.gguf.folder import GGUFFolder
from support.gguf_models import ROPES, adapter_of, changed, folder_of, written

RECORDS = Path(__file__).parents[1] / "gguf" / "records.json"
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [1.5, 2.5, 3.5, 4.5, 5.5, 6.5],
}  # fmt: skip
# What a config.json may say otherwise, beside its keys that are flags
OTHERS: list[dict[str, Any]] = [
    *({"rope_parameters": rope, "rope_scaling": None} for rope in (*ROPES.values(), LONG)),
    {"rope_parameters": ROPES["yarn"] | {"beta_fast": 8.0}},
    {"hidden_act": "gelu"}, {"hidden_act": "relu2", "hidden_activation": "relu"},
    {"sliding_window": 5, "use_sliding_window": True}, {"sliding_window": None},
    {"layer_types": None}, {"num_hidden_layers": 4, "layer_types": None},
    {"layer_types": ["full_attention", "sliding_attention"]},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"layer_types": ["sliding_attention", "sliding_attention"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"head_dim": 8}, {"num_key_value_heads": 1}, {"tie_word_embeddings": False},
    {"final_logit_softcapping": 3.0}, {"attn_logit_softcapping": 3.0},
    {"final_logit_softcapping": None}, {"query_pre_attn_scalar": 9}, {"logit_scale": 0.3},
    {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 7.0},
    {"rms_norm_eps": 3e-4, "layer_norm_eps": 3e-4, "norm_eps": 3e-4},
    {"max_position_embeddings": None}, {"max_position_embeddings": 77},
    {"first_k_dense_replace": 9}, {"first_k_dense_replace": 0}, {"moe_layer_start_index": 0},
    {"routed_scaling_factor": 2.5}, {"n_group": 1, "topk_group": 1}, {"topk_group": 2},
    {"conv_L_cache": 1}, {"clip_qkv": 2.0}, {"swiglu_limit": 5.0}, {"q_lora_rank": None},
    {"linear_key_head_dim": 8}, {"partial_rotary_factor": 0.5}, {"vocab_size": 128},
]  # fmt: skip
_COMPUTED = ("ssm_a", "A_log", "rope_freqs.weight")  # of which processors round the last digit
# Keys that a file may have beside its own, without the architecture's name
KEYS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True, False), "attention.value_length": (6,), "attention.scale": (0.3,),
    "attention.key_length": (10,), "attention.clamp_kqv": (0.0, 3.0), "some.key": (3,),
    "attention.sliding_window": (0, 9), "attention.sliding_window_pattern": (0, 2, 3, -1),
    "attention.temperature_scale": (0.2,), "attention.layer_norm_epsilon": (1e-5, 1e-3),
    "rope.dimension_count": (4,), "rope.freq_base_swa": (777.0,), "rope.scale_linear": (2.0,),
    "rope.dimension_sections": (3,), "rope.scaling.type": ("none", "su", "yarn", "longrope"),
    "rope.scaling.factor": (3.0,), "rope.scaling.attn_factor": (1.25,),
    "rope.scaling.yarn_beta_fast": (8.0,), "rope.scaling.yarn_ext_factor": (1.0, 2.0),
    "rope.scaling.yarn_log_multiplier": (0.1,), "rope.scaling.original_context_length": (64,),
    "rope.scaling.finetuned": (True,), "use_parallel_residual": (True, False),
    "expert_count": (0, 3), "expert_used_count": (2,), "expert_feed_forward_length": (20,),
    "expert_shared_feed_forward_length": (0, 8), "expert_shared_count": (1,),
    "expert_gating_func": (0, 1, 2, 3), "expert_weights_norm": (True, False),
    "expert_weights_scale": (0.0, 1.0, 2.0), "expert_group_count": (2,),
    "leading_dense_block_count": (0,), "interleave_moe_layer_step": (2,),
    "nextn_predict_layers": (1,), "logit_scale": (0.5,), "embedding_scale": (2.0,),
    "residual_scale": (0.5,), "final_logit_softcapping": (0.0, 9.0),
    "attn_logit_softcapping": (9.0,), "full_attention_interval": (0, 2), "vocab_size": (12,),
}  # fmt: skip
TENSORS = ("blk.0.attn_sinks.weight", "blk.1.attn_q.scale", "cls.weight", "blk.9.attn_norm.weight",
           "blk.0.attn_rot_embd.weight", "blk.0.ffn_gate_exps.weight")  # fmt: skip


def record(
    case: str, place: Path, told: Callable[[str, Any], None] = lambda what, value: None
) -> dict[str, str]:
    """The hashes of a case.

    Args:
        case: A key of ``CHANGES``.
        place: An empty folder.
        told: Called with all that is hashed.
    """
    hashes: dict[str, str] = {}

    def add(what: str, value: Any) -> None:
        value = _plain(value, str(place))
        told(what, value)
        hashes[what] = _digest(json.dumps(value).encode())

    folder_of(place, changed(case), adapter=False)
    adapter_of(place, changed(case), whole=True)
    _, file, made = written(place)
    add("keys", [[key, type(v).__name__, v] for key, v in file.file.metadata.items()])
    add("notes", made.notes)
    add("tensors", _tensors(file))
    add("config", sorted(file.config.items()))
    add("weights", [_weight(file, name) for name in sorted(file.names())])
    add("q8_0", _outcome(lambda: _tensors(written(place, "q8_0")[1])))
    again = place / "f32.gguf"
    add("again", _outcome(lambda: _tensors(written(place, "bf16", base=again)[1])))
    adapter = place / "adapter.gguf"
    add("adapter", _outcome(lambda: export_gguf(place, place / "adapter", adapter)))
    if adapter.exists():
        add("adapter's file", _digest(adapter.read_bytes()))
    add("other configs", _other_configs(changed(case)))
    outcomes = _other_files(again)
    add("other files", {w: o[0] if isinstance(o, list) else o for w, o in outcomes.items()})
    add("other places", {w: o[1] for w, o in outcomes.items() if isinstance(o, list)})
    return hashes


def _tensors(folder: GGUFFolder) -> list[Any]:
    return [[name, *_stored(folder.file, name)] for name in folder.file.names()]


def _outcome(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as err:  # a fault, too, is to stay what it is until it is mended
        return f"{type(err).__name__}: {err}"


def _other_configs(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of config.jsons that differ in one thing, or why there are none."""
    flags = [{key: not value} for key, value in config.items() if isinstance(value, bool)]
    gone = [{key: ...} for key in config if key != "model_type"]
    return {
        json.dumps(others, default=str): _outcome(lambda others=others: _keys(config, others))
        for others in (*OTHERS, *flags, *gone)
    }


def _keys(config: dict[str, Any], others: dict[str, Any]) -> Any:
    own = {key: value for key, value in {**config, **others}.items() if value is not ...}
    try:
        architecture = find_family(own).read(own)
    except QLoRAError:
        return "no model"
    model_type = model_type_of(own)
    llama_cpp = architecture_for(own, architecture, "models")
    keys = model_keys(model_type, own, architecture.config, llama_cpp)
    return [list(keys.values.items()), keys.notes, rope_tensors(keys)]


def _other_files(path: Path) -> dict[str, Any]:
    """What is read of files that differ in one key or tensor, or why nothing is."""
    file = GGUFFile(path)
    metadata = dict(file.metadata)
    architecture = metadata["general.architecture"]
    outcomes: dict[str, Any] = {}

    def read(what: str) -> None:
        outcomes[what] = _outcome(lambda: _read(file))

    for key, value in metadata.items():
        for other in (..., *_others(value)):
            file.metadata = {k: v for k, v in metadata.items() if k != key or other is not ...}
            if other is not ...:
                file.metadata[key] = other
            read(f"{key} {_plain(other)}")
    for key, values in KEYS.items():
        for value in values:
            file.metadata = metadata | {f"{architecture}.{key}": value}
            read(f"{key} = {value}")
    file.metadata = metadata
    tensors = dict(file._tensors)
    for name in [
        name for name in tensors if not name.startswith("blk.") or name[4:6] in ("0.", "1.")
    ]:
        file._tensors = {own: tensor for own, tensor in tensors.items() if own != name}
        read(f"without {name}")
    for name in TENSORS:
        file._tensors = {**tensors, name: tensors["token_embd.weight"]}
        read(f"with {name}")
    return outcomes


def _read(file: GGUFFile) -> Any:
    config = copy.deepcopy(read_config(file))
    file._made = {}
    return [config, _outcome(lambda: _shapes(GGUFFolder(file)))]


def _shapes(folder: GGUFFolder) -> Any:
    return sorted((name, folder[name].shape) for name in folder.names())


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, 3]
    if isinstance(value, int):
        return [value + 1, 0, "x", np.array([value, value + 1], np.uint32)]
    if isinstance(value, float):
        return [2 * value + 1, 0.0, float("nan"), "x"]
    if isinstance(value, np.ndarray):
        return [value[:-1], value[::-1], 2]
    return [4]


def _plain(value: Any, place: str = "") -> Any:
    """A value as JSON has it, its numbers as all processors compute them."""
    if isinstance(value, dict):
        return {str(key): _plain(own, place) for key, own in value.items()}
    if isinstance(value, np.ndarray):
        return [value.dtype.str, _plain(value.tolist())]
    if isinstance(value, list | tuple):
        return [_plain(own, place) for own in value]
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value.replace(place, "PLACE") if place and isinstance(value, str) else value


def _stored(file: GGUFFile, name: str) -> tuple[Any, ...]:
    tensor = file.tensor(name)
    digest = "" if name.endswith(_COMPUTED) else _digest(tensor.data)
    return tensor.place.shape, tensor.place.type.name, digest


def _weight(folder: GGUFFolder, name: str) -> list[Any]:
    digest = "" if name.endswith(_COMPUTED) else _digest(folder[name].read())
    return [name, folder[name].shape, folder[name].stored_dtype, digest]


def _digest(data: Any) -> str:
    """A short hash of bytes, or of an array's."""
    raw = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
    return hashlib.sha256(raw).hexdigest()[:16]
