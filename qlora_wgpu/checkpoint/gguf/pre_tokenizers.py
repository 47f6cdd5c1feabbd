"""How texts are cut before byte-level BPE, by the names that llama.cpp has for it.

A name stands for the expression that a family's tokenizer.json has, not for llama.cpp's rendering
of it in its own engine of expressions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Part = dict[str, Any]


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


def _in_turn(*parts: Part) -> Part:
    return {"type": "Sequence", "pretokenizers": list(parts)}


@dataclass(frozen=True)
class PreTokenizer:
    """How texts are cut.

    Attributes:
        cut: tokenizer.json's ``pre_tokenizer``.
        normalizer: Its ``normalizer``.
        ignore_merges: Whether a word that is a token is taken whole.
        begins: Whether texts begin with the token for that, where no key says it.
    """

    cut: Part
    normalizer: Part | None = None
    ignore_merges: bool = False
    begins: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _words(digits: str) -> str:
    """GPT-4's words, with so many digits in one."""
    return rf"{_ENDINGS}|{_OTHER}\p{{L}}+|{digits}|{_SIGNS}|{_SPACES}"


_MARKED = (  # as GPT-4's, where marks belong to letters
    rf"{_ENDINGS}|{_OTHER}[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_CASED = (  # GPT-4o's, in which capitals begin a word
    rf"{_OTHER}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_OTHER}{_UPPER}+{_LOWER}*{_ENDINGS}?|"
    rf"\p{{N}}{{1,3}}|{_SLASHED}|{_SPACES}"
)
_TEKKEN = rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}|{_SPACES}"
_SIGNED = (  # DeepSeek-V3's words: a sign begins one, marks belong to letters
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_ENDINGS}|{_OTHER}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_NFC = {"type": "NFC"}

_GPT2 = PreTokenizer(_byte_level(True))
_DIGITS = PreTokenizer(_in_turn({"type": "Digits", "individual_digits": True}, _byte_level(True)))
_LLAMA3 = PreTokenizer(
    _in_turn(_split(_words(r"\p{N}{1,3}")), _byte_level(False)), ignore_merges=True, begins=True
)
_PLAIN = PreTokenizer(_in_turn(_split(_words(r"\p{N}{1,3}")), _byte_level(False)))
_QWEN2 = PreTokenizer(_in_turn(_split(_words(r"\p{N}")), _byte_level(False)), _NFC)
_QWEN35 = PreTokenizer(_in_turn(_split(_MARKED), _byte_level(False)), _NFC)
_GPT4O = PreTokenizer(_in_turn(_split(_CASED), _byte_level(False)))
_MISTRAL = PreTokenizer(
    _in_turn(_split(_TEKKEN), _byte_level(False)), ignore_merges=True, begins=True
)
_DEEPSEEK = PreTokenizer(
    _in_turn(
        _split(r"\p{N}{1,3}"), _split("[一-龥\u3040-ゟ゠-ヿ]+"), _split(_SIGNED), _byte_level(False)
    )
)

PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PLAIN),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(_QWEN2.cut, begins=True),
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _MISTRAL,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "seed-coder": PreTokenizer(_in_turn(_split(_SEED), _byte_level(False))),
    **dict.fromkeys(("command-r", "exaone"), _DIGITS),
    "exaone4": _GPT2,
    "lfm2": _LLAMA3,
    "glm4": PreTokenizer(_PLAIN.cut, ignore_merges=True),
    "chatglm-bpe": _PLAIN,
    "hunyuan": PreTokenizer(_QWEN2.cut),
}
"""By the value of ``tokenizer.ggml.pre``."""

BY_ASCII = ("gpt-4o", "llama4", "tekken")
"""Those whose capitals llama.cpp tells by ASCII alone."""


def with_ascii_capitals(name: str, cut: Part) -> Part:
    """How llama.cpp cuts texts where it tells capitals by ASCII: other letters are both.

    Args:
        name: The value of the key.
        cut: tokenizer.json's ``pre_tokenizer``.
    """
    if name not in BY_ASCII:
        return cut
    text = json.dumps(cut)
    for ours, not_these in ((_UPPER, "a-z"), (_LOWER, "A-Z")):
        letters = rf"(?:(?=\p{{L}})[^{not_these}])"
        text = text.replace(json.dumps(ours)[1:-1], json.dumps(letters)[1:-1])
    changed: Part = json.loads(text)
    return changed
