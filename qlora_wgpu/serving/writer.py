"""The served models, and the thread that generates for all of them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from qlora_wgpu.data import ChatTemplate, PromptFormat
from qlora_wgpu.data.conversations import Conversation
from qlora_wgpu.data.marker_words import ANSWERS
from qlora_wgpu.data.row_images import with_image_parts
from qlora_wgpu.errors import ConfigError, DataError, QLoRAError
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.generation.sequence import FinishReason, Request
from qlora_wgpu.generation.text import TextStream, TokenLogprobs
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.serving.requests import BaseRequest, ChatRequest, CompletionRequest, Prompt
from qlora_wgpu.serving.tool_calls import ToolSet, by_name, call_format


@dataclass(frozen=True)
class ServedModel:
    """A served model."""

    adapter: str  # its name in the open model
    prompts: PromptFormat
    images: ImageFiles | None = None  # how prompts contain images; None if they must not

    def encode(self, request: BaseRequest) -> Iterator[EncodedPrompt]:
        """Yields each prompt of a request as tokens."""
        if isinstance(request, ChatRequest):
            yield self._chat(request)
        else:
            assert isinstance(request, CompletionRequest)
            yield from map(self._text, request.prompts)

    def _chat(self, request: ChatRequest) -> EncodedPrompt:
        template = self.prompts.template
        if request.tools and (template is None or "tools" not in template.source):
            raise ConfigError("the model's chat template does not support tools: remove 'tools'")
        if request.chat_template_kwargs and template is None:
            raise ConfigError("the model has no chat template: remove 'chat_template_kwargs'")
        ids, images = self.prompts.encoded(
            request.messages, request.tools, request.chat_template_kwargs, images=self.images
        )
        if template is not None:
            self._check_rendered(template, request)
        tools = None if template is None else self._tools(request, template.source)
        stops = self.prompts.stop_ids, self.prompts.stop_text
        return EncodedPrompt(ids, *stops, (), tools, images)

    @staticmethod
    def _check_rendered(template: ChatTemplate, request: ChatRequest) -> None:
        """Refuses messages that the chat template drops."""
        messages, _ = with_image_parts(request.messages, ())
        conversation = Conversation(messages, request.tools, options=request.chat_template_kwargs)
        if unseen := template.left_out(conversation) - ANSWERS:
            raise DataError(
                f"the model's chat template drops {min(unseen)}: put this content into a user "
                "message"
            )

    def _tools(self, request: ChatRequest, template: str) -> ToolSet | None:
        call = call_format(template)
        if call is None or not request.tools:
            return None
        return ToolSet(call, by_name(request.tools), request.parallel_tool_calls)

    def markers(self, tools: ToolSet | None) -> dict[int, str]:
        """Special tokens of tool calls, which must be decoded."""
        tokenizer = self.prompts.tokenizer
        known = () if tools is None else tools.format.markers
        ids = ((tokenizer.token_id(marker), marker) for marker in known)
        return {i: marker for i, marker in ids if i is not None and not tokenizer.decode([i])}

    def _text(self, prompt: Prompt) -> EncodedPrompt:
        text = PromptFormat.text(self.prompts.tokenizer)
        ids = prompt if not isinstance(prompt, str) else text.ids([{"content": prompt}])
        return EncodedPrompt(ids, text.stop_ids, text.stop_text, ids)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens."""

    ids: list[int]
    stop_ids: Collection[int]  # tokens that end the answer
    stop_text: str  # a string that ends it, or empty
    context: Sequence[int]  # the prompt if the answer continues its text, else empty
    tools: ToolSet | None = None  # functions that the answer may call
    images: Sequence[ImageSource] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer."""

    text: str
    tokens: int  # tokens so far
    finish_reason: FinishReason | None = None  # set in the last chunk
    ids: tuple[int, ...] = ()  # new tokens
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the new tokens, if requested


Pieces = asyncio.Queue[tuple[int, Chunk | Exception]]
"""Chunks of a request's answers, each with its answer's index."""


class Generation:
    """An answer, generated in the worker's thread; its chunks arrive on the event loop."""

    def __init__(
        self,
        model: ServedModel,
        prompt: EncodedPrompt,
        request: BaseRequest,
        number: int,
        pieces: Pieces,
    ) -> None:
        self.model, self.prompt, self.request = model, prompt, request
        self.number = number  # index among the answers of the request
        self.pieces = pieces
        self.is_cancelled = False  # the client no longer waits for it
        self._text: Request | None = None
        stops = (*request.stop, prompt.stop_text)
        self._stream = TextStream(
            model.prompts.tokenizer, stops, prompt.context, model.markers(prompt.tools)
        )
        self._sent = 0
        self._loop = asyncio.get_running_loop()
        # Done when the engine has accepted or refused it
        self.started: asyncio.Future[None] = self._loop.create_future()

    # -- in the worker's thread ----------------------------------------------------------------

    def start(self, text: Request) -> None:
        """Sets its request of the engine."""
        self._text = text
        self._call_in_loop(self._set_started, None)

    def read(self) -> bool:
        """Reads new tokens from the engine; returns whether the answer has ended."""
        text, stream, shown = self._text, self._stream, ""
        assert text is not None
        while len(text.ids) > stream.count and not stream.stopped:
            shown += stream.push(text.ids[stream.count])
        if stream.stopped:
            text.finish_reason = "stop"
        elif self.is_cancelled:
            text.cancel()
        if text.finish_reason is not None and not stream.stopped:
            shown += stream.rest()
        if shown or text.finish_reason is not None:
            sent, self._sent = self._sent, len(text.ids)
            new = tuple(text.ids[sent:])
            piece = Chunk(
                shown, len(text.ids), text.finish_reason, new, tuple(text.token_logprobs[sent:])
            )
            self._call_in_loop(self.pieces.put_nowait, (self.number, piece))
        return text.finish_reason is not None

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        if self._text is None:
            self._call_in_loop(self._set_started, error)
            return
        self._text.cancel()
        self._call_in_loop(self.pieces.put_nowait, (self.number, error))

    def _set_started(self, error: Exception | None) -> None:
        if self.started.done():
            return
        if error is None:
            self.started.set_result(None)
        else:
            self.started.set_exception(error)

    def _call_in_loop(self, what: object, value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(what, value)  # type: ignore[arg-type]


class GenerationWorker:
    """Runs an engine in a thread.

    Answers of one adapter are batched. A request for another adapter waits until they have ended,
    and so do all later requests.
    """

    def __init__(
        self,
        engine: Engine,
        model: QLoRAModel,
        features_of: Callable[[Sequence[ImageSource]], list[ImageFeatures]] | None = None,
    ) -> None:
        """``features_of`` encodes the images of prompts, if they may have some."""
        self._engine = engine
        self._model = model
        self._features_of = features_of
        self._changed = threading.Condition()
        self._queue: deque[Generation] = deque()
        self._active: list[Generation] = []
        self._closed = False
        self._prompts = ThreadPoolExecutor(1, "prompts")
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    async def submit(self, model: ServedModel, request: BaseRequest) -> list[Generation]:
        """Starts the answers of a request."""
        # In another thread, so that a long prompt does not block generation
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._prompts, self._encoded, model, request)
        pieces: Pieces = asyncio.Queue()
        answers = [
            Generation(model, prompt, request, number, pieces)
            for number, prompt in enumerate(prompts)
        ]
        with self._changed:
            if self._closed:
                raise _stopped()
            self._queue.extend(answers)
            self._changed.notify()
        try:
            started = await asyncio.gather(*(a.started for a in answers), return_exceptions=True)
            if problem := next((each for each in started if each is not None), None):
                raise problem
        except BaseException:  # the client may have disconnected
            for answer in answers:
                answer.is_cancelled = True
            raise
        return answers

    def _encoded(self, model: ServedModel, request: BaseRequest) -> list[EncodedPrompt]:
        prompts: list[EncodedPrompt] = []
        for prompt in model.encode(request):
            self._engine.check_room(len(prompt.ids), request.max_new_tokens)
            prompts += [prompt] * request.n
        return prompts

    def stop(self) -> None:
        """Ends all answers after the current step, with an error, and accepts no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Stops and waits for the thread."""
        self.stop()
        self._thread.join()
        self._prompts.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue or self._active)
                if self._closed:
                    break
                accepted = self._next_answers()
            for answer in accepted:
                self._start(answer)
            if self._active:
                self._step()
        for answer in (*self._active, *self._queue):
            answer.fail(_stopped())

    def _next_answers(self) -> list[Generation]:
        """Takes answers from the queue that can be batched with the active ones."""
        found: list[Generation] = []
        first = next(iter([*self._active, *self._queue]), None)
        while first and self._queue and self._queue[0].model.adapter == first.model.adapter:
            found.append(self._queue.popleft())
        return [answer for answer in found if not answer.is_cancelled]

    def _start(self, answer: Generation) -> None:
        request = answer.request
        limit = request.max_new_tokens
        try:
            self._model.set_adapter(answer.model.adapter)
            text = self._engine.add(
                answer.prompt.ids,
                request.sampling_of(answer.number),
                max_new_tokens=self._engine.capacity if limit is None else limit,
                stop_ids=answer.prompt.stop_ids,
                logprobs=request.logprobs,
                number=answer.number,
                images=self._features(answer.prompt.images),
            )
        except Exception as err:  # must not end the thread
            answer.fail(client_error(err))
            return
        answer.start(text)
        self._active.append(answer)

    def _features(self, images: Sequence[ImageSource]) -> Sequence[ImageFeatures]:
        return self._features_of(images) if images and self._features_of is not None else ()

    def _step(self) -> None:
        try:
            if not self._engine.is_idle:
                self._engine.step()
        except Exception as err:
            for answer in self._active:
                answer.fail(client_error(err))
            self._active = []
            return
        self._active = [answer for answer in self._active if not self._is_read(answer)]

    def _is_read(self, answer: Generation) -> bool:
        try:
            return answer.read()
        except Exception as err:  # does not concern the other answers
            answer.fail(client_error(err))
            return True


def _stopped() -> QLoRAError:
    return QLoRAError("the server has been stopped")


def client_error(err: Exception) -> QLoRAError:
    """The error to report to a client; an unexpected one is wrapped with its type."""
    if isinstance(err, QLoRAError):
        return err
    return QLoRAError(f"failed to generate the answer ({type(err).__name__}: {err})")
