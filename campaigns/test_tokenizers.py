"""Damaged and hostile tokenizer.json files: small ones of each kind, changed again and again."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from campaigns.strangers import Content, attempt, changed, costly, damaged
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import QLoRAError

TEXT = (
    "Hello world, a text of words; 12 numbers, naïve — 漢字.\n\tend xxxxxxxxxxxxxxxxxxxxxxxx " * 8
)
ENGLISH = ["the quick brown fox jumps over the lazy dog", "hello world 12", "of words a text"] * 9

HUGE = (-1, 0, 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, 2**64, 1.5, 1e308)
ODD: tuple[Any, ...] = (
    *HUGE, None, True, "", "a", "\x00", "x" * 10_000, [], {}, [[]], {"a": {}}, "\ud800", "▁",
    [0] * 99,
)  # fmt: skip
REGEXES = (
    r"(x+x+)+y", r".{0,1000}.{0,1000}Z", r"(\w+\s?)+!", r"(.*)*!", r"(?<!a.*)b", r"(", r"\p{L}+",
    "", r"(?=)", r"(a|a)*c", r"x*x*x*x*x*y", r"(?<n>.)\k<n>", r"(?:(?:\g<1>)|(x))*", "." * 2000,
)  # fmt: skip


def _doubling(times: int) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * times


PARTS: dict[str, tuple[Any, ...]] = {
    "normalizer": (
        *({"type": "Replace", "pattern": {"Regex": r}, "content": "e"} for r in REGEXES),
        *({"type": "Sequence", "normalizers": _doubling(n)} for n in (1, 3, 20, 30, 60)),
        {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000},
        {"type": "Prepend", "prepend": "x" * 5_000_000},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "ALQCAACEAAAAAACAAQAA" * 40},
    ),
    "pre_tokenizer": (
        *(
            {"type": "Split", "pattern": {"Regex": r}, "behavior": b, "invert": i}
            for r in REGEXES
            for b, i in (("Isolated", False), ("Removed", True))
        ),
        {"type": "Metaspace", "replacement": "xx", "prepend_scheme": "first", "split": True},
        {"type": "FixedLength", "length": 0},
        {"type": "CharDelimiterSplit", "delimiter": ""},
    ),
    "post_processor": tuple(
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * n,
            "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [1] * n, "tokens": ["a"] * n}},
        }
        for n in (0, 1, 300, 3000, 20_000)
    ),
    "decoder": (
        *({"type": "Replace", "pattern": {"Regex": r}, "content": "e"} for r in REGEXES),
        *({"type": "Sequence", "decoders": _doubling(n)} for n in (1, 20, 30, 60)),
        *({"type": "Strip", "content": "e", "start": n, "stop": n} for n in (3, 2**40, 2**63)),
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
    ),
    "truncation": (
        {"direction": "Right", "max_length": 2**60, "strategy": "LongestFirst", "stride": 2**59},
        {"direction": "Left", "max_length": 0, "strategy": "OnlySecond", "stride": 1},
    ),
    "padding": tuple(
        {
            "strategy": {"Fixed": n}, "direction": "Right", "pad_to_multiple_of": n, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "a",
        }
        for n in (0, 2**40)
    ),
}  # fmt: skip


@cache
def originals() -> list[str]:
    """Small tokenizers of each model, with the parts that published ones have."""
    special = ["<unk>", "<s>", "</s>"]
    llama = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+"
    kinds = []
    for model, trainer, before in (
        (models.BPE(), trainers.BpeTrainer(vocab_size=400, special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
            pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(llama), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])),
        (models.BPE(unk_token="<unk>", fuse_unk=True), trainers.BpeTrainer(vocab_size=80,
            special_tokens=special), pre_tokenizers.Metaspace()),
        (models.Unigram(), trainers.UnigramTrainer(vocab_size=50, special_tokens=special,
            unk_token="<unk>"), pre_tokenizers.Metaspace()),
        (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(vocab_size=80,
            special_tokens=special), pre_tokenizers.BertPreTokenizer()),
        (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=special),
            pre_tokenizers.Whitespace()),
    ):  # fmt: skip
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = before
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.train_from_iterator(ENGLISH, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        kinds.append(tokenizer.to_str())
    folder = os.environ.get("CAMPAIGN_TOKENIZERS")  # real ones, where it is named
    real = sorted(Path(folder).rglob("tokenizer.json")) if folder else []
    return kinds + [path.read_text() for path in real]


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TEXTS = ("a", "new", "", "e", "x" * 5000, " ", "\n", "<s>", "▁")
REPEATED = [piece * 10_000 for piece in (b"[", b"{", b'"', b"9")]


@st.composite
def with_part(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """Another normalizer, decoder or the like."""
    name = draw(st.sampled_from(list(PARTS)))
    return {**value, name: draw(st.sampled_from(PARTS[name]))}


@st.composite
def with_token(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """A token with a strange id or text, in the vocabulary or added to it."""
    model, text = value.get("model"), draw(st.sampled_from(TEXTS))
    vocab = model.get("vocab") if isinstance(model, dict) else None
    number = draw(st.sampled_from((*HUGE, -1e308)))
    if isinstance(vocab, dict) and draw(st.booleans()):
        return {**value, "model": {**model, "vocab": {**vocab, text: number}}}
    if isinstance(vocab, list) and draw(st.booleans()):
        return {**value, "model": {**model, "vocab": [*vocab, [text, number]]}}
    flags = {name: draw(st.booleans()) for name in FLAGS}
    token = {"id": number, "content": text, **flags, "special": True}
    added = value.get("added_tokens")
    return {**value, "added_tokens": [*(added if isinstance(added, list) else []), token]}


@st.composite
def files(draw: st.DrawFn) -> Content:
    """A damaged file."""
    text = draw(st.sampled_from(originals()))
    if draw(st.integers(0, 4)) == 4:
        return draw(damaged(text.encode(), REPEATED))
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("part", "value", "value", "token")))
        if kind == "part":
            value = draw(with_part(value))
        elif kind == "token":
            value = draw(with_token(value))
        else:
            value = draw(changed(value, st.sampled_from(ODD)))
    return Content(json.dumps(value).encode())


def used(folder: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Opens a file and does with it what the preparation of data and a generation do."""
    tokenizer = Tokenizer.from_folder(folder)
    ids, offsets = tokenizer.encode_with_offsets(TEXT)
    tokenizer.decode(ids)
    tokenizer.decode(ids[:20], skip_special_tokens=False)
    tokenizer.first_special(ids)
    assert tokenizer.fingerprint
    return ids, offsets


@costly
@given(files())
def test_a_damaged_tokenizer_is_used_or_refused(place: Path, content: bytes) -> None:
    (place / "tokenizer.json").write_bytes(content)
    result = attempt(lambda: used(place))
    if not isinstance(result, QLoRAError):
        ids, offsets = result
        assert len(ids) == len(offsets)
        assert max(ids, default=0) < 2**31, "no data set can keep this id"
