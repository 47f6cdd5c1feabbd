"""A Hugging Face tokenizer folder: reading it, and adding tokens to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from qlora_wgpu.cache_folder import folder_of_this_process
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.tokenizer_files import (
    CONFIG,
    GENERATION,
    WITHOUT_TOKENIZER,
    copy_tokenizer,
)
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import ConfigError, TokenizerError, reason
from qlora_wgpu.files import file_bytes, file_text, is_dir, is_there
from qlora_wgpu.limits import (
    MODEL_JSON_BYTES,
    TEMPLATE_BYTES,
    TOKENIZER_BYTES,
    TOKENIZER_CONFIG_BYTES,
)
from qlora_wgpu.sandbox.tokenizers import ConfinedTokenizer, library_errors, open_tokenizer

_SURROGATE = re.compile("[\ud800-\udfff]")
Tokens = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the range of characters of each."""

_OTHER_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("tokenizer.tiktoken",))
TOOL_USE = "tool_use"
"""transformers' name of the chat template for conversations with tools."""
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class Tokenizer:
    """Text to token ids and back.

    ``add_special_tokens`` adds what the post-processor in ``tokenizer.json`` does. Truncation and
    padding saved in it are disabled.

    Attributes:
        chat_template: The Jinja source of the model's chat template, or None.
        tool_template: The source of a separate template for conversations with tools, or None.
        special_tokens: Texts of the special tokens by name, such as ``"bos_token"``.
        eos_token_ids: All ids that end a generation (a model may have several).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | ConfinedTokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Wraps a tokenizer of the ``tokenizers`` library.

        Args:
            backend: The tokenizer; its truncation and padding are disabled.
            special_tokens: Texts by name; those missing from the vocabulary are ignored.
            chat_template: Jinja source.
            eos_token_ids: Other ids that end a generation.
        """
        self._backend = backend
        with library_errors("cannot use the tokenizer"):
            backend.no_truncation()
            backend.no_padding()
        self.chat_template = chat_template
        self.tool_template: str | None = None
        self.special_tokens = {
            name: text
            for name, text in (special_tokens or {}).items()
            if backend.token_to_id(text) is not None
        }
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        own = [self.eos_token_id] if self.eos_token_id is not None else []
        self.eos_token_ids = frozenset([*own, *eos_token_ids])

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Reads ``tokenizer.json`` and the files next to it.

        Special tokens come from ``tokenizer_config.json``, else ``special_tokens_map.json``, else
        by id from ``generation_config.json`` or ``config.json``. ``chat_template.jinja`` takes
        precedence over ``tokenizer_config.json``, and that over ``chat_template.json``.

        Raises:
            TokenizerError: If a file is missing, damaged or not supported.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not is_dir(folder):
            raise TokenizerError(f"the tokenizer folder {folder} does not exist")
        if not is_there(path):
            if is_there(folder / WITHOUT_TOKENIZER):
                raise TokenizerError(file_text(folder / WITHOUT_TOKENIZER, TEMPLATE_BYTES))
            raise TokenizerError(f"{folder} has no tokenizer.json: {_instead(folder)}")
        try:
            content = file_bytes(path, TOKENIZER_BYTES)
            backend = open_tokenizer(content)
        except OSError as err:
            raise TokenizerError(f"cannot read {path}: {reason(err)}") from err
        except TokenizerError as err:
            raise TokenizerError(f"cannot read the tokenizer {path}: {err}") from err

        config = _read_json(folder / "tokenizer_config.json")
        tokens_map = _read_json(folder / "special_tokens_map.json")
        ids = {
            **_read_json(folder / "config.json"),
            **_read_json(folder / "generation_config.json"),
        }
        special = {}
        for name in _TOKEN_NAMES:
            text = _token_text(config.get(name)) or _token_text(tokens_map.get(name))
            if text is None and name in config and name != "eos_token":
                continue  # null: there is none, whatever ids the model's config has
            if text is None or backend.token_to_id(text) is None:
                text = _first_token(backend, ids.get(f"{name}_id"))
            if text is not None:
                special[name] = text
        templates = _chat_templates(folder, config)
        tokenizer = cls(
            backend,
            special,
            templates.get("default"),
            [i for i in _id_list(ids.get("eos_token_id")) if backend.id_to_token(i) is not None],
        )
        tokenizer.tool_template = templates.get(TOOL_USE)
        # The library would print warnings about gaps in the vocabulary for the computed one.
        tokenizer.fingerprint = hashlib.sha256(content).hexdigest()
        return tokenizer

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Opens the tokenizer of a folder, of a GGUF file or of a model on the Hugging Face Hub.

        Raises:
            CheckpointError: If the model does not exist or cannot be downloaded.
            TokenizerError: If it has no tokenizer, or a file of it is invalid.
        """
        if is_there(Path(path) / "tokenizer.json"):
            return cls.from_folder(path)
        return cls.from_folder(ModelFolder.without_weights(str(path)).text_folder)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
    ) -> list[int] | str:
        """Renders messages with the chat template, as in transformers.

        Args:
            conversation: Messages such as ``{"role": "user", "content": "Hi"}``.
            tools: JSON schemas of functions that the model may call.
            chat_template: A ``.jinja`` file, the template itself or a built-in name; by default
                the tokenizer's.
            add_generation_prompt: Whether to end with the header of an assistant's turn.
            tokenize: Whether to return token ids rather than text.

        Raises:
            TokenizerError: If there is no chat template, or it fails.
            DataError: If a message is invalid.
        """
        from qlora_wgpu.data.chat_template import find_chat_template  # which needs this module
        from qlora_wgpu.data.messages import checked_messages

        template = find_chat_template(chat_template, self)
        if template is None:
            raise TokenizerError(
                "the tokenizer has no chat template: set chat_template to a .jinja file or a "
                "built-in name"
            )
        messages = checked_messages(conversation, "conversation")
        text = template.render(messages, add_generation_prompt, tools).text
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __repr__(self) -> str:
        has = "with a" if self.chat_template else "without"
        ends = ", ".join(str(i) for i in sorted(self.eos_token_ids)) or "none"
        return f"Tokenizer({self.vocab_size:,} tokens, {has} chat template; end tokens: {ends})"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            TokenizerError: If the text cannot be encoded.
        """
        return self.encode_with_offsets(text, add_special_tokens)[0]

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> Tokens:
        """Token ids, and for each the half-open range of its characters in ``text``.

        Added special tokens have the range ``(0, 0)``. Some tokenizers omit spaces from the ranges.

        Raises:
            TokenizerError: If the text cannot be encoded.
        """
        _check_text(text)
        with library_errors("failed to encode the text"):
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids), list(encoding.offsets)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Tokens]:
        """Encodes several texts in parallel, each as ``encode_with_offsets`` does.

        Raises:
            TokenizerError: If one of them cannot be encoded.
        """
        for text in texts:
            _check_text(text)
        with library_errors("failed to encode a text"):
            encodings = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
            return [(each.ids, each.offsets) for each in encodings]

    @cached_property
    def added_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that ``add_special_tokens`` puts before and after a text."""
        bare, whole = self.encode("a", False), self.encode("a", True)
        begin = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:begin], whole[begin + len(bare) :]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary are ignored.

        Raises:
            TokenizerError: If an id is not a non-negative integer.
        """
        with library_errors("failed to decode the token ids"):
            kept = [int(i) for i in ids]
            if skip_special_tokens:  # the library misses tokens marked "normalized"
                kept = [i for i in kept if i not in self._special_ids]
            return str(self._backend.decode(kept, skip_special_tokens=skip_special_tokens))

    def first_special(self, ids: Sequence[int]) -> str | None:
        """Text of the first special token other than the unknown one, or None."""
        unknown = self._special_id("unk_token")
        special = next((i for i in ids if i in self._special_ids and i != unknown), None)
        return None if special is None else str(self._backend.id_to_token(special))

    def knows(self, text: str, before: str = "a") -> bool:
        """Whether a text is one token within other text.

        Args:
            text: The text.
            before: The text before it: some tokenizers recognize their special tokens only at the
                beginning of a word.
        """
        token = self.token_id(text)
        return token is not None and token in self.encode(f"{before}{text}a", False)

    @cached_property
    def begins_with_bos(self) -> bool:
        """Whether the tokenizer adds a BOS token to a text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of tokenizer.json."""
        return hashlib.sha256(str(self._backend.to_str()).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def token_id(self, text: str) -> int | None:
        """Id of a token by its exact text, or None."""
        token = self._backend.token_to_id(text)
        return None if token is None else int(token)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token, or None."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token, or None."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, or None."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, or None."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, or None; it may be outside the model's vocabulary."""
        return self._special_id("pad_token")


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"the text must be a string, got {type(text).__name__}")
    if _SURROGATE.search(text):
        raise TokenizerError("cannot encode a text with a lone surrogate (half a character)")


