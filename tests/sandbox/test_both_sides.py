"""Both sides of the pipe to a child process, without one."""

import base64
import io
import json
import os
import pickle
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from qlora_wgpu.errors import DataError, QLoRAError, TokenizerError
from qlora_wgpu.limits import (
    CHILD_BYTES,
    CHILD_SECONDS,
    CHILD_SECONDS_PER_BYTE,
    CHILD_SECONDS_REGAINED,
    CHILD_WAIT,
    PATTERN_CHARACTERS,
    PATTERNS,
)
from qlora_wgpu.sandbox import expressions, images, process, templates, tokenizers
from qlora_wgpu.sandbox.expressions import ExpressionError
from qlora_wgpu.sandbox.process import REQUEST, RESPONSE, SandboxError, SandboxProcess

# ---- the parent ----------------------------------------------------------------------------------


class Child:
    """A process that gives what it is told to, and ends as it is told to."""

    pid = 0

    def __init__(self, answer=b"", status=None):
        self.stdin, self.stdout = io.BytesIO(), io.BytesIO(answer)
        self.status, self.killed = status, False

    def poll(self):
        return None

    def wait(self, seconds=None):
        if self.status is None and not self.killed:
            raise process.subprocess.TimeoutExpired("child", seconds)
        return -signal.SIGKILL if self.status is None else self.status

    def kill(self):
        self.killed = True


def answer(spent, **response):
    content = json.dumps(response).encode()
    return RESPONSE.pack(len(content), spent) + content


def begun(child, spare=CHILD_SECONDS):
    made = SandboxProcess("sandbox.nothing")
    made._process, made._owner, made._spare = child, os.getpid(), spare
    made._finalizer = child.kill
    return made


def limits_of(size, items=1, spare=CHILD_SECONDS):
    more = size * CHILD_SECONDS_PER_BYTE + (items - 1) * CHILD_SECONDS_REGAINED
    return spare + more, CHILD_WAIT + 10 * more


@pytest.mark.parametrize(("items", "spare"), [(1, CHILD_SECONDS), (9, CHILD_SECONDS), (1, 0.25)])
@pytest.mark.cover("all")
def test_a_request_tells_its_limits_and_gains_time_for_the_next(items, spare):
    child = Child(answer(0.125, value=5))
    made, asked = begun(child, spare), b"x" * 50_000
    written = child.stdin
    assert made._send(asked, items) == {"value": 5}
    seconds, wait = limits_of(len(asked), items, spare)
    head = written.getvalue()[: REQUEST.size]
    assert REQUEST.unpack(head) == pytest.approx((len(asked), seconds, wait))
    assert written.getvalue()[REQUEST.size :] == asked
    left = min(seconds - 0.125 + CHILD_SECONDS_REGAINED, CHILD_SECONDS)
    assert made._spare == pytest.approx(left)
    assert (made._spent, made._items) == (0.125, items) and not child.killed


@pytest.mark.parametrize(("late", "stopped"), [(0.0, True), (1e-6, True), (-1e-6, False)])
def test_an_answer_at_the_end_of_its_time_is_none(late, stopped):
    seconds, _ = limits_of(4)
    child = Child(answer(seconds + late, value=5))
    made = begun(child)
    if stopped:
        with pytest.raises(SandboxError, match=r"takes more than 2\.0 seconds of CPU time$"):
            made._send(b"four")
        assert child.killed and made._process is None
    else:
        assert made._send(b"four") == {"value": 5}


