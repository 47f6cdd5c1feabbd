"""Damaged and hostile tokenizer.json files: small ones of each kind, mutated again and again."""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from campaigns.support import Tally, campaign
from campaigns.watched import Case, watched
from qlora_wgpu.data import Tokenizer

_TEXT = (
    "Hello world, a text of words; 12 numbers, naïve — 漢字.\n\tend xxxxxxxxxxxxxxxxxxxxxxxx " * 8
)
_ENGLISH = ["the quick brown fox jumps over the lazy dog", "hello world 12", "of words a text"] * 9

HUGE = (-1, 0, 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, 2**64, 1.5, 1e308)
_ODD: tuple[Any, ...] = (
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


@lru_cache(maxsize=1)
def originals() -> tuple[str, ...]:
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
        tokenizer.train_from_iterator(_ENGLISH, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        kinds.append(tokenizer.to_str())
    return (*kinds, *_others())


def _others() -> list[str]:
    """Real files, where a folder of them is named."""
    folder = os.environ.get("CAMPAIGN_TOKENIZERS")
    return [p.read_text() for p in sorted(Path(folder).glob("**/tokenizer.json"))] if folder else []


def cases(count: int, seed: int) -> Iterator[Case]:
    """What a seed makes of the original files."""
    for number in range(count):
        yield f"seed {seed}, number {number}", (seed, number)


def mutated(seed: int, number: int) -> bytes:
    """A damaged file."""
    draw = random.Random(f"{seed}/{number}")
    text = draw.choice(originals())
    if draw.random() < 0.2:
        return _bytes_changed(draw, text.encode())
    value = copy.deepcopy(json.loads(text))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice((_part, _value, _value, _token))(draw, value)
    return json.dumps(value).encode()


def _bytes_changed(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    kind, size = draw.randrange(4), draw.randrange(1, 40)
    if kind == 0:
        return content[:start]
    if kind == 1:
        return content[:start] + draw.randbytes(size) + content[start + size :]
    if kind == 2:
        return content[:start] + content[start + size :]
    return content[:start] + draw.choice((b"[", b"{", b'"', b"9")) * 10_000 + content[start:]


def _part(draw: random.Random, value: dict[str, Any]) -> None:
    name = draw.choice([*PARTS])
    value[name] = copy.deepcopy(draw.choice(PARTS[name]))


def _value(draw: random.Random, value: Any) -> None:
    """Changes what stands somewhere, at any depth."""
    while True:
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(value[key], (dict, list)) and draw.random() < 0.9:
            value = value[key]
            continue
        if draw.random() < 0.2:
            del value[key]
        else:
            value[key] = copy.deepcopy(draw.choice(_ODD))
        return


def _token(draw: random.Random, value: dict[str, Any]) -> None:
    """A token with a strange id or text, in the vocabulary or added to it."""
    model = value.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    text = draw.choice(("a", "new", "", "e", "x" * 5000, " ", "\n", "<s>", "▁"))
    if isinstance(vocab, dict) and draw.random() < 0.5:
        vocab[text] = draw.choice(HUGE)
    elif isinstance(vocab, list) and draw.random() < 0.5:
        vocab.append([text, draw.choice((*HUGE, -1e308))])
    elif isinstance(value.get("added_tokens"), list):
        flags = {n: draw.random() < 0.5 for n in ("single_word", "lstrip", "rstrip", "normalized")}
        token = {"id": draw.choice(HUGE), "content": text, **flags, "special": True}
        value["added_tokens"].append(token)


def attempt(case: tuple[int, int]) -> str:
    """Opens a file and does with it what the preparation of data and a generation do."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_bytes(mutated(*case))
        tokenizer = Tokenizer.from_folder(folder)
    ids, offsets = tokenizer.encode_with_offsets(_TEXT)
    tokenizer.decode(ids)
    tokenizer.decode(ids[:20], skip_special_tokens=False)
    tokenizer.first_special(ids)
    assert tokenizer.fingerprint
    if len(ids) != len(offsets):
        return "WRONG: ids without offsets"
    if ids and max(ids) >= 2**31:
        return "WRONG: an id that no data set can keep"
    return "used"


def body(count: int, seed: int, tally: Tally) -> None:
    """Runs the campaign."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        watched(cases(count, seed), attempt, tally)


if __name__ == "__main__":
    campaign("tokenizers", body, 10_000)
