"""Models that clients may name, and the thread that generates for all of them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from qlora_wgpu.data import ChatTemplate, PromptFormat
from qlora_wgpu.data.conversations import Conversation
from qlora_wgpu.data.marker_words import ANSWERS
from qlora_wgpu.errors import ConfigError, DataError, QLoRAError
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sequence import FinishReason, Request
from qlora_wgpu.generation.text import TextStream, TokenLogprobs
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


@dataclass(frozen=True)
class Chunk:
    """What has come of an answer."""

    text: str  # what follows what came before
    tokens: int  # tokens so far
    finish_reason: FinishReason | None = None  # why it has ended, with the last piece
    ids: tuple[int, ...] = ()  # the tokens that are new
    told: tuple[TokenLogprobs, ...] = ()  # how likely these were, where that is asked for


Pieces = asyncio.Queue[tuple[int, Chunk | Exception]]
"""Pieces of a request's answers as they come, each with its answer's number."""


class Generation:
    """An answer that grows in the writer's thread; its pieces come in the event loop's."""

    def __init__(
        self,
        served: ServedModel,
        wanted: GenerationRequest,
        asked: Asked,
        number: int,
        pieces: Pieces,
    ) -> None:
        self.served, self.wanted, self.asked = served, wanted, asked
        self.number = number  # how many answers of the request come before it
        self.pieces = pieces
        self.is_wanted = True  # whether somebody still waits for it
        self._text: Request | None = None
        stops = (*asked.stop, wanted.stop_text)
        self._stream = TextStream(
            served.written.tokenizer, stops, wanted.context, served.markers(wanted.offered)
        )
        self._sent = 0
        self._loop = asyncio.get_running_loop()
        # Is done once it has had its turn to be looked at.
        self.begun: asyncio.Future[None] = self._loop.create_future()

    # -- in the writer's thread ----------------------------------------------------------------

    def begin(self, text: Request) -> None:
        """Takes its text in the engine."""
        self._text = text
        self._tell(self._set_begun, None)

    def read(self) -> bool:
        """Takes in what the engine has made; whether it has ended."""
        text, stream, shown = self._text, self._stream, ""
        assert text is not None
        while len(text.ids) > stream.count and not stream.stopped:
            shown += stream.push(text.ids[stream.count])
        if stream.stopped:
            text.finish_reason = "stop"
        elif not self.is_wanted:
            text.cancel()
        if text.finish_reason is not None and not stream.stopped:
            shown += stream.rest()
        if shown or text.finish_reason is not None:
            sent, self._sent = self._sent, len(text.ids)
            new = tuple(text.ids[sent:])
            piece = Chunk(shown, len(text.ids), text.finish_reason, new, tuple(text.told[sent:]))
            self._tell(self.pieces.put_nowait, (self.number, piece))
        return text.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        if self._text is None:
            self._tell(self._set_begun, error)
            return
        self._text.cancel()
        self._tell(self.pieces.put_nowait, (self.number, error))

    def _set_begun(self, error: Exception | None) -> None:
        if self.begun.done():
            return
        if error is None:
            self.begun.set_result(None)
        else:
            self.begun.set_exception(error)

    def _tell(self, what: object, value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            self._loop.call_soon_threadsafe(what, value)  # type: ignore[arg-type]


class GenerationWorker:
    """Owns an engine, in a thread of its own.

    Texts of one adapter grow at a time. Whoever asks for another one waits until they have ended,
    and so does all that is asked for later.
    """

    def __init__(self, engine: Engine, model: QLoRAModel) -> None:
        self._engine = engine
        self._model = model
        self._changed = threading.Condition()
        self._asked: deque[Generation] = deque()
        self._growing: list[Generation] = []
        self._closed = False
        self._prompts = ThreadPoolExecutor(1, "prompts")
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    async def ask(self, served: ServedModel, asked: Asked) -> list[Generation]:
        """Begins the answers of a request."""
        # Elsewhere: answers go on while a long prompt becomes tokens.
        loop = asyncio.get_running_loop()
        each = await loop.run_in_executor(self._prompts, self._wanted, served, asked)
        pieces: Pieces = asyncio.Queue()
        answers = [
            Generation(served, wanted, asked, number, pieces) for number, wanted in enumerate(each)
        ]
        with self._changed:
            if self._closed:
                raise _stopped()
            self._asked.extend(answers)
            self._changed.notify()
        try:
            begun = await asyncio.gather(*(a.begun for a in answers), return_exceptions=True)
            if problem := next((each for each in begun if each is not None), None):
                raise problem
        except BaseException:  # whoever asked may have gone
            for answer in answers:
                answer.is_wanted = False
            raise
        return answers

    def _wanted(self, served: ServedModel, asked: Asked) -> list[GenerationRequest]:
        """The answers of a request, those to the first prompt first."""
        found: list[GenerationRequest] = []
        for wanted in served.wanted(asked):
            self._engine.check_room(len(wanted.prompt_ids), asked.max_new_tokens)
            found += [wanted] * asked.count
        return found

    def stop(self) -> None:
        """Ends all answers after this turn, which their clients are told; nothing more begins."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Stops, and waits for the end of the thread."""
        self.stop()
        self._thread.join()
        self._prompts.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asked or self._growing)
                if self._closed:
                    break
                begun = self._of_one_adapter()
            for answer in begun:
                self._begin(answer)
            if self._growing:
                self._turn()
        for answer in (*self._growing, *self._asked):
            answer.fail(_stopped())

    def _of_one_adapter(self) -> list[Generation]:
        """What may join, in the order in which it was asked for."""
        found: list[Generation] = []
        first = next(iter([*self._growing, *self._asked]), None)
        while first and self._asked and self._asked[0].served.adapter == first.served.adapter:
            found.append(self._asked.popleft())
        return [answer for answer in found if answer.is_wanted]

    def _begin(self, answer: Generation) -> None:
        asked = answer.asked
        most = asked.max_new_tokens
        try:
            self._model.set_adapter(answer.served.adapter)
            text = self._engine.add(
                answer.wanted.prompt_ids,
                asked.sampling_of(answer.number),
                max_new_tokens=self._engine.capacity if most is None else most,
                stop_ids=answer.wanted.stop_ids,
                logprobs=asked.logprobs,
                number=answer.number,
            )
        except Exception as err:  # the thread is all requests'
            answer.fail(told(err))
            return
        answer.begin(text)
        self._growing.append(answer)

    def _turn(self) -> None:
        try:
            if not self._engine.is_idle:
                self._engine.step()
        except Exception as err:
            for answer in self._growing:
                answer.fail(told(err))
            self._growing = []
            return
        self._growing = [answer for answer in self._growing if not self._is_read(answer)]

    def _is_read(self, answer: Generation) -> bool:
        """Takes in what there is of an answer; whether it has ended."""
        try:
            return answer.read()
        except Exception as err:  # which concerns no other
            answer.fail(told(err))
            return True


def _stopped() -> QLoRAError:
    return QLoRAError("the server has been stopped")


def told(err: Exception) -> QLoRAError:
    """An error as clients are told of it, with its kind where nobody foresaw it."""
    if isinstance(err, QLoRAError):
        return err
    return QLoRAError(f"the answer could not be written ({type(err).__name__}: {err})")