def test_a_child_that_has_used_up_its_time_tells_for_how_much():
    made = begun(Child(answer(9.0, value=5)), spare=CHILD_SECONDS / 2)
    made._spent, made._items = 3.0, 7
    with pytest.raises(SandboxError, match=r"more than 4\.0 seconds of CPU time for 8 items$"):
        made._send(b"")
    made = begun(Child(answer(9.0, value=5)), spare=CHILD_SECONDS / 2 + 0.01)
    with pytest.raises(SandboxError, match=r"more than 1\.0 seconds of CPU time$"):
        made._send(b"")


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="Windows has no such signals")
@pytest.mark.parametrize(
    ("status", "told"),
    [
        (-signal.SIGPROF, r"takes more than 2\.0 seconds of CPU time$"),
        (-signal.SIGALRM, "does not respond within 20 seconds"),
        (-signal.SIGSEGV, r"ends its process \(SIGSEGV\), which is limited to 512 MB of memory"),
        (3, r"ends its process \(status 3\)"),
        (0, r"ends its process \(status 0\)"),
        (None, r"ends its process \(SIGKILL\)"),  # it has closed its pipe alone
    ],
)
def test_an_end_without_an_answer_is_explained(status, told):
    for torn in (b"", answer(0.0, value=1)[:-1], answer(0.0, value=1)[:5]):
        child = Child(torn, status)
        made = begun(child)
        with pytest.raises(SandboxError, match=told):
            made._send(b"")
        assert made._process is None and child.stdin.closed and child.killed == (status is None)


def test_answers_are_values_errors_or_an_end():
    assert process._value({"value": None}) is None
    with pytest.raises(DataError, match="no"):
        process._value({"error": ["DataError", "no"]})
    for name in ("SandboxError", "os", "Any", "command"):
        assert type(process.error_of(name, "no")) is QLoRAError
    child = Child(answer(0.0, stopped="needs more"))
    with pytest.raises(SandboxError, match="needs more"):
        begun(child)._send(b"")
    assert child.killed
    huge = RESPONSE.pack(process.ANSWER_BYTES + 1, 0.0)
    with pytest.raises(SandboxError, match="ends its process"):
        begun(Child(huge, 0))._send(b"")


