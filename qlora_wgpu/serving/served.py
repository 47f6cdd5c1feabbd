"""A model that clients may name: an adapter, and how its prompts are written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from qlora_wgpu.data import ChatTemplate, PromptFormat
from qlora_wgpu.data.conversations import Conversation
from qlora_wgpu.data.marker_words import ANSWERS
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.serving.requests import Asked, ChatRequest, CompletionRequest, Prompt
from qlora_wgpu.serving.tool_calls import ToolSet, call_format, names_of


@dataclass(frozen=True)
class ServedModel:
    """A model that is served."""

    adapter: str  # the name of its adapter in the model that is open
    written: PromptFormat  # how conversations are written

    def wanted(self, asked: Asked) -> Iterator[GenerationRequest]:
        """Yields what is wanted for each prompt of a request, once for all answers to it."""
        if isinstance(asked, ChatRequest):
            yield self._chat(asked)
        else:
            assert isinstance(asked, CompletionRequest)
            yield from map(self._text, asked.prompts)

    def _chat(self, asked: ChatRequest) -> GenerationRequest:
        template = self.written.template
        if asked.tools and (template is None or "tools" not in template.source):
            raise ConfigError(
                "tools are not written by the model's chat template, so that it would not know of "
                "them: leave 'tools' out"
            )
        if asked.options and template is None:
            raise ConfigError(
                "'chat_template_kwargs' are for a chat template, which this model has not: leave "
                "them out"
            )
        if template is not None:
            self._require_written(template, asked)
        ids = self.written.ids(asked.messages, asked.tools, asked.options)
        offered = None if template is None else self._offered(asked, template.source)
        return GenerationRequest(ids, self.written.stop_ids, self.written.stop_text, (), offered)

    @staticmethod
    def _require_written(template: ChatTemplate, asked: ChatRequest) -> None:
        """Refuses messages that the model would not see."""
        conversation = Conversation(asked.messages, asked.tools, options=asked.options)
        if unseen := template.left_out(conversation) - ANSWERS:
            raise DataError(
                f"the model's chat template leaves {min(unseen)} out, so that the model would not "
                "see what is said there: say it in a message of the user"
            )

    def _offered(self, asked: ChatRequest, template: str) -> ToolSet | None:
        """What calls are read by, where there are tools and the template shows how."""
        form = call_format(template)
        if form is None or not asked.tools:
            return None
        return ToolSet(form, names_of(asked.tools), asked.several_calls)

    def markers(self, offered: ToolSet | None) -> dict[int, str]:
        """Special tokens that calls are told by."""
        tokenizer = self.written.tokenizer
        known = () if offered is None else offered.form.markers
        ids = ((tokenizer.token_id(marker), marker) for marker in known)
        return {i: marker for i, marker in ids if i is not None and not tokenizer.decode([i])}

    def _text(self, prompt: Prompt) -> GenerationRequest:
        text = PromptFormat.text(self.written.tokenizer)
        ids = prompt if not isinstance(prompt, str) else text.ids([{"content": prompt}])
        return GenerationRequest(ids, text.stop_ids, text.stop_text, ids)


@dataclass(frozen=True)
class GenerationRequest:
    """An answer that is wanted."""

    prompt_ids: list[int]  # its prompt
    stop_ids: Collection[int]  # tokens that end it
    stop_text: str  # a text that does, if there is one
    context: Sequence[int]  # tokens that its text goes on with; none where it begins one
    offered: ToolSet | None = None  # functions that it may call, where calls can be told from text
