"""The files of a Hugging Face tokenizer, made from a GGUF file's vocabulary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.errors import TokenizerError, brief

Part = dict[str, Any]

# ---- the vocabulary ------------------------------------------------------------------------------

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "▁"
_MAX_PIECE = 512  # characters; SentencePiece's default is 16
_BPE, _SPM = "gpt2", "llama"
_PAIRED = "gemma4"  # SentencePiece's, but with merges in the file
# A chat model ends its turn with one of these, whether or not the file lists it besides the EOS
# token; llama.cpp stops there, too.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|return|>")
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "sep": "seperator"}


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files."""

    tokenizer: dict[str, Any]  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    generation: dict[str, Any]  # generation_config.json


def tokenizer_files(metadata: Mapping[str, Any], path: Path) -> TokenizerFiles:
    """The contents of a tokenizer's files, from a GGUF file's metadata."""
    return _Vocabulary(metadata, path).files()


class _Vocabulary:
    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._values = {
            key.removeprefix(_PREFIX): value
            for key, value in metadata.items()
            if key.startswith(_PREFIX)
        }
        self._path = path
        self._template = metadata.get("tokenizer.chat_template")
        self._is_phi3 = metadata.get("general.architecture") == "phi3"
        self._model = self._values.get("model")
        if self._model not in (_BPE, _SPM, _PAIRED):
            raise self._error(
                f"has a vocabulary of the kind {brief(self._model)}, which is not supported "
                f"(supported: {_BPE}, {_SPM}, {_PAIRED})"
            )
        self._tokens = self._texts("tokens")
        self._types = self._numbers("token_type", len(self._tokens))
        self._pre = self._pre_tokenizer() if self._model == _BPE else None

    def files(self) -> TokenizerFiles:
        added = [self._added(i) for i in range(len(self._tokens)) if self._is_added(i)]
        special = {name: self._special_id(key) for name, key in _ROLES.items()}
        bos, eos = self._added_token("bos", special), self._added_token("eos", special)
        parts = self._byte_parts() if self._pre is not None else self._sentence_piece_parts()
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            **parts,
            "post_processor": self._post_processor(bos, eos, parts["post_processor"]),
        }
        config = {
            **{f"{name}_token": self._tokens[i] for name, i in special.items() if i is not None},
            "add_bos_token": bos is not None,
            "add_eos_token": eos is not None,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if isinstance(self._template, str):
            config["chat_template"] = self._template
        ends = self._end_tokens(special["eos"])
        return TokenizerFiles(tokenizer, config, {"eos_token_id": ends} if ends else {})

    # -- metadata ----------------------------------------------------------------------------

    def _error(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"{self._path} {what}: use the model's safetensors version with its own tokenizer.json"
        )

    def _texts(self, key: str) -> list[str]:
        values = self._values.get(key)
        if not isinstance(values, list) or not values:
            raise self._error(f"has no {_PREFIX}{key}")
        # SentencePiece's pieces may be parts of a character.
        return [value.decode("utf-8", "replace") for value in values]

    def _numbers(self, key: str, count: int) -> list[Any]:
        values = self._values.get(key)
        if not isinstance(values, np.ndarray) or len(values) != count:
            raise self._error(f"has no {_PREFIX}{key} for each of {count:,} tokens")
        return list(values.tolist())

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._values.get("pre")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise self._error(
                f"has the pre-tokenizer {brief(name)}, which is not supported (supported: "
                f"{', '.join(PRE_TOKENIZERS)})"
            )
        return PRE_TOKENIZERS[name]

    def _special_id(self, key: str) -> int | None:
        number = self._values.get(f"{key}_token_id")
        is_one = type(number) is int and 0 <= number < len(self._tokens)
        return number if is_one else None

    def _added_token(self, name: str, special: Mapping[str, int | None]) -> int | None:
        """The BOS or EOS token, if it is added to each text."""
        default = name == "bos" and (self._pre is None or self._pre.adds_bos)
        return special[name] if self._values.get(f"add_{name}_token", default) is True else None

    def _end_tokens(self, eos: int | None) -> list[int]:
        named = [eos, *(self._special_id(key) for key in ("eot", "eom"))]
        ids = [i for i in named if i is not None]
        kinds = (_CONTROL, _USER_DEFINED)
        known = {
            text: i
            for i, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in kinds and text in _ENDS_OF_TURN
        }
        return list(dict.fromkeys([*ids, *known.values()]))

    def _is_added(self, i: int) -> bool:
        kinds = (_CONTROL, _USER_DEFINED, *((_UNKNOWN,) if self._model != _BPE else ()))
        return self._types[i] in kinds and bool(self._tokens[i])

    def _added(self, i: int) -> Part:
        text, is_special = self._tokens[i], self._types[i] != _USER_DEFINED
        # Phi 3's turn tokens absorb the spaces after them, which no key describes.
        rstrip = self._is_phi3 and self._model == _SPM and is_special and text not in _PHI3_PLAIN
        return {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": rstrip,
            "normalized": False,
            "special": is_special,
        }

    # -- tokenizer.json ----------------------------------------------------------------------

    def _vocab(self) -> dict[str, int]:
        """Ids by token; the first one of duplicates."""
        vocab: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind != _UNUSED or text != f"[PAD{i}]":  # llama.cpp's padding of the vocabulary
                vocab.setdefault(text, i)
        return vocab

    def _pairs(self) -> list[tuple[str, str]]:
        """The file's merges in order."""
        pairs = [pair for merge in self._texts("merges") if (pair := merge_pair(merge))]
        if len(pairs) < len(self._values["merges"]):
            raise self._error(f"has a value in {_PREFIX}merges that is not a pair")
        return pairs

    def _byte_parts(self) -> Part:
        """The parts of tokenizer.json for text as bytes, as in GPT-2."""
        assert self._pre is not None
        decoder = {**_byte_level(True), "add_prefix_space": True}
        return {
            "normalizer": self._pre.normalizer,
            "pre_tokenizer": self._pre.pre_tokenizer,
            "post_processor": {**decoder, "trim_offsets": False},
            "decoder": decoder,
            "model": bpe_model(self._vocab(), self._pairs(), ignore_merges=self._pre.ignore_merges),
        }

    def _sentence_piece_parts(self) -> Part:
        """Its parts for text as characters with ``▁`` for spaces."""
        is_paired = self._model == _PAIRED
        prefix = not is_paired and self._values.get("add_space_prefix", True) is True
        vocab = self._vocab()
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = {"type": "Prepend", "prepend": _SPACE}
        decoders = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
        ]
        unknown = self._special_id("unknown")
        merges = self._pairs() if is_paired else self._merges(vocab)
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([prepend] if prefix else []), replace],
            },
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": bpe_model(
                vocab,
                merges,
                unk_token=None if unknown is None else self._tokens[unknown],
                byte_fallback=True,
            ),
        }

    def _merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """SentencePiece's merges in order: all pairs that form a piece, by the piece's score."""
        scores = self._numbers("scores", len(self._tokens))
        skipped = {i for i in range(len(self._tokens)) if self._is_added(i)}
        pieces = {text: i for text, i in vocab.items() if i not in skipped}
        # If all scores are equal, ids are in order, except that runs of spaces come last.
        if len({scores[i] for i in pieces.values()}) == 1:
            scores = [float(bool(token.strip(_SPACE))) for token in self._tokens]
        found = []
        for text, i in pieces.items():
            score = scores[i]
            if math.isnan(score):
                raise self._error(f"has a score in {_PREFIX}scores that is not a number")
            if len(text) > _MAX_PIECE:
                raise self._error(
                    f"has a piece of {len(text):,} characters, more than the {_MAX_PIECE} allowed"
                )
            for at in range(1, len(text)):
                left, right = text[:at], text[at:]
                if left in pieces and right in pieces:
                    found.append(((-score, i, pieces[left], pieces[right]), left, right))
        return [(left, right) for _, left, right in sorted(found)]

    def _post_processor(self, bos: int | None, eos: int | None, alone: Part | None) -> Part | None:
        """``post_processor`` of tokenizer.json: adds BOS and EOS tokens."""
        ends = [i for i in (bos, eos) if i is not None]
        if not ends:
            return alone

        def sequence(name: str, kind: int) -> list[Part]:
            text = {"Sequence": {"id": name, "type_id": kind}}
            first, last = (
                [] if i is None else [{"SpecialToken": {"id": self._tokens[i], "type_id": kind}}]
                for i in (bos, eos)
            )
            return [*first, text, *last]

        special = {
            self._tokens[i]: {"id": self._tokens[i], "ids": [i], "tokens": [self._tokens[i]]}
            for i in ends
        }
        template = {
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": sequence("A", 0) + sequence("B", 1),
            "special_tokens": special,
        }
        if alone is None:
            return template
        return {"type": "Sequence", "processors": [alone, template]}


