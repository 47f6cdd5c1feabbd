"""Untrusted tokenizers: examined in a child process, and kept there if they may be slow.

The regular expressions of a tokenizer.json may backtrack without limit, its replacements may grow a
text without limit, and the library aborts the process when memory runs out. So a file is first read
in a child process. If the time and memory of all its components are bounded by the text's length,
this process uses it, too. Otherwise, usually because a regular expression is not known to take
linear time, it runs in the child process, which is slower but equivalent.
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

# ---- bounded components --------------------------------------------------------------------------

_LONGEST_TOKEN = 4096  # characters; the longest in practice are runs of spaces
_LONGEST_WORD = 1000  # characters that WordPiece looks up piece by piece
_GROWTH = 64  # of a text, by all replacements
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

# Expressions of published families' pre-tokenizers, which take linear time.
_KNOWN = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3 and GPT-4, Qwen, and others with other numbers of digits
        *(
            rf"{_ENDINGS}|{_OTHER}\p{{L}}+|{digits}|{_REST}"
            for digits in (r"\p{N}{1,3}", r"\p{N}", r"\p{N}+", r"\p{N}{1,2}")
        ),
        rf"{_ENDINGS}|{_OTHER}[\p{{L}}\p{{M}}]+|\p{{N}}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-4o, Phi 4 and gpt-oss; Mistral without the contractions
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
    """A component's steps in order, nested sequences flattened."""
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
    """The maximum factor by which replacements make a text longer."""
    growth = 1.0
    for step in steps:
        if step.get("type") == "Replace":
            replaced = len(step.get("pattern", {}).get("String", "x"))
            growth *= max(1.0, len(step.get("content", "")) / max(replaced, 0.01))
        elif step.get("type") == "Prepend":
            growth *= 1 + len(step.get("prepend", "")) / 16
    return growth


# ---- opening -------------------------------------------------------------------------------------

_VERSION = 2  # of the examination; another one examines all tokenizers again
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SMALL = 1 << 20  # bytes of a file after which the child process is reused
_TRIAL = "A trial: 12 words,\n\tsome   of them naïve — 漢字. " * 4


def open_tokenizer(content: bytes) -> tokenizers.Tokenizer | ConfinedTokenizer:
    """The tokenizer of a file's content, in this process or in a child."""
    library = importlib.metadata.version("tokenizers")
    digest = hashlib.sha256(content).hexdigest()[:32]
    seen = cache_path("tokenizers", f"{_VERSION}-{library}-{digest}")
    if not is_file(seen):
        if not _examine(content):
            return ConfinedTokenizer(content)
        with suppress(OSError):  # examined again next time
            make_cache_folder(seen.parent)
            seen.touch()
    with library_errors("the tokenizers library refuses it"):
        return tokenizers.Tokenizer.from_buffer(content)


def _examine(content: bytes) -> bool:
    """Whether all components of a tokenizer are bounded; an error if it is invalid."""
    try:
        return bool(_examiner().call(_load_and_examine, content))
    except SandboxError as err:
        raise TokenizerError(f"it {err}") from err
    finally:
        if len(content) > _SMALL:  # frees its memory
            _examiner().close()


@lru_cache(maxsize=1)
def _examiner() -> SandboxProcess:
    return SandboxProcess("sandbox.tokenizers")


class _Encoding(NamedTuple):
    ids: list[int]
    offsets: list[tuple[int, int]]


class _AddedToken(NamedTuple):
    special: bool


class ConfinedTokenizer:
    """The methods of ``tokenizers.Tokenizer`` that this package uses, run in a child process."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._process = SandboxProcess("sandbox.tokenizers", (_load, content))

    def close(self) -> None:
        """Ends the process."""
        self._process.close()

    def encode(self, text: str, add_special_tokens: bool = True) -> _Encoding:
        """Token ids and offsets of a text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[_Encoding]:
        """Token ids and offsets of several texts, in one call."""
        made = self._call(_encode, list(texts), add_special_tokens, items=len(texts))
        return [_Encoding(ids, [(a, b) for a, b in offsets]) for ids, offsets in made]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
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
        """The content of its tokenizer.json."""
        return self._content.decode("utf-8", "replace")

    def no_truncation(self) -> None:
        """Does nothing: it never truncates."""

    def no_padding(self) -> None:
        """Does nothing: it never pads."""

    def _call(self, function: Callable[..., Any], *args: Any, items: int = 1) -> Any:
        try:
            return self._process.call(function, *args, items=items)
        except SandboxError as err:
            raise TokenizerError(f"the tokenizer was stopped: it {err}") from err


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raises errors and panics of the ``tokenizers`` library as TokenizerError."""
    try:
        yield
    except (TokenizerError, MemoryError):
        raise
    except BaseException as err:
        # Rust panics are BaseExceptions; interrupts must not be caught.
        if isinstance(err, Exception) or type(err).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {str(err)[:300]}") from err
        raise


# ---- functions of the child process --------------------------------------------------------------

_backend: tokenizers.Tokenizer
_longest_token: int


def _load(content: bytes) -> None:
    global _backend, _longest_token
    with library_errors("the tokenizers library refuses it"):
        _backend = tokenizers.Tokenizer.from_buffer(content)
        _backend.no_truncation()
        _backend.no_padding()
        vocabulary = _backend.get_vocab(with_added_tokens=True)
    _longest_token = max(map(len, vocabulary), default=0)
    _check_ids(vocabulary.values())


def _check_ids(ids: Iterable[int]) -> None:
    highest = max(ids, default=0)
    if highest > TOKEN_ID:
        raise TokenizerError(f"it has a token with the id {highest}, more than {TOKEN_ID}")


def _load_and_examine(content: bytes) -> bool:
    _load(content)
    with library_errors("it fails on a short text"):
        ids = _backend.encode(_TRIAL).ids
        _check_ids(ids)  # added special tokens may be missing from the vocabulary
        _backend.decode(ids)
        states = {name: getattr(_backend, name) for name in _PARTS}
        parts = {n: s and json.loads(s.__getstate__()) for n, s in states.items()}
    word = getattr(_backend.model, "max_input_chars_per_word", 0)
    return is_bounded(parts, _longest_token, word)


def _encode(
    texts: list[str], add_special_tokens: bool
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    with library_errors("it fails to encode the text"):
        made = [_backend.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [(each.ids, each.offsets) for each in made]


def _decode(ids: list[int], skip_special_tokens: bool) -> str:
    with library_errors("it fails to decode the ids"):
        return str(_backend.decode(ids, skip_special_tokens=skip_special_tokens))


def _ask(method: str, *args: Any) -> Any:
    return getattr(_backend, method)(*args)


def _added_tokens() -> list[tuple[int, bool]]:
    return [(i, bool(t.special)) for i, t in _backend.get_added_tokens_decoder().items()]
