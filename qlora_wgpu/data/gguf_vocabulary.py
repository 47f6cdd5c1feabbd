"""A tokenizer's files as the keys of a GGUF file, and the ids that llama.cpp makes of a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qlora_wgpu.checkpoint.gguf_tokenizer import (
    BY_ASCII,
    PRE_TOKENIZERS,
    Part,
    TokenizerFiles,
    tokenizer_files,
    with_ascii_capitals,
)
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import TokenizerError, brief
from qlora_wgpu.files import file_bytes
from qlora_wgpu.limits import TOKENIZER_BYTES
from qlora_wgpu.sandbox.tokenizers import library_errors, open_tokenizer

# ---- how texts are cut ---------------------------------------------------------------------------

_WORDS = "words"  # GPT-2's expression, which ByteLevel has within it
# Of several names for one way of cutting, this one; the rest differ in what keys say anyway.
_PREFERRED = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "gpt-4o", "tekken")


def pre_tokenizer_name(tokenizer: dict[str, Any], where: object) -> str:
    """The value of ``tokenizer.ggml.pre``."""
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


# ---- the vocabulary ------------------------------------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"}
_MORE_ENDS = ("eot", "eom")
_KEY = "tokenizer.ggml."
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
    """The keys of a tokenizer of a folder, with a token for each row of the embedding.

    llama.cpp puts nothing around a prompt but what they say: what it begins with goes by a prompt
    as the chat template writes it (None where prompts are plain text, around which the tokenizer
    puts its own special tokens), and nothing ends it. With ``joins_pairs`` it joins a vocabulary
    with bytes for what is no token by its merges, as Gemma 4's, instead of by scores.
    """
    path = folder / "tokenizer.json"
    stored = json.loads(file_bytes(path, TOKENIZER_BYTES))
    vocabulary = _Vocabulary(stored, where, vocab_size)
    keys = vocabulary.keys(joins_pairs, prompt)
    keys |= _special_keys(tokenizer, vocab_size, prompt)
    named = {f"{_KEY}{key}": value for key, value in keys.items()}
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


# ---- llama.cpp's tokenizer -----------------------------------------------------------------------

_GONE = "\0"  # what no byte-level vocabulary has
_TO_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
_WHITE_SPACE = " \t\n\v\f\r"
# Special in llama.cpp whatever the file says: they end an answer, or fill gaps in code.
_ALWAYS_SPECIAL = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos>
<turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ <|fim_prefix|> <fim-prefix> <fim_prefix>
<｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix>
<｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle>
<｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> <|fim_pad|> <fim-pad> <fim_pad>
<PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
<|channel|> <|message|> <|start|> <|constrain|>
"""


class TrainedText(NamedTuple):
    """A text and its ids in training."""

    text: str
    ids: Sequence[int]


class LlamaCppTokenizer:
    """llama.cpp's tokenizer of a GGUF file.

    It looks for special tokens in the text first, the longest of them first, and tokenizes what
    lies between them piece by piece. It normalizes nothing, and of the flags of added tokens it
    knows none but Phi 3's. The pieces go through the tokenizer that the file's reader makes.
    """

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        """Takes a file's keys."""
        files = tokenizer_files(metadata, path)
        self._tokens = [token.decode("utf-8", "replace") for token in metadata[f"{_KEY}tokens"]]
        self._special = _special_tokens(self._tokens, metadata[f"{_KEY}token_type"].tolist())
        self._gone = len(self._tokens)
        self._pieces = open_tokenizer(json.dumps(self._piecewise(files, metadata)).encode())
        prefixed = metadata.get(f"{_KEY}add_space_prefix", True) is True
        self._prefix = " " if prefixed and metadata[f"{_KEY}model"] == "llama" else ""
        name = str(metadata.get("general.name", "")).lower()
        self._takes_spaces = "phi-3" in name or "phi3" in name
        self._bos, self._eos = (
            files.config.get(f"{end}_token") if files.config[f"add_{end}_token"] else None
            for end in ("bos", "eos")
        )

    def _piecewise(self, files: TokenizerFiles, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The tokenizer.json of what lies between special tokens."""
        stored = {**files.tokenizer, "added_tokens": [], "post_processor": None}
        if metadata[f"{_KEY}model"] != "gpt2":
            return {**stored, "normalizer": _TO_SPACES}
        # A byte without a token gives none, and what is around it is not joined.
        model = stored["model"]
        vocab = {**model["vocab"], _GONE: self._gone}
        return {
            **stored,
            "normalizer": None,
            "pre_tokenizer": with_ascii_capitals(metadata[f"{_KEY}pre"], stored["pre_tokenizer"]),
            "model": {**model, "vocab": vocab, "unk_token": _GONE},
        }

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, whose own token that begins it does not come twice."""
        ids = [] if self._bos is None else [self._tokens.index(self._bos)]
        follows_special = True
        for part in self._parted(text.removeprefix(self._bos or "")):
            if isinstance(part, int):
                ids.append(part)
            else:
                with library_errors("the text cannot be encoded"):
                    piece = self._prefix * follows_special + part
                    made = self._pieces.encode(piece, add_special_tokens=False).ids
                ids += [i for i in made if i != self._gone]
            follows_special = isinstance(part, int)
        return ids if self._eos is None else [*ids, self._tokens.index(self._eos)]

    def first_difference(self, trained: Iterable[TrainedText], eos: int | None) -> str | None:
        """Where the ids of a file part from those of training, in words; None where none do."""
        seen, wrong, first = 0, 0, ""
        for text, ids in trained:
            seen += 1
            made, expected = self.encode(text), list(ids)
            if expected in (made, [*made, eos]):
                continue
            wrong += 1
            first = first or f"{brief(text)}: {self._parting(made, expected)}"
        if not wrong:
            return None
        return (
            f"llama.cpp makes other tokens of {wrong} of {seen} texts of the run than were "
            f"trained. The first is {first}"
        )

    def _parting(self, made: Sequence[int], expected: Sequence[int]) -> str:
        """The first token that is another one."""
        pairs = enumerate(zip(made, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(made), len(expected)))
        theirs, ours = (
            f"{brief(self._tokens[ids[at]])} ({ids[at]})" if at < len(ids) else "the end"
            for ids in (made, expected)
        )
        return f"token {at + 1} is {ours} in training and {theirs} in llama.cpp"

    def _parted(self, text: str) -> list[str | int]:
        """A text, cut at its special tokens, which are ids here."""
        parts: list[str | int] = [text]
        for token, number in self._special:
            if token in text:
                takes = self._takes_spaces and token not in _PHI3_PLAIN
                parts = [piece for part in parts for piece in _cut(part, token, number, takes)]
        return [part for part in parts if part != ""]


def _cut(part: str | int, token: str, number: int, takes_spaces: bool) -> Iterator[str | int]:
    """A part of a text, cut at one special token, which may take the white space behind it."""
    if isinstance(part, int):
        yield part
        return
    first, *rest = part.split(token)
    yield first
    for piece in rest:
        yield number
        yield piece.lstrip(_WHITE_SPACE) if takes_spaces else piece


def _special_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[tuple[str, int]]:
    """What is looked for in texts, and in which order."""
    kinds, always = (_UNKNOWN, _CONTROL, _USER_DEFINED), set(_ALWAYS_SPECIAL.split())
    found = [
        (text, i)
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if text and (kind in kinds or text in always)
    ]
    return sorted(found, key=lambda pair: -len(pair[0].encode()))
