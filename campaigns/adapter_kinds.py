"""What is walked: small bases of several families, and every kind of adapter on them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.tiny import write_chats, write_weights
from support.gguf_files import byte_vocabulary, random_weights, write_model

from qlora_wgpu.checkpoint import ModelFolder

VOCAB = 262  # what the tokenizer has: an added token makes the matrices larger
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "tied": _LLAMA,
    "untied": _LLAMA | {"tie_word_embeddings": False},
    "biased": _LLAMA | {"model_type": "qwen2", "tie_word_embeddings": False,
                        "use_sliding_window": False},
    "gemma": _LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 16,
                       "final_logit_softcapping": 6.0, "attn_logit_softcapping": 20.0,
                       "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None,
                       "rms_norm_eps": 1e-6},
    "mixture": _LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 32, "norm_topk_prob": True,
                         "mlp_only_layers": [], "decoder_sparse_step": 1,
                         "tie_word_embeddings": False},
    "file": _LLAMA | {"tie_word_embeddings": False},
}  # fmt: skip
IN_GGUF = {"file"}
"""Bases that runs take from a GGUF file; PyTorch has the same in a folder."""


@dataclass(frozen=True)
class Kind:
    """A kind of adapter.

    Attributes:
        name: What it is called here.
        base: One of ``BASES``.
        lora: The run's section ``lora``.
        model: The run's section ``model``, but for the path.
        peft: PEFT's settings, where PEFT makes the adapter and no run does.
        refused: By verb, a part of the sentence with which it is refused, where it has to be.
    """

    name: str
    base: str
    lora: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    peft: dict[str, Any] | None = None
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The kind and its base."""
        return f"{self.name}, {self.base}"

    @property
    def base_path(self) -> str:
        """What a run names as its base, in the folder of all."""
        return f"{self.base}.gguf" if self.base in IN_GGUF else self.base

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return self.label.replace(", ", "-").replace(" ", "-")


def _each(name: str, bases: str, refused: dict[str, str] | None = None, **more: Any) -> list[Kind]:
    return [Kind(name, base, refused=refused or {}, **more) for base in bases.split()]


_EXPERTS = {"target_modules": r".*\.(q_proj|gate_proj|up_proj|down_proj)"}
_TYING = {"ensure_weight_tying": True}
_BOTH = ["lm_head", "embed_tokens"]
_NO_PAGE = {"web": "is not supported in a browser"}
_ONE_MATRIX = {"gguf_adapter": "embedding and head are one matrix"}
_TOGETHER = "cannot be loaded together with others"
_ALONE = {"second": _TOGETHER, "serve": _TOGETHER}
_NO_DORA = {"gguf_adapter": "is a DoRA adapter, which llama.cpp does not support"}
_NO_ROWS = {**_ALONE, **_NO_PAGE, "gguf_adapter": "has trained rows of the embedding"}
_NOT_WHOLE = {**_ALONE, **_NO_PAGE, "gguf_adapter": "(modules_to_save), which llama.cpp's"}
_CHANGES_BASE = {
    "serve": "no other adapter can be added", "web": "changes the base",
    "merge_nf4": "merge it into the original weights",
}  # fmt: skip
_BIASES = {"gguf_adapter": "only inference and merging support"}


def _whole(name: str, modules: list[str]) -> list[Kind]:
    some = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": modules}
    kinds = _each(name, "untied", _NOT_WHOLE, lora=some)
    return kinds + _each(name, "tied gemma", _NOT_WHOLE, lora=some | _TYING)


def _ends(name: str, targets: list[str]) -> list[Kind]:
    lora, tied = {"target_modules": ["q_proj", *targets]}, "tied gemma"
    kinds = _each(name, "untied", _NO_PAGE, lora=lora)
    return kinds + _each(name, tied, _NO_PAGE | _ONE_MATRIX, lora=lora)


KINDS = [
    *_each("plain", "tied untied biased gemma mixture file"),
    *_each("dora", "tied biased gemma", _NO_DORA, lora={"use_dora": True}),
    *_each("dora", "mixture", _NO_DORA,
           lora={"use_dora": True, "target_modules": ["q_proj", "v_proj"]}),
    *_each("dora rslora", "untied", _NO_DORA,
           lora={"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 2}}),
    *_each("rslora", "biased mixture", lora={"use_rslora": True}),
    *_each("pissa", "tied mixture", _CHANGES_BASE, lora={"init_lora_weights": "pissa"}),
    *_each("olora", "gemma biased", _CHANGES_BASE, lora={"init_lora_weights": "olora"}),
    *_ends("head", ["lm_head"]),
    *_ends("embedding", ["embed_tokens"]),
    *_ends("ends", _BOTH),
    *_whole("whole head", ["lm_head"]),
    *_whole("whole embedding", ["embed_tokens"]),
    *_whole("whole both", _BOTH),
    *_each("rows", "tied untied gemma file", _NO_ROWS, lora={"trainable_token_indices": [3, 4]}),
    *_each("rows of the head", "untied", _NO_ROWS,
           lora={"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3, 4]}}),
    *_each("added", "tied untied gemma mixture", _NO_ROWS, model={"add_tokens": ["what is"]}),
    *_each("experts", "mixture", lora=_EXPERTS),
    *_each("patterns", "biased", lora={"rank_pattern": {"q_proj": 2, "down_proj": 8},
                                       "alpha_pattern": {"v_proj": 3}}),
    *_each("layers", "tied", lora={"layers_to_transform": [1]}),
    *_each("biases", "biased", _BIASES, peft={
        "target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "all"}),
    *_each("one layer", "tied", peft={"target_modules": ["q_proj"], "layers_to_transform": 0}),
    *_each("names of others", "tied", peft={
        "target_modules": ["q_proj", "c_attn"], "init_lora_weights": "mica"}),
    *_each("whole and named", "untied", _NOT_WHOLE, peft={
        "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}),
    *_each("parameters", "mixture", peft={
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
]  # fmt: skip


def write_base(folder: Path, config: dict[str, Any]) -> None:
    """A random model with a byte-level tokenizer that llama.cpp knows."""
    folder.mkdir(parents=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    tensors = random_weights(kept)
    for name, array in tensors.items():
        if "norm" not in name and "embed" not in name:
            tensors[name] = array * array.dtype.type(0.5 if array.ndim > 1 else 1.0)
    write_weights(folder, tensors)
    vocabulary = folder.parent / "vocabulary.gguf"
    keys = byte_vocabulary(TEMPLATE)
    if folder.name in IN_GGUF:
        write_model(folder.with_suffix(".gguf"), kept, tensors, keys=keys)
    if not vocabulary.exists():
        write_model(vocabulary, _LLAMA, random_weights(_LLAMA), keys=keys)
    texts = ModelFolder.without_weights(vocabulary).text_folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((texts / name).read_bytes())


def write_place(place: Path, bases: set[str]) -> None:
    """The bases, and the data of all runs."""
    for name in sorted(bases):
        write_base(place / name, BASES[name])
    write_chats(place / "train.jsonl", 24)
    write_chats(place / "eval.jsonl", 4, seed=1)
