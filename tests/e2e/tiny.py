"""A tiny random Llama with a tokenizer, written as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,:?!'0123456789\n"
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
VOCAB = 83  # odd, and more than the tokenizer knows, as many models pad theirs
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}


def weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    from qlora_wgpu.families.family import find_family

    architecture = find_family(config).read(config)
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.15) -> np.ndarray:
        return np.asarray(scale * rng.standard_normal(shape), np.float32)

    tensors = {architecture.embed_name: normal(config["vocab_size"], config["hidden_size"])}
    if not architecture.tied:
        tensors[architecture.head_name] = normal(config["vocab_size"], config["hidden_size"])
    for spec in architecture.every_linear:
        tensors[f"{spec.name}.weight"] = normal(spec.out_features, spec.in_features)
        if spec.bias:
            tensors[f"{spec.name}.bias"] = normal(spec.out_features)
    for name, shape in architecture.stored_norms.items():
        tensors[name] = np.asarray(1 + normal(*shape))
    return tensors


def write_tokenizer(folder: Path) -> None:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The float32 values cut to bfloat16's 16 bits, as those bits."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _write_bfloat16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file by hand: NumPy has no bfloat16."""
    header, body = {}, b""
    for name, array in tensors.items():
        raw = to_bfloat16(array).tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": offsets}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_weights(
    folder: Path, tensors: dict[str, np.ndarray], *, store: str = "float32", shards: int = 1
) -> None:
    """Writes model.safetensors, or several shards with their index."""
    names = sorted(tensors)
    index = {}
    for i in range(shards):
        part = {name: tensors[name] for name in names[i::shards]}
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        if store == "bfloat16":
            _write_bfloat16(folder / file, part)
        else:
            save_file({name: array.astype(store) for name, array in part.items()}, folder / file)
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_model(
    folder: Path, *, seed: int = 0, store: str = "float32", shards: int = 1, **changes: object
) -> Path:
    """Writes the folder; ``changes`` are keys of config.json, None leaves one out."""
    config = {**CONFIG, **changes}
    config = {key: value for key, value in config.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, weights(config, seed), store=store, shards=shards)
    write_tokenizer(folder)
    return folder


def write_chats(path: Path, rows: int = 24, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        a, b = rng.integers(0, 10, 2)
        chat = [
            {"role": "user", "content": f"what is {a} and {b}?"},
            {"role": "assistant", "content": f"{a}{b}."},
        ]
        lines.append(json.dumps({"messages": chat}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_pairs(path: Path, rows: int = 14, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        a, b = rng.integers(0, 10, 2)
        prompt = [{"role": "user", "content": f"what is {a} and {b}?"}]
        answers = (f"{a}{b}.", f"{b}{a}" * int(rng.integers(1, 6)))
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
        lines.append(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}))
    path.write_text("\n".join(lines) + "\n")
    return path