# ---- BPE models ----------------------------------------------------------------------------------


def bpe_model(vocab: Mapping[str, int], merges: list[Any], **more: Any) -> dict[str, Any]:
    """``model`` of tokenizer.json."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bool(more.get("byte_fallback")),
        "byte_fallback": False,
        "ignore_merges": False,
        **more,
        "vocab": vocab,
        "merges": merges,
    }


def merge_pair(merge: str) -> tuple[str, str] | None:
    """The two tokens that a merge joins; the first may begin with a space."""
    left, space, right = merge[1:].partition(" ")
    return (merge[:1] + left, right) if space and right else None


# ---- pre-tokenizers ------------------------------------------------------------------------------


def _byte_level(use_regex: bool) -> Part:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(expression: str) -> Part:
    return {
        "type": "Split",
        "pattern": {"Regex": expression},
        "behavior": "Isolated",
        "invert": False,
    }


def _sequence(*parts: Part) -> Part:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words."""

    pre_tokenizer: Part  # of tokenizer.json
    normalizer: Part | None = None  # of tokenizer.json
    ignore_merges: bool = False  # whether a word that is a token is not split by merges
    adds_bos: bool = False  # the default of add_bos_token


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _words(digits: str) -> str:
    """GPT-4's words, with numbers that match ``digits``."""
    return rf"{_ENDINGS}|{_OTHER}\p{{L}}+|{digits}|{_SIGNS}|{_SPACES}"


