"""A tokenizer as the metadata keys of a GGUF file, and the token ids that llama.cpp produces."""

from __future__ import annotations

import json
import re
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

# ---- pre-tokenizers ------------------------------------------------------------------------------

_WORDS = "words"  # GPT-2's expression, which ByteLevel contains
# Where several names stand for the same pre-tokenizer, the first of these is written.
_PREFERRED = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "gpt-4o", "tekken")


def pre_tokenizer_name(tokenizer: dict[str, Any], where: object) -> str:
    """The value of ``tokenizer.ggml.pre``."""
    ignores = tokenizer["model"].get("ignore_merges") is True
    splits = tuple(_splits(tokenizer.get("pre_tokenizer")))
    names = [*_PREFERRED, *(name for name in PRE_TOKENIZERS if name not in _PREFERRED)]
    for name in names:
        known = PRE_TOKENIZERS[name]
        if tuple(_splits(known.pre_tokenizer)) == splits and known.ignore_merges == ignores:
            return name
    raise TokenizerError(
        f"{where} has a pre-tokenizer that llama.cpp is not known to support: {brief(splits)}; "
        "write the merged model with qlora-wgpu merge and convert it with llama.cpp's "
        "convert_hf_to_gguf.py"
    )


def pre_tokenizer_note(name: object) -> str | None:
    """How llama.cpp's pre-tokenizer of a name differs from the original; None if it does not."""
    if name not in BY_ASCII:
        return None
    return (
        f"llama.cpp's {name} recognizes only ASCII capitals: words with other capitals or with "
        "combining marks are sometimes tokenized differently"
    )