def test_an_interrupt_ends_the_child():
    child = Child()
    child.stdout = SimpleNamespace(read=lambda size: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        begun(child)._send(b"")
    assert child.killed


def test_only_the_process_that_began_a_child_ends_it():
    child = Child(status=0)
    process._end(child, os.getpid() + 1)
    assert not child.killed and not child.stdin.closed
    process._end(child, os.getpid())
    assert child.killed and child.stdin.closed and child.stdout.closed


# ---- the child -----------------------------------------------------------------------------------


def double(value):
    return 2 * value


def failing(name):
    raise {"data": DataError("d" * 2000), "memory": MemoryError(), "value": ValueError("no")}[name]


@pytest.mark.parametrize(
    ("given", "response"),
    [
        ((double, ("a",)), {"value": "aa"}),
        ((failing, ("data",)), {"error": ["DataError", "d" * 1000]}),
        ((failing, ("value",)), {"error": ["QLoRAError", "ValueError: no"]}),
        ((failing, ("memory",)), {"stopped": "needs more than 512 MB of memory"}),
        ((double, ("\ud800",)), {"value": "\ud800\ud800"}),
        ((double, (1, 2)), None),
    ],
)
def test_a_call_is_answered(given, response):
    made = json.loads(process._respond(pickle.dumps(given)).decode("utf-8", "surrogatepass"))
    assert made == response if response else made["error"][0] == "QLoRAError"


def test_no_answer_is_too_large(monkeypatch):
    request = pickle.dumps((double, ("a" * 100,)))
    monkeypatch.setattr(process, "ANSWER_BYTES", len(process._respond(request)))
    assert b"aa" in process._respond(request)
    monkeypatch.setattr(process, "ANSWER_BYTES", process.ANSWER_BYTES - 1)
    assert json.loads(process._respond(request)) == {"stopped": "returns more than 0 MB"}


def test_a_module_that_cannot_be_imported_answers_every_call():
    assert process._import("sandbox.expressions") == b""
    kind, text = json.loads(process._import("sandbox.nothing"))["error"]
    assert kind == "QLoRAError"
    assert text.startswith("failed to start the process for nothing: ModuleNotFoundError: ")


def test_a_child_answers_until_its_pipe_closes(monkeypatch):
    request = pickle.dumps((double, ("a",)))
    asked = REQUEST.pack(len(request), 2.0, 20.0) + request
    answers, limits, clock = io.BytesIO(), [], iter((1.0, 1.25, 2.0))

    class Timer:
        def __init__(self, *limit):
            limits.append(limit)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(process, "_pipes", lambda: (io.BytesIO(asked * 2 + asked[:3]), answers))
    monkeypatch.setattr(process, "_limit", lambda: limits.append("limited"))
    monkeypatch.setattr(process, "_timer", Timer)
    monkeypatch.setattr(process, "time", SimpleNamespace(process_time=lambda: next(clock)))
    process.main("sandbox.expressions")
    assert limits == ["limited", (2.0, 20.0), (2.0, 20.0)]
    assert answers.getvalue() == answer(0.25, value="aa") + answer(0.75, value="aa")


def test_a_call_has_two_timers_which_stop_with_it(monkeypatch):
    told = []
    timers = SimpleNamespace(
        ITIMER_PROF="cpu", ITIMER_REAL="wall", setitimer=lambda *what: told.append(what)
    )
    monkeypatch.setattr(process, "signal", timers)
    with process._timer(2.5, 20.0):
        assert told == [("cpu", 2.5), ("wall", 20.0)]
    assert told[2:] == [("cpu", 0), ("wall", 0)]


def test_where_there_are_no_timers_a_call_has_one_of_python(monkeypatch):
    told = []
    later = SimpleNamespace(
        dump_traceback_later=lambda *what, exit: told.append((*what, exit)),
        cancel_dump_traceback_later=lambda: told.append("over"),
    )
    monkeypatch.setattr(process, "signal", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "faulthandler", later)
    with process._timer(2.5, 20.0):
        assert told == [(2.5, True)]
    assert told[1:] == ["over"]


def test_a_child_may_open_nothing_and_take_no_more_memory(monkeypatch):
    resource = pytest.importorskip("resource")
    told, ignored = {}, []

    def limit(kind, both):
        told[kind] = both
        if kind == resource.RLIMIT_DATA:
            raise ValueError("more is mapped already")

    monkeypatch.setattr(resource, "setrlimit", limit)
    own = SimpleNamespace(
        SIGINT="int", SIG_IGN="ignored", signal=lambda *what: ignored.append(what)
    )
    monkeypatch.setattr(process, "signal", own)
    process._limit()
    none = ("NOFILE", "NPROC", "FSIZE", "CORE")
    assert told == {
        resource.RLIMIT_DATA: (CHILD_BYTES, CHILD_BYTES),
        resource.RLIMIT_AS: (2 * CHILD_BYTES, 2 * CHILD_BYTES),
        **{getattr(resource, f"RLIMIT_{name}"): (0, 0) for name in none},
    }
    assert ignored == [("int", "ignored")]


def test_systems_that_limit_no_memory_are_watched():
    for system, is_limited in (("linux", True), ("darwin", False), ("win32", False)):
        if process.sys.platform == system:
            assert process._LIMITED is is_limited


def test_a_child_that_takes_too_much_is_killed(monkeypatch):
    monkeypatch.setattr(process, "_LIMITED", False)
    monkeypatch.setattr(process, "_PERIOD", 0.0005)
    for limit, is_killed in ((process.CHILD_BYTES * 1000, False), (1, True)):
        monkeypatch.setattr(process, "CHILD_BYTES", limit)
        child = Child()
        child.pid = os.getpid()
        answered, killed = process.threading.Event(), process.threading.Event()
        if not is_killed:
            answered.set()
        process._watch(child, answered, killed)
        assert child.killed == killed.is_set() == is_killed


# ---- what children compute -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "length", "is_quick"),
    [
        ("a" * 1000, 1000, True), ("a" * 1001, 1, False), ("a", 1001, False),
        ("a" * 1001, 1001, False), ("a*", 9, True), ("a*b*", 9, False), ("a|b", 9, True),
        ("|".join("abcdefgh"), 9, True), ("|".join("abcdefghi"), 9, False), ("a*|b", 9, False),
        (expressions.ANY_PARENT + "a*", 9, True), ("a+", 9, True), ("a?", 9, True),
        ("a{2}", 9, True), ("a{2}b{2}", 9, False),
    ],
)  # fmt: skip
def test_what_may_search_back_for_long_is_no_quick_expression(expression, length, is_quick):
    assert expressions._is_quick(expression, "x" * length) == is_quick