# ---- a tokenizer's files -------------------------------------------------------------------------


def _instead(folder: Path) -> str:
    form = next((names for names in _OTHER_FORMS if all(is_there(folder / n) for n in names)), ())
    if form:
        has = " and ".join(form)
        return f"it has only {has}; load and save it once with transformers"
    if is_there(folder / "tekken.json"):
        return "it has only tekken.json; copy the file of a model with the same tokenizer there"
    return "copy the tokenizer of the base model there"


def _read_json(path: Path) -> dict[str, Any]:
    if not is_there(path):
        return {}
    return read_json_object(path, TOKENIZER_CONFIG_BYTES, TokenizerError)


def _token_text(value: Any) -> str | None:
    """A token in both notations: plain text, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str) or _SURROGATE.search(value):
        return None
    return value or None


def _id_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**32]


def _first_token(backend: tokenizers.Tokenizer | ConfinedTokenizer, value: Any) -> str | None:
    to_token: Callable[[int], str | None] = backend.id_to_token
    return next((t for i in _id_list(value) if (t := to_token(i)) is not None), None)


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    if is_there(path):
        named = {"default": _template_text(path)}
        if is_there(more / f"{TOOL_USE}.jinja"):
            named[TOOL_USE] = _template_text(more / f"{TOOL_USE}.jinja")
        return named
    template = config.get("chat_template")
    if template is None:  # the processor's, of multimodal models
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        pairs = ((t.get("name"), t.get("template")) for t in template if isinstance(t, dict))
        template = {str(name): text for name, text in pairs}
    if template is None or isinstance(template, str):
        return {} if template is None else {"default": template}
    if isinstance(template, dict):
        return {str(name): text for name, text in template.items() if isinstance(text, str)}
    raise TokenizerError(f"chat_template in {folder / 'tokenizer_config.json'} must be text")


def _template_text(path: Path) -> str:
    try:
        return file_text(path, TEMPLATE_BYTES, "utf-8-sig")
    except (OSError, ValueError) as err:
        raise TokenizerError(f"cannot read {path}: {reason(err)}") from err


# ---- added tokens --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExtendedTokenizer:
    """A tokenizer's folder with tokens added."""

    folder: Path  # exists as long as the process
    new_tokens: tuple[int, ...]  # the ids of the tokens that it did not have
    count: int  # its number of tokens, including gaps in the ids