def _splits(part: Part | None) -> Iterator[object]:
    """The steps that split text, in order, independent of how tokenizer.json nests them."""
    if part is None:
        return
    kind = part.get("type")
    if kind == "Sequence":
        for inner in part.get("pretokenizers", []):
            yield from _splits(inner)
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
_TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the other bytes do not occur in UTF-8
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
    """The metadata keys of a folder's tokenizer, with a token for each row of the embedding.

    llama.cpp adds a BOS token if the keys say so: if ``prompt``, rendered by the chat template,
    begins with one (with None, for plain text, if the tokenizer adds one). It never adds an EOS
    token. With ``joins_pairs`` a byte-fallback vocabulary uses its merges, as Gemma 4's does,
    instead of scores.
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
            raise self._unsupported(f"is a {brief(self._model.get('type'))} tokenizer, not BPE")
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
        raise self._unsupported("is neither byte-level BPE nor SentencePiece's")

    def _unsupported(self, what: str) -> TokenizerError:
        return TokenizerError(
            f"{self._where} {what}, which llama.cpp does not support: use the model with "
            "transformers (qlora-wgpu merge)"
        )

    def _byte_level(self) -> dict[str, Any]:
        normalizers = set(_kinds(self._stored.get("normalizer")))
        if not normalizers <= {"NFC", "Sequence"}:
            raise self._unsupported(f"normalizes text ({', '.join(sorted(normalizers))})")
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
            raise self._unsupported(f"normalizes text ({', '.join(sorted(map(str, kinds)))})")
        schemes = {part.get("prepend_scheme", "always") for part in spaced}
        # llama.cpp adds a space after every special token or after none. The scheme "first" adds
        # one at the beginning only, where a rendered chat has a special token.
        added = tuple(token["content"] for token in self._added.values())
        begins_special = prompt is not None and prompt.startswith(added)
        is_first = "first" in schemes and not begins_special
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

    def _check_bytes(self, tokens: Sequence[str]) -> None:
        """Requires a token for each byte, since llama.cpp aborts without one."""
        known = set(tokens)
        missing = [f"<0x{i:02X}>" for i in _TEXT_BYTES if f"<0x{i:02X}>" not in known]
        if missing:
            raise self._unsupported(
                f"has byte_fallback but no token for {len(missing)} of the bytes, such as "
                f"{missing[0]}"
            )

    def _tokens(self) -> tuple[list[str], np.ndarray[Any, Any]]:
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
            elif is_piece and kind == _NORMAL and re.fullmatch(r"<0x..>", text, re.DOTALL):
                kind = _BYTE
            # llama.cpp looks for these in the original text, with its spaces.
            tokens.append(text.replace(_SPACE, " ") if kind == _USER_DEFINED else text)
            types.append(kind)
        return tokens, np.array(types, np.int32)

    def _scores(self, tokens: list[str], types: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """SentencePiece's scores; of these, tokenizer.json keeps only the order of the merges."""
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
    return (text.startswith("<|") and text.endswith("|>")) or (
        text.startswith("<unused") and text.endswith(">")
    )


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A component of a tokenizer.json, sequences flattened."""
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

_MISSING = "\0"  # is in no byte-level vocabulary
_TO_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
_WHITE_SPACE = " \t\n\v\f\r"
# Special in llama.cpp whatever the file says: end-of-turn and fill-in-the-middle tokens.
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
    """A text and its token ids in training."""

    text: str
    ids: Sequence[int]


class LlamaCppTokenizer:
    """llama.cpp's tokenizer of a GGUF file.

    It splits the text at special tokens, the longest first, and tokenizes the pieces between them.
    It normalizes nothing and respects no flags of added tokens but Phi 3's. The pieces are
    tokenized as by the reader of the file (``tokenizer_files``).
    """

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        files = tokenizer_files(metadata, path)
        self._tokens = [token.decode("utf-8", "replace") for token in metadata[f"{_KEY}tokens"]]
        self._special = _special_tokens(self._tokens, metadata[f"{_KEY}token_type"].tolist())
        self._missing = len(self._tokens)
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
        stored = {**files.tokenizer, "added_tokens": [], "post_processor": None}
        if metadata[f"{_KEY}model"] != "gpt2":
            return {**stored, "normalizer": _TO_SPACES}
        # A byte without a token is skipped, and its neighbours are not merged.
        model = stored["model"]
        vocab = {**model["vocab"], _MISSING: self._missing}
        return {
            **stored,
            "normalizer": None,
            "pre_tokenizer": with_ascii_capitals(metadata[f"{_KEY}pre"], stored["pre_tokenizer"]),
            "model": {**model, "vocab": vocab, "unk_token": _MISSING},
        }

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt; a BOS token that it has itself is not duplicated."""
        ids = [] if self._bos is None else [self._tokens.index(self._bos)]
        follows_special = True
        for part in self._split(text.removeprefix(self._bos or "")):
            if isinstance(part, int):
                ids.append(part)
            else:
                with library_errors("failed to encode the text"):
                    piece = self._prefix * follows_special + part
                    made = self._pieces.encode(piece, add_special_tokens=False).ids
                ids += [i for i in made if i != self._missing]
            follows_special = isinstance(part, int)
        return ids if self._eos is None else [*ids, self._tokens.index(self._eos)]

    def first_difference(self, trained: Iterable[TrainedText], eos: int | None) -> str | None:
        """Describes the first text tokenized differently from training; None if none is."""
        seen, wrong, first = 0, 0, ""
        for text, ids in trained:
            seen += 1
            made, expected = self.encode(text), list(ids)
            if expected in (made, [*made, eos]):
                continue
            wrong += 1
            first = first or f"{brief(text)}: {self._difference(made, expected)}"
        if not wrong:
            return None
        return (
            f"llama.cpp tokenizes {wrong} of {seen} examples of the run differently from training. "
            f"The first is {first}"
        )

    def _difference(self, made: Sequence[int], expected: Sequence[int]) -> str:
        pairs = enumerate(zip(made, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(made), len(expected)))
        theirs, ours = (
            f"{brief(self._tokens[ids[at]])} ({ids[at]})" if at < len(ids) else "the end"
            for ids in (made, expected)
        )
        return f"token {at + 1} is {ours} in training and {theirs} in llama.cpp"

    def _split(self, text: str) -> list[str | int]:
        parts: list[str | int] = [text]
        for token, number in self._special:
            if token in text:
                takes = self._takes_spaces and token not in _PHI3_PLAIN
                parts = [piece for part in parts for piece in _split_at(part, token, number, takes)]
        return [part for part in parts if part != ""]


def _split_at(part: str | int, token: str, number: int, takes_spaces: bool) -> Iterator[str | int]:
    """Splits a part at one special token, which may strip the white space after it."""
    if isinstance(part, int):
        yield part
        return
    first, *rest = part.split(token)
    yield first
    for piece in rest:
        yield number
        yield piece.lstrip(_WHITE_SPACE) if takes_spaces else piece


def _special_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[tuple[str, int]]:
    """The special tokens in the order in which llama.cpp looks for them."""
    kinds, always = (_UNKNOWN, _CONTROL, _USER_DEFINED), set(_ALWAYS_SPECIAL.split())
    found = [
        (text, i)
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if text and (kind in kinds or text in always)
    ]
    return sorted(found, key=lambda pair: -len(pair[0].encode()))
