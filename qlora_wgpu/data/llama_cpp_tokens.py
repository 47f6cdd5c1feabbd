"""The ids that llama.cpp makes of a text, from what a GGUF file says of its vocabulary.

llama.cpp looks for special tokens in the text first, the longest of them first, and tokenizes what
lies between them piece by piece. It normalizes nothing, and of the flags of added tokens it knows
none but Phi 3's. The pieces go through the tokenizer that the file's reader makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qlora_wgpu.checkpoint.gguf.pre_tokenizers import with_ascii_capitals
from qlora_wgpu.checkpoint.gguf.tokenizer import TokenizerFiles, tokenizer_files
from qlora_wgpu.errors import brief
from qlora_wgpu.sandbox.tokenizers import library_errors, open_tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KEY = "tokenizer.ggml."
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
    """llama.cpp's tokenizer of a GGUF file."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        """Takes a file's keys.

        Args:
            metadata: The keys, as they are read.
            path: The file, for messages.

        Raises:
            TokenizerError: If it has no vocabulary, or one that is not read.
        """
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
        """The ids of a prompt, whose own token that begins it does not come twice.

        Raises:
            TokenizerError: If the text cannot be encoded.
        """
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
        """Where the ids of a file part from those of training, in words; None where none do.

        Args:
            trained: Texts, and what they were in training.
            eos: The token that rows may have behind their text.
        """
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