def extended_tokenizer(
    folder: Path, tokens: Sequence[str], special_tokens: Sequence[str]
) -> ExtendedTokenizer:
    """Adds tokens to a tokenizer, as ``tokenizer.add_tokens`` does, unless it has them."""
    path = folder / "tokenizer.json"
    if not is_there(path):
        raise TokenizerError(f"cannot add tokens: {folder} has no tokenizer.json")
    try:
        stored: dict[str, Any] = json.loads(file_bytes(path, TOKENIZER_BYTES))
        added = list(stored.get("added_tokens") or [])
        texts = {*_vocabulary(stored), *(token["content"] for token in added)}
        first = max([len(_vocabulary(stored)), *(int(token["id"]) + 1 for token in added)])
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise TokenizerError(f"cannot read the tokenizer {path}: {err}") from err
    named = [(text, False) for text in tokens] + [(text, True) for text in special_tokens]
    for i, (text, _) in enumerate(named):
        if text in (other for other, _ in named[:i]):
            raise ConfigError(f"model.add_tokens and add_special_tokens have {text!r} twice")
    new = [
        {  # the defaults of Hugging Face's AddedToken
            "id": first + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": not special,
            "special": special,
        }
        for i, (text, special) in enumerate(each for each in named if each[0] not in texts)
    ]
    stored["added_tokens"] = added + new
    made = _folder_with(folder, stored, new)
    ids = tuple(first + i for i in range(len(new)))
    return ExtendedTokenizer(made, ids, first + len(new))


def _vocabulary(stored: dict[str, Any]) -> list[str]:
    """Texts of the model's own tokens: keys of a mapping, or Unigram's pairs with scores."""
    vocabulary = stored["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return list(vocabulary)
    return [str(text) for text, _ in vocabulary]


def _folder_with(source: Path, stored: dict[str, Any], new: list[dict[str, Any]]) -> Path:
    folder = folder_of_this_process("qlora-wgpu-tokens-")
    copy_tokenizer(source, folder)
    for name in ("config.json", GENERATION):
        if is_there(source / name):
            (folder / name).write_bytes(file_bytes(source / name, MODEL_JSON_BYTES))
    _write(folder / "tokenizer.json", stored)
    if is_there(folder / CONFIG):
        config = read_json_object(folder / CONFIG, TOKENIZER_CONFIG_BYTES, TokenizerError)
        if isinstance(config.get("added_tokens_decoder"), dict):
            for token in new:
                config["added_tokens_decoder"][str(token["id"])] = {
                    key: value for key, value in token.items() if key != "id"
                }
            _write(folder / CONFIG, config)
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
