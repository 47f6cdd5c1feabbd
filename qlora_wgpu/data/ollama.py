"""Ollama's Modelfile for a GGUF file, with the chat template in Go's template language.

The texts that a template writes around contents are found by rendering marker words, and verified
by rendering other conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.data.chat_template import ChatTemplate
from qlora_wgpu.data.prompts import PromptFormat
from qlora_wgpu.errors import QLoRAError

# ---- the Modelfile -------------------------------------------------------------------------------

# generation_config.json's names and Ollama's.
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
_NO_TEMPLATE = (
    "# Ollama supports this model's chat template only in part: it does more than put text around\n"
    "# turns, or has no system message. Check the prompts that the model gets (OLLAMA_DEBUG=1)."
)


def modelfile(
    file: str, prompt: PromptFormat, generation: Mapping[str, Any], *, adapter_of: str | None = None
) -> str:
    """The text of a Modelfile, for ``ollama create NAME -f Modelfile``."""
    named = [f"FROM ./{file}"]
    if adapter_of is not None:
        named = [f"FROM {adapter_of}", f"ADAPTER ./{file}"]
    template = ollama_template(prompt)
    lines = [*named, _NO_TEMPLATE if template is None else f"TEMPLATE {_quoted(template)}"]
    lines += [f"PARAMETER stop {_quoted(text)}" for text in stop_texts(prompt)]
    lines += [f"PARAMETER {name} {value}" for name, value in _sampling(generation).items()]
    return "\n".join(lines) + "\n"


def stop_texts(prompt: PromptFormat) -> list[str]:
    """Stop sequences: the stop tokens as text, and the stop text."""
    tokenizer = prompt.tokenizer
    tokens = [
        tokenizer.decode([token], skip_special_tokens=False) for token in sorted(prompt.stop_ids)
    ]
    return [text for text in dict.fromkeys([*tokens, prompt.stop_text]) if text.strip()]


def _sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters of generation_config.json; greedy if it does not sample."""
    if generation.get("do_sample") is False:
        return {"temperature": 0}
    values: dict[str, Any] = {name: generation.get(key) for key, name in _PARAMETERS.items()}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def _quoted(text: str) -> str:
    return f'"""{text}"""'


# ---- the template --------------------------------------------------------------------------------

Messages = Sequence[dict[str, str]]


def _conversation(*contents: str, system: str | None = None) -> Messages:
    begin = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*begin, *({"role": roles[i % 2], "content": text} for i, text in enumerate(contents))]


PROBES: tuple[Messages, ...] = (
    _conversation("one"),
    _conversation("one two", "three", "four"),
    _conversation("one", "two", "three", system="say"),
    _conversation("one", system="say\nit"),
    _conversation("1", "two", "three", "four", "five"),
    _conversation("one", "two", "three", "four", "five", system="say"),
)
"""Conversations that both templates must render equally."""
_UNQUOTED = ("{{", "}}", '"""')  # cannot be written in a Modelfile's text


def ollama_template(prompt: PromptFormat) -> str | None:
    """The Go template that is equivalent to a model's chat template; None if there is none."""
    if prompt.kind == "text":
        return "{{ .Prompt }}"
    if prompt.template is None:
        return None
    bos = prompt.tokenizer.bos_token or ""
    texts = TurnTexts.of(prompt.template, bos)
    if texts is None or any(sign in texts.written(PROBES[2]) for sign in _UNQUOTED):
        return None
    for messages in PROBES:
        if _rendered(prompt.template, bos, messages) != texts.written(messages):
            return None
    return texts.in_go()


_SYSTEM, _TURNS = "qzsystemqz", ("qzfirstqz", "qzanswerqz", "qzsecondqz")


@dataclass(frozen=True)
class TurnTexts:
    """What a template writes around the contents of turns."""

    begin: str  # before the user's first content
    answer: str  # between the user's and the assistant's content
    turn: str  # between the assistant's and the user's content
    end: str  # after the user's last content: the generation prompt
    system: tuple[str, str]  # before and after the system's content
    is_last: bool  # whether the system's content is in the user's last turn, not before the first

    @classmethod
    def of(cls, template: ChatTemplate, bos: str) -> TurnTexts | None:
        """The texts of a template; None if its turns do not have this form."""
        plain = _between(template, bos, _conversation(*_TURNS), _TURNS)
        if plain is None:
            return None
        begin, answer, turn, end = plain
        with_system = _conversation(*_TURNS, system=_SYSTEM)
        if within := _between(template, bos, with_system, (_SYSTEM, *_TURNS)):
            return cls(begin, answer, turn, end, (within[0], within[1]), False)
        contents = (*_TURNS[:2], _SYSTEM, _TURNS[2])
        if (within := _between(template, bos, with_system, contents)) is None:
            return None
        system = within[2].removeprefix(turn), within[3]
        return cls(begin, answer, turn, end, system, True)

    def written(self, messages: Messages) -> str:
        """A conversation as the Go template renders it."""
        systems = [message["content"] for message in messages if message["role"] == "system"]
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        system, text = systems[-1] if systems else "", ""
        around = self.system[0] + system + self.system[1] if system else ""
        begin = around if around and not self.is_last else self.begin
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                text += self.answer + message["content"]
            elif message["role"] == "user":
                text += begin if i == users[0] else self.turn
                text += around if self.is_last and i == users[-1] else ""
                text += message["content"]
        return text + self.end

    def in_go(self) -> str:
        """The Go template."""
        before, after = self.system
        system = f"{before}{{{{ $system }}}}{after}"
        begin = self.begin if self.is_last else _choice("$system", system, self.begin)
        last = (
            f"{{{{ if and $system (eq $i $last) }}}}{system}{{{{ end }}}}" if self.is_last else ""
        )
        return (
            '{{ $system := "" }}{{ $first := -1 }}{{ $last := -1 }}{{ range $i, $m := .Messages }}'
            '{{ if eq .Role "system" }}{{ $system = .Content }}{{ else if eq .Role "user" }}'
            "{{ if lt $first 0 }}{{ $first = $i }}{{ end }}{{ $last = $i }}{{ end }}{{ end }}"
            '{{ range $i, $m := .Messages }}{{ if eq .Role "user" }}'
            f"{_choice('eq $i $first', begin, self.turn)}{last}{{{{ .Content }}}}"
            f'{{{{ else if eq .Role "assistant" }}}}{self.answer}{{{{ .Content }}}}'
            f"{{{{ end }}}}{{{{ end }}}}{self.end}"
        )


def _choice(condition: str, text: str, otherwise: str) -> str:
    return f"{{{{ if {condition} }}}}{text}{{{{ else }}}}{otherwise}{{{{ end }}}}"


def _between(
    template: ChatTemplate, bos: str, messages: Messages, contents: Sequence[str]
) -> list[str] | None:
    """The texts before, between and after contents; None if these are not in this order."""
    rest = _rendered(template, bos, messages)
    pieces: list[str] = []
    for content in contents:
        if rest is None or rest.count(content) != 1:
            return None
        piece, _, rest = rest.partition(content)
        pieces.append(piece)
    return None if rest is None else [*pieces, rest]


def _rendered(template: ChatTemplate, bos: str, messages: Messages) -> str | None:
    """A rendered conversation without its BOS token; None if the template refuses it."""
    try:
        text = template.render(messages, add_generation_prompt=True).text
    except QLoRAError:
        return None
    return text.removeprefix(bos)
