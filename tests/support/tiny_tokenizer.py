"""A byte-level tokenizer made on the spot: every byte is a token, so nothing is unknown."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from qlora_wgpu.data import Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def tiny_backend(bos: bool = True, merges: tuple[tuple[str, str], ...] = ()):
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [left + right for left, right in merges]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return backend


def tiny_tokenizer(
    bos: bool = True,
    merges: tuple[tuple[str, str], ...] = (),
    chat_template: str | None = None,
    eos: bool = True,
) -> Tokenizer:
    special = {"bos_token": "<s>", "unk_token": "<unk>", **({"eos_token": "</s>"} if eos else {})}
    return Tokenizer(tiny_backend(bos, merges), special, chat_template)


def write_folder(folder: Path, config: dict | None = None, **backend) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tiny_backend(**backend).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def trained_text(tokenizer: Tokenizer, ids, labels) -> str:
    """The text of the tokens that the loss is taken on, special tokens included."""
    assert len(ids) == len(labels)
    assert all(label in (-100, i) for i, label in zip(ids, labels, strict=True))
    return tokenizer.decode([i for i in labels if i != -100], skip_special_tokens=False)
