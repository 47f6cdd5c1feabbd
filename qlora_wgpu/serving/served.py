"""A model that clients may name: an adapter, and how its prompts are written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.serving.asked import Asked
from qlora_wgpu.serving.chat_request import ChatRequest
from qlora_wgpu.serving.completion_request import CompletionRequest, Prompt


@dataclass(frozen=True)
class Served:
    """A model that is served.

    Attributes:
        adapter: The name of its adapter in the model that is open.
        written: How conversations are written.
    """

    adapter: str
    written: PromptFormat

    def wanted(self, asked: Asked) -> list[Wanted]:
        """The answers of a request, those to the first prompt first.

        Raises:
            DataError: If the template refuses the conversation.
            ConfigError: If it cannot write tools.
        """
        if isinstance(asked, ChatRequest):
            prompts = [self._chat(asked)]
        else:
            assert isinstance(asked, CompletionRequest)
            prompts = [self._text(prompt) for prompt in asked.prompts]
        return [prompt for prompt in prompts for _ in range(asked.count)]

    def _chat(self, asked: ChatRequest) -> Wanted:
        template = self.written.template
        if asked.tools and (template is None or "tools" not in template.source):
            raise ConfigError(
                "tools are not written by the model's chat template, so that it would not know of "
                "them: leave 'tools' out"
            )
        ids = self.written.ids(asked.messages, asked.tools)
        return Wanted(ids, self.written.stop_ids, self.written.stop_text, ())

    def _text(self, prompt: Prompt) -> Wanted:
        text = PromptFormat.text(self.written.tokenizer)
        ids = prompt if not isinstance(prompt, str) else text.ids([{"content": prompt}])
        return Wanted(ids, text.stop_ids, text.stop_text, ids)


@dataclass(frozen=True)
class Wanted:
    """An answer that is wanted.

    Attributes:
        prompt_ids: Its prompt.
        stop_ids: Tokens that end it.
        stop_text: A text that does, if there is one.
        context: Tokens that its text goes on with; none where it begins one.
    """

    prompt_ids: list[int]
    stop_ids: Collection[int]
    stop_text: str
    context: Sequence[int]