_MARKED = (  # GPT-4's, where marks belong to letters
    rf"{_ENDINGS}|{_OTHER}[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_CASED = (  # GPT-4o's, where capitals begin a word
    rf"{_OTHER}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_OTHER}{_UPPER}+{_LOWER}*{_ENDINGS}?|"
    rf"\p{{N}}{{1,3}}|{_SLASHED}|{_SPACES}"
)
_TEKKEN = rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}|{_SPACES}"
_SIGNED = (  # DeepSeek-V3's: a sign may begin a word, marks belong to letters
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_ENDINGS}|{_OTHER}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_NFC = {"type": "NFC"}

_GPT2 = PreTokenizer(_byte_level(True))
_DIGITS = PreTokenizer(_sequence({"type": "Digits", "individual_digits": True}, _byte_level(True)))
_LLAMA3 = PreTokenizer(
    _sequence(_split(_words(r"\p{N}{1,3}")), _byte_level(False)), ignore_merges=True, adds_bos=True
)
_PLAIN = PreTokenizer(_sequence(_split(_words(r"\p{N}{1,3}")), _byte_level(False)))
_QWEN2 = PreTokenizer(_sequence(_split(_words(r"\p{N}")), _byte_level(False)), _NFC)
_QWEN35 = PreTokenizer(_sequence(_split(_MARKED), _byte_level(False)), _NFC)
_GPT4O = PreTokenizer(_sequence(_split(_CASED), _byte_level(False)))
_MISTRAL = PreTokenizer(
    _sequence(_split(_TEKKEN), _byte_level(False)), ignore_merges=True, adds_bos=True
)
_DEEPSEEK = PreTokenizer(
    _sequence(
        _split(r"\p{N}{1,3}"), _split("[一-龥\u3040-ゟ゠-ヿ]+"), _split(_SIGNED), _byte_level(False)
    )
)

PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PLAIN),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.pre_tokenizer, adds_bos=True),
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _MISTRAL,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "seed-coder": PreTokenizer(_sequence(_split(_SEED), _byte_level(False))),
    **dict.fromkeys(("command-r", "exaone"), _DIGITS),
    "exaone4": _GPT2,
    "lfm2": _LLAMA3,
    "glm4": PreTokenizer(_PLAIN.pre_tokenizer, ignore_merges=True),
    "chatglm-bpe": _PLAIN,
    "hunyuan": PreTokenizer(_QWEN2.pre_tokenizer),
}
"""By the value of ``tokenizer.ggml.pre``.

The expressions are those of the families' tokenizer.json, not llama.cpp's versions of them.
"""

BY_ASCII = ("gpt-4o", "llama4", "tekken")
"""Pre-tokenizers for which llama.cpp distinguishes upper and lower case in ASCII only."""


def with_ascii_capitals(name: str, pre_tokenizer: Part) -> Part:
    """llama.cpp's version of ``BY_ASCII``, where letters beyond ASCII are both upper and lower."""
    if name not in BY_ASCII:
        return pre_tokenizer
    text = json.dumps(pre_tokenizer)
    for unicode, excluded in ((_UPPER, "a-z"), (_LOWER, "A-Z")):
        letters = rf"(?:(?=\p{{L}})[^{excluded}])"
        text = text.replace(json.dumps(unicode)[1:-1], json.dumps(letters)[1:-1])
    changed: Part = json.loads(text)
    return changed