def test_expressions_are_not_too_many_or_too_long():
    expressions.check_expressions(("a",) * PATTERNS)
    with pytest.raises(ExpressionError, match="patterns, more than"):
        expressions.check_expressions(("a",) * (PATTERNS + 1))
    half = PATTERN_CHARACTERS // 2
    with pytest.raises(ExpressionError, match="has more than 100,000 characters"):
        expressions.check_expressions(("a" * half, "a" * (PATTERN_CHARACTERS - half + 1)))
    assert expressions._problems(["a", "(", "(a)*"])[::2] == [None, None]
    assert expressions._problems(["("])[0]
    assert expressions._first_fitting(["b", "a.", "ab"], "ab") == 1
    assert expressions._first_fitting(["b"], "ab") is None
    assert expressions._begins("a", "ab") and not expressions._begins("b", "ab")


def picture(kind="PNG", orientation=None, size=(3, 2), mode="RGB"):
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    pixels = np.arange(size[0] * size[1] * len(mode), dtype=np.uint8) * 5
    made = Image.fromarray(pixels.reshape(size[1], size[0], len(mode)).squeeze(), mode=None)
    file = io.BytesIO()
    made.save(file, kind, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("orientation", [None, *range(1, 10)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
@pytest.mark.cover("all")
def test_images_are_as_large_as_they_are_seen(kind, orientation):
    content = picture(kind, orientation)
    turned = orientation in (5, 6, 7, 8)
    assert images.size_of(content) == images.decode(content) == ((3, 2) if turned else (2, 3))


@pytest.mark.parametrize("piece", [1, 9, 10, 18, 1000])
def test_pixels_come_row_by_row(monkeypatch, piece):
    monkeypatch.setattr(images, "_PIECE", piece)
    assert images.decode(picture(mode="L", size=(3, 5))) == (5, 3)
    rows, first = [], 0
    while part := base64.b64decode(images.pixels(first)):
        assert len(part) == 9 * min(max(piece // 9, 1), 5 - first)
        rows.append(part)
        first += len(part) // 9
    expected = np.repeat(np.arange(15, dtype=np.uint8) * 5, 3)
    assert b"".join(rows) == expected.tobytes() and first == 5


def test_images_are_not_too_large_or_broken(monkeypatch):
    monkeypatch.setattr(images, "IMAGE_PIXELS", 6)
    assert images.size_of(picture()) == (2, 3)
    monkeypatch.setattr(images, "IMAGE_PIXELS", 5)
    with pytest.raises(DataError, match="3 x 2 pixels, more than 5"):
        images.size_of(picture())
    monkeypatch.undo()
    with pytest.raises(DataError, match="not an image of a supported format"):
        images.decode(b"no image")
    with pytest.raises(DataError, match="it is damaged"):
        images.decode(picture(size=(64, 64))[:-40])


@pytest.mark.parametrize(
    ("marked", "spans"),
    [
        ("ab", []), ("a<b>c", [(1, 2)]), ("<>a", []), ("a<b<c>d>e", [(1, 4)]),
        ("<a>b<c>", [(0, 1), (2, 3)]), ("<<a>>", [(0, 1)]),
    ],
)  # fmt: skip
def test_marks_of_the_assistants_text_become_spans(marked, spans):
    given = marked.replace("<", templates.SPAN_START).replace(">", templates.SPAN_END)
    plain = marked.replace("<", "").replace(">", "")
    assert templates._take_marks(given) == (plain, spans)


def test_messages_of_templates_are_short_and_without_addresses():
    assert templates._message(ValueError("<x at 0x7fa0>")) == "<x>"
    assert templates._message(ValueError("a" * 300)) == "a" * 300
    assert templates._message(ValueError("a" * 301)) == "a" * 300 + "…"


# ---- tokenizers of strangers ---------------------------------------------------------------------


def sequence(*steps, key="normalizers"):
    return {"type": "Sequence", key: list(steps)}


REPLACE = {"type": "Replace", "pattern": {"String": "ab"}, "content": "abcd"}


@pytest.mark.parametrize(
    ("step", "is_bounded"),
    [
        ({"type": "Replace", "pattern": {"String": "a"}, "content": "b"}, True),
        ({"type": "Split", "pattern": {"Regex": r"\d"}}, True),
        ({"type": "Split", "pattern": {"Regex": "[\r\n]"}}, True),
        ({"type": "Split", "pattern": {"Regex": "(a*)*"}}, False),
        ({"type": "Prepend", "prepend": "x"}, True),
        ({"type": "Unheard"}, False),
        ({"type": "ByteLevel"}, True),
        ({}, False),
    ],
)
def test_steps_are_bounded_one_by_one(step, is_bounded):
    for parts in ({"normalizer": step}, {"decoder": sequence({"type": "ByteLevel"}, step)}):
        assert tokenizers.is_bounded(parts, 1, 1) == is_bounded
    nested = sequence(sequence(step, key="pretokenizers"))
    assert tokenizers.is_bounded({"a": None, "b": nested}, 1, 1) == is_bounded


@pytest.mark.parametrize("many", [False, True])
def test_templates_of_tokens_are_bounded_by_their_number(many):
    count = tokenizers._SPECIAL_TOKENS // 4 + many
    step = {
        "type": "TemplateProcessing",
        "single": [{}] * 4,
        "special_tokens": {"a": {"ids": [1]}, "b": {"ids": [1] * count}},
    }
    assert tokenizers.is_bounded({"post_processor": step}, 1, 1) == (not many)
    assert tokenizers.is_bounded({"p": {**step, "special_tokens": {}}}, 1, 1)


def test_tokens_and_words_have_a_length():
    longest, word = tokenizers._LONGEST_TOKEN, tokenizers._LONGEST_WORD
    assert tokenizers.is_bounded({}, longest, word)
    assert not tokenizers.is_bounded({}, longest + 1, word)
    assert not tokenizers.is_bounded({}, longest, word + 1)


def test_replacements_make_a_text_no_longer_than_they_may():
    growth = lambda *steps: tokenizers._growth(list(steps))  # noqa: E731
    assert growth() == 1 and growth(REPLACE) == 2 and growth(REPLACE, REPLACE) == 4
    assert growth({**REPLACE, "content": ""}) == 1
    assert growth({**REPLACE, "pattern": {"Regex": "x"}}) == 4
    assert growth({**REPLACE, "pattern": {"String": ""}}) == pytest.approx(400)
    assert growth({"type": "Prepend", "prepend": "a" * 32}) == 3
    limit = int(tokenizers._GROWTH)
    for length, fits in ((limit, True), (limit + 1, False)):
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * length}
        assert tokenizers.is_bounded({"normalizer": step}, 1, 1) == fits


def test_ids_are_those_of_tokens():
    tokenizers._check_ids([])
    tokenizers._check_ids([tokenizers.TOKEN_ID])
    with pytest.raises(TokenizerError, match="more than"):
        tokenizers._check_ids([0, tokenizers.TOKEN_ID + 1])


def test_errors_of_the_library_are_ours_and_interrupts_are_not():
    class PanicException(BaseException):
        pass

    for error in (ValueError("e" * 999), PanicException("e" * 999)):
        with pytest.raises(TokenizerError) as told, tokenizers.library_errors("it fails"):
            raise error
        assert str(told.value) == "it fails: " + "e" * 300
    for error in (KeyboardInterrupt(), MemoryError(), TokenizerError("own")):
        with pytest.raises(type(error)), tokenizers.library_errors("it fails"):
            raise error
