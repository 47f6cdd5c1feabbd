"""Whose turn it is in the thread that generates, and what becomes of its errors, without one."""

from collections import deque
from types import SimpleNamespace

import pytest

from qlora_wgpu.errors import DataError, QLoRAError
from qlora_wgpu.serving import writer
from qlora_wgpu.serving.writer import Generation, GenerationWorker, client_error


class Answer:
    def __init__(self, adapter="a", number=0, *, cancelled=False, ends=True):
        self.model = SimpleNamespace(adapter=adapter)
        self.prompt = SimpleNamespace(ids=[1, 2], stop_ids=[9], images=())
        self.request = SimpleNamespace(
            max_new_tokens=None, logprobs=3, sampling_of=lambda number: f"sampling {number}"
        )
        self.number, self.is_cancelled, self.ends, self.told = number, cancelled, ends, []

    def start(self, text):
        self.told.append(text)

    def fail(self, error):
        self.told.append(str(error))

    def read(self):
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends


def worker(queue=(), active=(), **parts):
    made = GenerationWorker.__new__(GenerationWorker)
    made._queue, made._active, made._features_of = deque(queue), list(active), None
    for name, part in parts.items():
        setattr(made, f"_{name}", part)
    return made


def test_answers_of_one_adapter_are_batched_and_others_wait():
    one, two, gone, other, late = (
        Answer(), Answer(), Answer(cancelled=True), Answer("b"), Answer()
    )  # fmt: skip
    own = worker([one, two, gone, other, late])
    assert own._next_answers() == [one, two] and list(own._queue) == [other, late]
    own._active = [one]
    assert own._next_answers() == [] and list(own._queue) == [other, late]
    own._active = []
    assert own._next_answers() == [other] and own._next_answers() == [late]
    assert own._next_answers() == []


@pytest.mark.parametrize(("limit", "tokens"), [(None, 64), (5, 5), (0, 0)])
def test_an_answer_is_begun_with_its_own_sampling(limit, tokens):
    asked, adapters = [], []

    def add(ids, sampling, **how):
        asked.append((ids, sampling, how))
        return "text"

    own = worker(engine=SimpleNamespace(add=add, capacity=64),
                 model=SimpleNamespace(set_adapter=adapters.append))  # fmt: skip
    answer = Answer("b", 3)
    answer.request.max_new_tokens = limit
    own._start(answer)
    expected = {"max_new_tokens": tokens, "stop_ids": [9], "logprobs": 3, "number": 3, "images": ()}
    assert asked == [([1, 2], "sampling 3", expected)] and adapters == ["b"]
    assert answer.told == ["text"] and own._active == [answer]


def test_an_answer_that_cannot_begin_fails_alone():
    def add(*given, **how):
        raise DataError("no room")

    own = worker(engine=SimpleNamespace(add=add, capacity=64),
                 model=SimpleNamespace(set_adapter=print))  # fmt: skip
    answer = Answer()
    own._start(answer)
    assert answer.told == ["no room"] and own._active == []


@pytest.mark.parametrize("idle", [True, False])
def test_a_step_ends_those_that_are_read(idle):
    steps = []
    engine = SimpleNamespace(is_idle=idle, step=lambda: steps.append(1))
    going, ended, broken = Answer(ends=False), Answer(), Answer(ends=ValueError("no"))
    own = worker((), [going, ended, broken], engine=engine)
    own._step()
    assert own._active == [going] and len(steps) == (not idle)
    assert broken.told == ["failed to generate the answer (ValueError: no)"]
    assert going.told == ended.told == []


def test_a_step_that_fails_fails_all_that_wait_for_it():
    def step():
        raise QLoRAError("the GPU was lost")

    answers = [Answer(), Answer()]
    own = worker((), answers, engine=SimpleNamespace(is_idle=False, step=step))
    own._step()
    assert own._active == [] and [each.told for each in answers] == [["the GPU was lost"]] * 2


def test_images_are_encoded_where_there_are_some():
    own = worker()
    assert own._features(()) == () == own._features(["image"])
    own._features_of = lambda images: [f"features of {each}" for each in images]
    assert own._features(()) == () and own._features(["a"]) == ["features of a"]


