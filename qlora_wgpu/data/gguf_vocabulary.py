"""A tokenizer's files as the keys ``tokenizer.*`` of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.data.gguf_pre_tokenizer import pre_tokenizer_name
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import TokenizerError, brief
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import TOKENIZER_BYTES

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
_MORE_ENDS = ("eot", "eom")
_PREFIX = "tokenizer.ggml."
_TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the others are in no text
_PAIRED = "gemma4"


def vocabulary_keys(
    tokenizer: Tokenizer,
    folder: Path,
    vocab_size: int,
    where: object = "tokenizer.json",
    *,
    prompt: str | None = None,
    joins_pairs: bool = False,
) -> dict[str, Any]:
    """The keys.

    llama.cpp puts nothing around a prompt but what they say: what it begins with goes by the
    prompts that were trained, and nothing ends it.

    Args:
        tokenizer: The tokenizer.
        folder: The folder that it was read from.
        vocab_size: Rows of the embedding, each of which has a token in the file.
        where: What messages call tokenizer.json.
        prompt: A prompt as the chat template writes it; None where prompts are plain text, around
            which the tokenizer puts its own special tokens.
        joins_pairs: Whether llama.cpp has a vocabulary with bytes for what is no token joined by
            its merges, as it has Gemma 4's, instead of by scores.

    Raises:
        TokenizerError: If it is none that llama.cpp has.
    """
    path = folder / "tokenizer.json"
    stored = json.loads(file_bytes(path, TOKENIZER_BYTES))
    vocabulary = _Vocabulary(stored, where, vocab_size)
    keys = vocabulary.keys(joins_pairs, prompt)
    keys |= _special_keys(tokenizer, vocab_size, prompt)
    named = {f"{_PREFIX}{key}": value for key, value in keys.items()}
    if tokenizer.chat_template:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    return named


def _special_keys(tokenizer: Tokenizer, vocab_size: int, prompt: str | None) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, role in _ROLES.items():
        text = tokenizer.special_tokens.get(f"{name}_token")
        token = None if text is None else tokenizer.token_id(text)
        if token is not None and token < vocab_size:
            keys[f"{role}_token_id"] = token
    bos = tokenizer.bos_token
    begins = bos is not None and prompt is not None and prompt.startswith(bos)
    keys["add_bos_token"] = tokenizer.begins_with_bos if prompt is None else begins
    keys["add_eos_token"] = False
    others = sorted(tokenizer.eos_token_ids - {tokenizer.eos_token_id})
    for name, token in zip(_MORE_ENDS, others, strict=False):
        keys[f"{name}_token_id"] = token
    return keys


class _Vocabulary:
    def __init__(self, stored: dict[str, Any], where: object, vocab_size: int) -> None:
        self._stored, self._where, self._size = stored, where, vocab_size
        self._model = stored.get("model") or {}
        if self._model.get("type", "BPE") != "BPE" or not self._model.get("vocab"):
            raise self._wrong(f"is of the kind {brief(self._model.get('type'))}, not BPE")
        self._added = {
            int(token["id"]): token for token in stored.get("added_tokens") or [] if "id" in token
        }
        self._vocab: dict[int, str] = {i: text for text, i in self._model["vocab"].items()}
        self._vocab |= {i: token["content"] for i, token in self._added.items()}

    def keys(self, joins_pairs: bool, prompt: str | None) -> dict[str, Any]:
        if self._model.get("byte_fallback"):
            keys = self._sentence_piece(prompt)
            if joins_pairs and not keys["add_space_prefix"]:
                keys |= {"model": _PAIRED, "pre": _PAIRED, "merges": self._merges()}
            return keys
        if "ByteLevel" in set(_kinds(self._stored.get("pre_tokenizer"))):
            return self._byte_level()
        raise self._wrong("is neither byte-level BPE nor SentencePiece's")

    def _wrong(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"{self._where} {what}, so llama.cpp's tokenizers cannot do what it does: keep to "
            "transformers (qlora-wgpu merge)"
        )

    def _byte_level(self) -> dict[str, Any]:
        normalizers = set(_kinds(self._stored.get("normalizer")))
        if not normalizers <= {"NFC", "Sequence"}:
            raise self._wrong(f"changes texts first ({', '.join(sorted(normalizers))})")
        tokens, types = self._tokens()
        return {
            "model": "gpt2",
            "pre": pre_tokenizer_name(self._stored, self._where),
            "tokens": tokens,
            "token_type": types,
            "merges": self._merges(),
        }

    def _merges(self) -> list[str]:
        merges = self._model.get("merges", [])
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]

    def _sentence_piece(self, prompt: str | None) -> dict[str, Any]:
        normalizers = list(_parts(self._stored.get("normalizer")))
        kinds = {part.get("type") for part in normalizers}
        pre = list(_parts(self._stored.get("pre_tokenizer")))
        spaced = [part for part in pre if part.get("type") == "Metaspace"]
        if not kinds <= {"Prepend", "Replace", "Sequence"}:
            raise self._wrong(f"changes texts first ({', '.join(sorted(map(str, kinds)))})")
        schemes = {part.get("prepend_scheme", "always") for part in spaced}
        # llama.cpp has a space behind every special token, or none; the scheme "first" has one at
        # the beginning alone, where a prompt of turns has a special token.
        is_first = "first" in schemes and not self._begins_special(prompt)
        tokens, types = self._tokens()
        self._check_bytes(tokens)
        return {
            "model": "llama",
            "pre": "default",
            "tokens": tokens,
            "scores": self._scores(tokens, types),
            "token_type": types,
            "add_space_prefix": "Prepend" in kinds or "always" in schemes or is_first,
        }

    def _begins_special(self, prompt: str | None) -> bool:
        contents = tuple(token["content"] for token in self._added.values())
        return prompt is not None and prompt.startswith(contents)

    def _check_bytes(self, tokens: Sequence[str]) -> None:
        """Makes sure of a token for each byte of text, without which llama.cpp ends the process."""
        known = set(tokens)
        gone = [f"<0x{i:02X}>" for i in _TEXT_BYTES if f"<0x{i:02X}>" not in known]
        if gone:
            raise self._wrong(
                f"promises a token for every byte (byte_fallback) and has none for {len(gone)} of "
                f"them, such as {gone[0]}"
            )

    def _tokens(self) -> tuple[list[str], np.ndarray[Any, Any]]:
        """The text of each row of the embedding, and what kind of token it is."""
        tokens, types = [], []
        unknown = self._model.get("unk_token")
        is_piece = bool(self._model.get("byte_fallback"))
        for i in range(self._size):
            text = self._vocab.get(i)
            if not text:
                tokens.append(f"[PAD{i}]")
                types.append(_UNUSED)
                continue
            kind = _NORMAL
            if i in self._added:
                is_special = self._added[i].get("special") or _looks_special(text)
                kind = _CONTROL if is_special else _USER_DEFINED
            if is_piece and text == unknown:
                kind = _UNKNOWN
            elif is_piece and kind == _NORMAL and _is_byte(text):
                kind = _BYTE
            # llama.cpp looks for these in the text as it is, where spaces are spaces still.
            tokens.append(text.replace(_SPACE, " ") if kind == _USER_DEFINED else text)
            types.append(kind)
        return tokens, np.array(types, np.int32)

    def _scores(self, tokens: list[str], types: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What SentencePiece prefers: the sooner a piece is made by a merge, the higher.

        tokenizer.json keeps the order of the scores, as that of its merges, but not the scores.
        """
        merges = self._model.get("merges", [])
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
            ranks.setdefault(left + right, rank)
        last = -float(len(merges) + 1)
        scores = [
            -float(ranks.get(text, len(merges))) if kind == _NORMAL else last
            for text, kind in zip(tokens, types.tolist(), strict=True)
        ]
        return np.array(scores, np.float32)


def _looks_special(text: str) -> bool:
    """Whether an added token is of the model's own language, though nothing marks it so."""
    return (text.startswith("<|") and text.endswith("|>")) or (
        text.startswith("<unused") and text.endswith(">")
    )


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer.json, or those of a sequence."""
    if part is None:
        return
    inner = part.get("pretokenizers", part.get("normalizers"))
    if part.get("type") == "Sequence" and isinstance(inner, list):
        for each in inner:
            yield from _parts(each)
    else:
        yield part


def _kinds(part: dict[str, Any] | None) -> Iterator[str]:
    return (str(each.get("type")) for each in _parts(part))
