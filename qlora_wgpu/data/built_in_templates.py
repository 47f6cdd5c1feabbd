"""Chat templates by name, and which of them a tokenizer was made for.

The templates are the files in ``templates/``, each of which stands alone and marks what the
assistant writes.
"""

from __future__ import annotations

from pathlib import Path

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.files import file_text
from qlora_wgpu.limits import TEMPLATE_BYTES

_FOLDER = Path(__file__).parent / "templates"
BUILT_IN_TEMPLATES = {
    name: file_text(_FOLDER / f"{name}.jinja", TEMPLATE_BYTES, "utf-8")
    for name in BUILT_IN_CHAT_TEMPLATES
}
"""Sources by name."""

# Templates of no family begin as the tokenizer begins a text, and write its end token so that it
# is one; the others do as their family does.
_OF_NO_FAMILY = ("alpaca", "plain")
_BEGINNING = "{{- bos_token -}}\n"
_END, _END_OF_A_WORD = "+ eos_token", "+ ' ' + eos_token"
# What a tokenizer knows that was made for a template: the token that ends a turn, then others.
# A template comes before those whose tokens are among its own.
_TOKENS = {
    "llama3": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma": ("<end_of_turn>", "<start_of_turn>"),
    "granite": ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    "command-r": (
        *("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
        *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    ),
    "phi4": ("<|im_end|>", "<|im_start|>", "<|im_sep|>"),
    "chatml": ("<|im_end|>", "<|im_start|>"),
    "phi": ("<|end|>", "<|user|>", "<|assistant|>"),
}
_TURNS_OF_MISTRAL = ("[INST]", "[/INST]")


def built_in_template(name: str, tokenizer: Tokenizer) -> str:
    """The source of a template, for a tokenizer."""
    source = BUILT_IN_TEMPLATES[name]
    if name not in _OF_NO_FAMILY:
        return source
    if not tokenizer.begins_with_bos:
        source = source.replace(_BEGINNING, "")
    end = tokenizer.eos_token
    if end is not None and not tokenizer.knows(end) and tokenizer.knows(end, before=" "):
        source = source.replace(_END, _END_OF_A_WORD)
    return source


def suitable_template(tokenizer: Tokenizer) -> str:
    """The name of the template that fits what a tokenizer knows.

    Each of a template's special tokens must be one token of the vocabulary, and its end of a turn
    one that counts as special. Where no family's are there, it is ``plain``, which needs nothing
    but the end-of-sequence token.
    """
    for name, tokens in _TOKENS.items():
        end = tokenizer.first_special(tokenizer.encode(tokens[0], False))
        if end == tokens[0] and all(map(tokenizer.knows, tokens)):
            return name
    if tokenizer.eos_token is not None and all(map(tokenizer.knows, _TURNS_OF_MISTRAL)):
        return "mistral"
    return "plain"


def is_built_in(source: str) -> bool:
    """Whether a template's source is this package's own, as it is for some tokenizer."""
    return _for_all(source) in map(_for_all, BUILT_IN_TEMPLATES.values())


def _for_all(source: str) -> str:
    """A template without what ``built_in_template`` changes for a tokenizer."""
    return source.replace(_BEGINNING, "").replace(_END_OF_A_WORD, _END)
