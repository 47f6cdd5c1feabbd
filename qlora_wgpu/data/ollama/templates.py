"""The built-in chat templates as Ollama has templates: in the language of Go's text/template.

None writes the token that begins a text: Ollama's tokenizer puts it there, as GGUF files tell it.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlora_wgpu.data.built_in_templates import built_in_template
from qlora_wgpu.data.chat import ChatTemplate
from qlora_wgpu.data.prompt_format import PromptFormat
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import QLoRAError

_SYSTEM = (
    '{{ $system := "" }}{{ range .Messages }}{{ if eq .Role "system" }}{{ $system = .Content }}'
    "{{ end }}{{ end }}"
)
_USER, _ASSISTANT = '{{ if eq .Role "user" }}', '{{ else if eq .Role "assistant" }}'


def _turns(turn: str, answer: str) -> str:
    """All turns alike, and the beginning of an answer."""
    return f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}{answer}"


_GO = {
    "chatml": _turns(
        "<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n", "<|im_start|>assistant\n"
    ),
    "llama3": _turns(
        "<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        f"{_SYSTEM}{{{{ range .Messages }}}}{_USER}<start_of_turn>user\n"
        '{{ if $system }}{{ $system }}\n\n{{ $system = "" }}{{ end }}{{ .Content }}<end_of_turn>\n'
        f"{_ASSISTANT}<start_of_turn>model\n{{{{ .Content }}}}<end_of_turn>\n"
        "{{ end }}{{ end }}<start_of_turn>model\n"
    ),
    "phi": _turns("<|{{ .Role }}|>\n{{ .Content }}<|end|>\n", "<|assistant|>\n"),
    "phi4": _turns(
        "<|im_start|>{{ .Role }}<|im_sep|>{{ .Content }}<|im_end|>",
        "<|im_start|>assistant<|im_sep|>",
    ),
    "granite": _turns(
        "<|start_of_role|>{{ .Role }}<|end_of_role|>{{ .Content }}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "command-r": _turns(
        f"<|START_OF_TURN_TOKEN|><|{_USER}USER{_ASSISTANT}CHATBOT{{{{ else }}}}SYSTEM{{{{ end }}}}"
        "_TOKEN|>{{ .Content }}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "zephyr": _turns("<|{{ .Role }}|>\n{{ .Content }}EOS\n", "<|assistant|>\n"),
    "plain": _turns(
        f"{_USER}User{_ASSISTANT}Assistant{{{{ else }}}}System{{{{ end }}}}:\n"
        "{{ .Content }}EOS\n",
        "Assistant:\n",
    ),
    "mistral": (
        f"{_SYSTEM}{{{{ $last := 0 }}}}{{{{ range $i, $m := .Messages }}}}{_USER}"
        "{{ $last = $i }}{{ end }}{{ end }}"
        f"{{{{ range $i, $m := .Messages }}}}{_USER}[INST] "
        "{{ if and $system (eq $i $last) }}{{ $system }}\n\n{{ end }}{{ .Content }}[/INST]"
        f"{_ASSISTANT} {{{{ .Content }}}}EOS{{{{ end }}}}{{{{ end }}}}"
    ),
    "llama2": (
        f"{_SYSTEM}{{{{ $first := true }}}}{{{{ range .Messages }}}}{_USER}"
        "{{ if not $first }}BOS{{ end }}[INST] {{ if and $first $system }}<<SYS>>\n{{ $system }}\n"
        "<</SYS>>\n\n{{ end }}{{ $first = false }}{{ .Content }} [/INST]"
        f"{_ASSISTANT} {{{{ .Content }}}} EOS{{{{ end }}}}{{{{ end }}}}"
    ),
    "alpaca": (
        f"{_SYSTEM}{{{{ if $system }}}}{{{{ $system }}}}{{{{ else }}}}Below is an instruction that "
        "describes a task. Write a response that appropriately completes the request.{{ end }}"
        f"{{{{ range .Messages }}}}{_USER}\n\n### Instruction:\n{{{{ .Content }}}}\n\n### Response:"
        f"\n{_ASSISTANT}{{{{ .Content }}}}EOS{{{{ end }}}}{{{{ end }}}}"
    ),
}
"""By name; EOS and BOS stand for the tokenizer's tokens that end and begin a text."""

PROBES: tuple[Sequence[dict[str, str]], ...] = (
    [{"role": "user", "content": "one"}],
    [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ],
    [
        {"role": "system", "content": "say"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
)
"""Conversations by which a template is known."""


def names_of_templates() -> list[str]:
    """The built-in templates that have one in Go's language."""
    return list(_GO)


def go_template(name: str, tokenizer: Tokenizer) -> str:
    """A built-in template in Go's language.

    Args:
        name: The template's name.
        tokenizer: Whose tokens it writes.
    """
    tokens = {"EOS": tokenizer.eos_token or "", "BOS": tokenizer.bos_token or ""}
    source = _GO[name]
    for stands_for, text in tokens.items():
        source = source.replace(stands_for, text)
    return source


def ollama_template(prompt: PromptFormat) -> str | None:
    """The template in Go's language that writes what a model's own does; None if none is known.

    Text is continued as it is.

    Args:
        prompt: How prompts are written for the model.
    """
    if prompt.kind == "text":
        return "{{ .Prompt }}"
    if prompt.template is None:
        return None
    tokenizer = prompt.tokenizer
    own = _rendered(prompt.template, tokenizer)
    for name in names_of_templates():
        known = ChatTemplate(built_in_template(name, tokenizer), tokenizer.special_tokens)
        if own == _rendered(known, tokenizer):
            return go_template(name, tokenizer)
    return None


def _rendered(template: ChatTemplate, tokenizer: Tokenizer) -> list[str | None]:
    """The probes, without the token that begins a text."""
    texts: list[str | None] = []
    for messages in PROBES:
        try:
            text = template.render(messages, add_generation_prompt=True).text
        except QLoRAError:
            texts.append(None)
        else:
            texts.append(text.removeprefix(tokenizer.bos_token or ""))
    return texts
