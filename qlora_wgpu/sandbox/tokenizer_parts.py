"""Parts of tokenizers whose time and memory are bounded by the length of a text.

Anything else, a regular expression that is not known to search in a line above all, is computed in
a process of its own: it is slower there, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LONGEST_TOKEN = 4096  # characters; runs of spaces are the longest that are real
_LONGEST_WORD = 1000  # characters that WordPiece looks up piece by piece
_GROWTH = 64  # of a text, by all replacements together
_SPECIAL_TOKENS = 64  # around a text

_PLAIN = frozenset(
    (
        *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents"),
        *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace"),
        *("Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit"),
        *("BertProcessing", "ByteLevel", "RobertaProcessing"),
        *("BPEDecoder", "ByteFallback", "CTC", "Fuse", "Strip", "WordPiece"),
    )
)
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)

# Expressions that published families split words with; none looks at a character twice for long.
_KNOWN = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3 and GPT-4, Qwen, and others with as many digits as they like
        *(
            rf"{_ENDINGS}|{_OTHER}\p{{L}}+|{digits}|{_REST}"
            for digits in (r"\p{N}{1,3}", r"\p{N}", r"\p{N}+", r"\p{N}{1,2}")
        ),
        rf"{_ENDINGS}|{_OTHER}[\p{{L}}\p{{M}}]+|\p{{N}}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-4o, Phi 4 and gpt-oss; Mistral without its endings
        rf"{_OTHER}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_OTHER}{_UPPER}+{_LOWER}*{_ENDINGS}?|"
        rf"\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
        rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}",
        # DeepSeek and others
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Seed-OSS
        *(
            rf"{_ENDINGS}|{_OTHER}\p{{L}}+|{digit}|"
            r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
            for digit in (r"\p{N}", r"\p{N}{1}")
        ),
        *(r"\p{N}{1,3}", r"\p{N}+", r"\p{N}", r"\d", r"\d{1,3}", r"[0-9]", r"[0-9][0-9][0-9]"),
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\s+", r" +", r" {2,}", r"[一-龥぀-ゟ゠-ヿ]+"),
        *(r"[一-龥ࠀ-一가-퟿]+", r"[一-龥\u3040-ゟ゠-ヿ]+"),
    )
)


def is_bounded(parts: Mapping[str, Any], longest_token: int, longest_word: int) -> bool:
    """Whether a tokenizer's time and memory are bounded by the length of a text.

    Args:
        parts: What tokenizer.json says of the normalizer and so on, by their names.
        longest_token: Characters of the longest token.
        longest_word: Characters of the longest word that WordPiece looks up.
    """
    if longest_token > _LONGEST_TOKEN or longest_word > _LONGEST_WORD:
        return False
    steps = {name: _steps(part) for name, part in parts.items()}
    growth = {name: _growth(each) for name, each in steps.items()}
    return max(growth.values(), default=1) <= _GROWTH and all(
        _is_bounded(step) for each in steps.values() for step in each
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """A part's steps in their order, sequences within sequences laid out."""
    if not isinstance(part, dict):
        return []
    inner = [step for key in _LISTS for each in part.get(key) or [] for step in _steps(each)]
    return inner if part.get("type") == "Sequence" else [part]


def _is_bounded(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind in ("Replace", "Split"):
        pattern = step.get("pattern", {})
        expression = str(pattern.get("Regex")).replace("\r", r"\r").replace("\n", r"\n")
        return "String" in pattern or expression in _KNOWN
    if kind == "TemplateProcessing":
        tokens = step.get("special_tokens", {}).values()
        longest = max((len(token.get("ids", ())) for token in tokens), default=0)
        return len(step.get("single", ())) * max(longest, 1) <= _SPECIAL_TOKENS
    return kind == "Prepend" or kind in _PLAIN


def _growth(steps: list[dict[str, Any]]) -> float:
    """How many times longer than a text what is made of it may be, by replacements alone."""
    growth = 1.0
    for step in steps:
        if step.get("type") == "Replace":
            replaced = len(step.get("pattern", {}).get("String", "x"))
            growth *= max(1.0, len(step.get("content", "")) / max(replaced, 0.01))
        elif step.get("type") == "Prepend":
            growth *= 1 + len(step.get("prepend", "")) / 16
    return growth
