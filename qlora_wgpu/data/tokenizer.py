"""A Hugging Face tokenizer folder, read with the ``tokenizers`` library alone."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.tokenizer_files import WITHOUT_TOKENIZER
from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import TokenizerError, reason
from qlora_wgpu.files import file_bytes, file_text, is_dir, is_there
from qlora_wgpu.limits import TEMPLATE_BYTES, TOKENIZER_BYTES, TOKENIZER_CONFIG_BYTES
from qlora_wgpu.sandbox.tokenizers import ConfinedTokenizer, library_errors, open_tokenizer

_SURROGATE = re.compile("[\ud800-\udfff]")
Tokens = tuple[list[int], list[tuple[int, int]]]
"""Ids, and for each the characters that it stands for."""

_OTHER_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"), ("tokenizer.tiktoken",))
TOOL_USE = "tool_use"
"""What transformers calls the chat template for conversations with tools."""
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class Tokenizer:
    """Text to token ids and back.

    ``tokenizer.json`` is used as it is: what it puts before and after a text is what
    ``add_special_tokens`` adds. Truncation and padding saved in it are switched off.

    Attributes:
        chat_template: The Jinja source of the model's chat template, or None.
        tool_template: That of the one for conversations with tools, where it is another one.
        special_tokens: Texts of the special tokens by name, such as ``"bos_token"``.
        eos_token_ids: Every id that ends a generation (a model may have several).
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
            backend: The tokenizer; its truncation and padding are switched off.
            special_tokens: Texts by name; those that the vocabulary lacks are left out.
            chat_template: Jinja source.
            eos_token_ids: Further ids that end a generation.
        """
        self._backend = backend
        with library_errors("the tokenizer cannot be used"):
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
        """Reads ``tokenizer.json`` and the files beside it.

        Special tokens come from ``tokenizer_config.json``, else ``special_tokens_map.json``, else
        by id from ``generation_config.json`` or ``config.json``. ``chat_template.jinja`` wins over
        the template inside ``tokenizer_config.json``, and that over ``chat_template.json``.

        Raises:
            TokenizerError: If a file is missing, damaged or not understood.
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
            raise TokenizerError(f"{path} cannot be read: {err.strerror or err}") from err
        except TokenizerError as err:
            raise TokenizerError(f"{path} is not a tokenizer that can be read: {err}") from err

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
                continue  # null, which says that there is none, whatever the model's ids are
            if text is None or backend.token_to_id(text) is None:
                text = _first_token(backend, ids.get(f"{name}_id"))
            if text is not None:
                special[name] = text
        # Without one of this name nothing says which is meant, as in transformers.
        templates = _chat_templates(folder, config)
        tokenizer = cls(
            backend,
            special,
            templates.get("default"),
            [i for i in _id_list(ids.get("eos_token_id")) if backend.id_to_token(i) is not None],
        )
        # What the library writes of a vocabulary with holes goes to the terminal as well.
        tokenizer.tool_template = templates.get(TOOL_USE)
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
        """Token ids, and for each the half-open range of characters of ``text`` it stands for.

        Added special tokens stand for ``(0, 0)``. Some tokenizers leave spaces out of the ranges.

        Raises:
            TokenizerError: If the text cannot be encoded.
        """
        _check_text(text)
        with library_errors("the text cannot be encoded"):
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return list(encoding.ids), list(encoding.offsets)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Tokens]:
        """What ``encode_with_offsets`` gives for each of the texts, found on all processors.

        Raises:
            TokenizerError: If one of them cannot be encoded.
        """
        for text in texts:
            _check_text(text)
        with library_errors("a text cannot be encoded"):
            encodings = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
            return [(each.ids, each.offsets) for each in encodings]

    @cached_property
    def added_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that ``add_special_tokens`` puts before and behind a text."""
        bare, whole = self.encode("a", False), self.encode("a", True)
        begin = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return whole[:begin], whole[begin + len(bare) :]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing.

        Raises:
            TokenizerError: If an id is not a whole number from 0 on.
        """
        with library_errors("the token ids cannot be decoded"):
            kept = [int(i) for i in ids]
            if skip_special_tokens:  # the library's own switch misses tokens marked "normalized"
                kept = [i for i in kept if i not in self._special_ids]
            return str(self._backend.decode(kept, skip_special_tokens=skip_special_tokens))

    def first_special(self, ids: Sequence[int]) -> str | None:
        """Text of the first special token among ids but the unknown one, or None."""
        unknown = self._special_id("unk_token")
        special = next((i for i in ids if i in self._special_ids and i != unknown), None)
        return None if special is None else str(self._backend.id_to_token(special))

    def knows(self, text: str, before: str = "a") -> bool:
        """Whether a text is one token in the midst of others.

        Args:
            text: The text.
            before: What stands before it: some tokenizers know their special tokens only at the
                beginning of a word.
        """
        token = self.token_id(text)
        return token is not None and token in self.encode(f"{before}{text}a", False)

    @cached_property
    def begins_with_bos(self) -> bool:
        """Whether the tokenizer itself puts the token that begins a sequence before a text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the whole of tokenizer.json."""
        return hashlib.sha256(str(self._backend.to_str()).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
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
        """Text of the token that begins a sequence, or None."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence, or None."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence, or None."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence, or None."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id that the tokenizer pads with, or None; it may lie beyond the model's vocabulary."""
        return self._special_id("pad_token")


def _instead(folder: Path) -> str:
    """What a folder has in place of tokenizer.json, and what helps."""
    form = next((names for names in _OTHER_FORMS if all(is_there(folder / n) for n in names)), ())
    if form:
        has = " and ".join(form)
        return f"it holds {has} only; load and save it once with transformers to get one"
    if is_there(folder / "tekken.json"):
        return "it holds tekken.json only; copy that of a model with the same tokenizer there"
    return "copy the tokenizer of the base model there"


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"only text can be encoded, got {type(text).__name__}")
    if _SURROGATE.search(text):
        raise TokenizerError("a text with a lone surrogate (half a character) has no tokens")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no such file."""
    if not is_there(path):
        return {}
    return read_json_object(path, TOKENIZER_CONFIG_BYTES, TokenizerError)


def _token_text(value: Any) -> str | None:
    """A token as both styles write it: plain text, or an object with ``content``."""
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
    """The chat templates by their names; one alone is the ``default``."""
    path, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    if is_there(path):
        named = {"default": _template_text(path)}
        if is_there(more / f"{TOOL_USE}.jinja"):
            named[TOOL_USE] = _template_text(more / f"{TOOL_USE}.jinja")
        return named
    template = config.get("chat_template")
    if template is None:  # models with images may have it for their processor alone
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
        raise TokenizerError(f"{path} cannot be read: {reason(err)}") from err