def test_each_prompt_has_as_many_answers_as_asked_if_there_is_room():
    rooms = []
    own = worker(engine=SimpleNamespace(check_room=lambda *what: rooms.append(what)))
    prompts = [SimpleNamespace(ids=[1] * n) for n in (2, 3)]
    request = SimpleNamespace(max_new_tokens=7, n=2)
    made = own._encoded(SimpleNamespace(encode=lambda request: prompts), request)
    assert made == [prompts[0]] * 2 + [prompts[1]] * 2 and rooms == [(2, 7), (3, 7)]


def test_errors_of_clients_are_ours():
    own = DataError("no")
    assert client_error(own) is own
    assert str(client_error(KeyError("a"))) == "failed to generate the answer (KeyError: 'a')"


# ---- one answer ----------------------------------------------------------------------------------


class Stream:
    """Decodes ids to letters; a text ends at z."""

    def __init__(self):
        self.count, self.stopped = 0, False

    def push(self, token):
        self.count += 1
        self.stopped = chr(token) == "z"
        return "" if self.stopped else chr(token)

    def rest(self):
        return "!"


@pytest.fixture
def answer():
    made = Generation.__new__(Generation)
    made.number, made.is_cancelled, made._sent, made._stream = 2, False, 0, Stream()
    made.told = []
    made._call_in_loop = lambda what, value: made.told.append(value)
    made.pieces = SimpleNamespace(put_nowait=None)
    cancels = []

    def cancel():
        cancels.append(1)
        made._text.finish_reason = "cancelled"

    made._text = SimpleNamespace(ids=[], token_logprobs=[], finish_reason=None, cancel=cancel)
    made.cancels = cancels
    return made


def test_new_tokens_become_pieces(answer):
    assert answer.read() is False and answer.told == []
    answer._text.ids, answer._text.token_logprobs = [97, 98], ["p", "q"]
    assert answer.read() is False
    answer._text.ids, answer._text.token_logprobs = [97, 98, 99], ["p", "q", "r"]
    answer._text.finish_reason = "length"
    assert answer.read() is True
    (_, first), (number, last) = answer.told
    assert (first.text, first.tokens, first.finish_reason) == ("ab", 2, None)
    assert (first.ids, first.logprobs) == ((97, 98), ("p", "q"))
    assert number == 2 and (last.text, last.tokens, last.finish_reason) == ("c!", 3, "length")
    assert (last.ids, last.logprobs) == ((99,), ("r",)) and not answer.cancels


def test_a_stop_ends_an_answer_without_what_follows(answer):
    answer._text.ids = [97, 122, 98]
    assert answer.read() is True
    ((_, piece),) = answer.told
    assert (piece.text, piece.finish_reason) == ("a", "stop") and answer._stream.count == 2


def test_an_answer_that_nobody_waits_for_ends(answer):
    answer.is_cancelled = True
    assert answer.read() is True and answer.cancels == [1]
    assert answer.told[0][1].finish_reason == "cancelled"


def test_an_answer_fails_before_it_has_begun_or_after(answer):
    error = QLoRAError("no")
    answer.fail(error)
    assert answer.told == [(2, error)] and answer.cancels == [1]
    answer._text = None
    answer.fail(error)
    assert answer.told[1] is error and answer.cancels == [1]


def test_what_has_started_is_told_once(answer):
    told = []

    class Future:
        is_done = False

        def done(self):
            return self.is_done

        def set_result(self, value):
            told.append(value)

        set_exception = set_result

    answer.started = Future()
    answer._set_started(None)
    answer._set_started("error")
    Future.is_done = True
    answer._set_started(None)
    assert told == [None, "error"]


def test_special_tokens_of_calls_are_decoded_if_others_are_not():
    tokens = {"<a>": 1, "<b>": 2, "<c>": None}
    tokenizer = SimpleNamespace(
        token_id=tokens.__getitem__, decode=lambda ids: "b" if ids == [2] else ""
    )
    served = SimpleNamespace(prompts=SimpleNamespace(tokenizer=tokenizer))
    tools = SimpleNamespace(format=SimpleNamespace(markers=tuple(tokens)))
    assert writer.ServedModel.markers(served, tools) == {1: "<a>"}
    assert writer.ServedModel.markers(served, None) == {}
