"""Tokenizers of strangers: read and tried in a process of its own, bounded by a text's length.

The library of tokenizers computes whatever tokenizer.json says: its regular expressions search back
as long as they like, its replacements may grow a text without bound, and where memory runs out it
ends the process. So a file is first read in a child process. If all its parts are ones whose
time and memory are bounded by the text's length, this process reads it, too. Else, above all where
a regular expression is not known to take linear time, the child keeps it: it is slower there, and
nothing else changes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import tokenizers

from qlora_wgpu.cache_folder import cache_path, make_cache_folder
from qlora_wgpu.errors import TokenizerError
from qlora_wgpu.files import is_file
from qlora_wgpu.limits import TOKEN_ID
from qlora_wgpu.sandbox.process import SandboxError, SandboxProcess

# ---- what is bounded -----------------------------------------------------------------------------

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
    """Whether a tokenizer's time and memory are bounded by the length of a text."""
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


# ---- opening -------------------------------------------------------------------------------------

_VERSION = 2  # of what is looked at; a new one looks anew
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SMALL = 1 << 20  # bytes of a file whose memory is not worth a new process
_TRIAL = "A trial: 12 words,\n\tsome   of them naïve — 漢字. " * 4


def open_tokenizer(content: bytes) -> tokenizers.Tokenizer | ConfinedTokenizer:
    """The tokenizer of a file's content, here or in a process of its own."""
    seen = cache_path("tokenizers", f"{_VERSION}-{_library()}-{_hash(content)}")
    if not is_file(seen):
        if not _examine(content):
            return ConfinedTokenizer(content)
        with suppress(OSError):  # looked at again next time
            make_cache_folder(seen.parent)
            seen.touch()
    with library_errors("the library of tokenizers refuses it"):
        return tokenizers.Tokenizer.from_buffer(content)


def _examine(content: bytes) -> bool:
    """Whether a tokenizer can be read, and whether each of its parts is bounded."""
    try:
        return bool(_examiner().call(_load_and_look, content))
    except SandboxError as err:
        raise TokenizerError(f"it {err}") from err
    finally:
        if len(content) > _SMALL:  # a process keeps what it once had
            _examiner().close()


@lru_cache(maxsize=1)
def _examiner() -> SandboxProcess:
    return SandboxProcess("sandbox.tokenizers")


def _library() -> str:
    return importlib.metadata.version("tokenizers")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


class _Encoding(NamedTuple):
    ids: list[int]
    offsets: list[tuple[int, int]]


class _AddedToken(NamedTuple):
    special: bool


class ConfinedTokenizer:
    """What this package uses of a ``tokenizers.Tokenizer``, in a process of its own."""

    def __init__(self, content: bytes) -> None:
        """Takes the content of a tokenizer.json, which is read when it is first used."""
        self._content = content
        self._process = SandboxProcess("sandbox.tokenizers", (_load, content))

    def close(self) -> None:
        """Ends the process."""
        self._process.close()

    def encode(self, text: str, add_special_tokens: bool = True) -> _Encoding:
        """Ids and ranges of characters."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[_Encoding]:
        """Those of several texts, in one call."""
        made = self._call(_encode, list(texts), add_special_tokens, answers=len(texts))
        return [_Encoding(ids, [(a, b) for a, b in offsets]) for ids, offsets in made]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        return str(self._call(_decode, list(ids), skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """Id of a token, or None."""
        number: int | None = self._call(_ask, "token_to_id", token)
        return number

    def id_to_token(self, number: int) -> str | None:
        """Text of an id, or None."""
        token: str | None = self._call(_ask, "id_to_token", number)
        return token

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Number of tokens."""
        return int(self._call(_ask, "get_vocab_size", with_added_tokens))

    def get_added_tokens_decoder(self) -> Mapping[int, _AddedToken]:
        """The added tokens by their ids."""
        return {number: _AddedToken(special) for number, special in self._call(_added_tokens)}

    def to_str(self) -> str:
        """What it was made of."""
        return self._content.decode("utf-8", "replace")

    def no_truncation(self) -> None:
        """Nothing: it never truncates."""

    def no_padding(self) -> None:
        """Nothing: it never pads."""

    def _call(self, function: Callable[..., Any], *args: Any, answers: int = 1) -> Any:
        try:
            return self._process.call(function, *args, answers=answers)
        except SandboxError as err:
            raise TokenizerError(f"the tokenizer is stopped: it {err}") from err


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns what ``tokenizers`` raises into TokenizerError, its panics included."""
    try:
        yield
    except (TokenizerError, MemoryError):
        raise
    except BaseException as err:
        # A Rust panic is raised as a BaseException; an interrupt must stay one.
        if isinstance(err, Exception) or type(err).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {str(err)[:300]}") from err
        raise


# ---- what runs in the child process --------------------------------------------------------------

_backend: tokenizers.Tokenizer
_longest_token: int


def _load(content: bytes) -> None:
    global _backend, _longest_token
    with library_errors("the library of tokenizers refuses it"):
        _backend = tokenizers.Tokenizer.from_buffer(content)
        _backend.no_truncation()
        _backend.no_padding()
        vocabulary = _backend.get_vocab(with_added_tokens=True)
    _longest_token = max(map(len, vocabulary), default=0)
    _check_ids(vocabulary.values())


def _check_ids(ids: Iterable[int]) -> None:
    highest = max(ids, default=0)
    if highest > TOKEN_ID:
        raise TokenizerError(f"it has a token with the id {highest}, above {TOKEN_ID}")


def _load_and_look(content: bytes) -> bool:
    _load(content)
    with library_errors("it cannot be used"):
        ids = _backend.encode(_TRIAL).ids
        _check_ids(ids)  # what is put around a text need not be in the vocabulary
        _backend.decode(ids)
        states = {name: getattr(_backend, name) for name in _PARTS}
        parts = {n: s and json.loads(s.__getstate__()) for n, s in states.items()}
    word = getattr(_backend.model, "max_input_chars_per_word", 0)
    return is_bounded(parts, _longest_token, word)


def _encode(
    texts: list[str], add_special_tokens: bool
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    with library_errors("it cannot encode the text"):
        made = [_backend.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [(each.ids, each.offsets) for each in made]


def _decode(ids: list[int], skip_special_tokens: bool) -> str:
    with library_errors("it cannot decode the ids"):
        return str(_backend.decode(ids, skip_special_tokens=skip_special_tokens))


def _ask(method: str, *args: Any) -> Any:
    return getattr(_backend, method)(*args)


def _added_tokens() -> list[tuple[int, bool]]:
    return [(i, bool(t.special)) for i, t in _backend.get_added_tokens_decoder().items()]
