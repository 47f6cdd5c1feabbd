"""llama.cpp's name for how a tokenizer.json cuts texts before byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qlora_wgpu.checkpoint.gguf.pre_tokenizers import BY_ASCII, PRE_TOKENIZERS, Part
from qlora_wgpu.errors import TokenizerError, brief

_WORDS = "words"  # GPT-2's expression, which ByteLevel has within it
# Of several names for one way of cutting, this one; the rest differ in what keys say anyway.
_PREFERRED = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "gpt-4o", "tekken")


def pre_tokenizer_name(tokenizer: dict[str, Any], where: object) -> str:
    """The value of ``tokenizer.ggml.pre``.

    Args:
        tokenizer: The contents of a tokenizer.json with byte-level BPE.
        where: The file, for messages.

    Raises:
        TokenizerError: If llama.cpp has no name for it that is known here.
    """
    ignores = tokenizer["model"].get("ignore_merges") is True
    cuts = tuple(_cuts(tokenizer.get("pre_tokenizer")))
    names = [*_PREFERRED, *(name for name in PRE_TOKENIZERS if name not in _PREFERRED)]
    for name in names:
        known = PRE_TOKENIZERS[name]
        if tuple(_cuts(known.cut)) == cuts and known.ignore_merges == ignores:
            return name
    raise TokenizerError(
        f"{where} cuts texts in a way that has no name in llama.cpp, as far as is known here: "
        f"{brief(cuts)}; write the merged model with qlora-wgpu merge, and convert that with "
        "llama.cpp's own convert_hf_to_gguf.py"
    )


def cutting_note(name: object) -> str | None:
    """What a user should know of llama.cpp's way of cutting, by the value of the key."""
    if name not in BY_ASCII:
        return None
    return (
        f"llama.cpp's {name} tells capitals by ASCII alone: words in which other letters change "
        "their case, or that have marks, get other tokens there now and then"
    )


def _cuts(part: Part | None) -> Iterator[object]:
    """What cuts texts, one after the other, however it is put down."""
    if part is None:
        return
    kind = part.get("type")
    if kind == "Sequence":
        for inner in part.get("pretokenizers", []):
            yield from _cuts(inner)
    elif kind == "ByteLevel":
        if part.get("add_prefix_space"):
            yield "a space before the text"
        if part.get("use_regex", True):
            yield _WORDS
    elif kind == "Digits":
        yield r"\p{N}" if part.get("individual_digits") else r"\p{N}+"
    elif kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        pattern = part.get("pattern", {})
        expression = str(pattern.get("Regex", pattern))
        expression = expression.replace("\r", r"\r").replace("\n", r"\n")
        yield expression.replace("{1}|", "|")
    else:
        yield str(part)
