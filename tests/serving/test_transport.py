"""What lies between the network and the answers, without a network."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from qlora_wgpu.errors import DataError
from qlora_wgpu.serving import app
from qlora_wgpu.serving.app import (
    OwnHost,
    RequestBodies,
    StoppableServer,
    error,
    json_of,
    merged,
    unless_disconnected,
)
from qlora_wgpu.serving.writer import Chunk

MOST = 10


@pytest.fixture
def bodies(monkeypatch):
    monkeypatch.setattr(app, "REQUEST_BYTES", MOST)
    monkeypatch.setattr(app, "_ALL_BYTES", 4 * MOST)
    return RequestBodies()


class Sent:
    """A request whose parts have these sizes; ``taken`` were read."""

    def __init__(self, *sizes):
        self.sizes, self.taken = sizes, 0

    async def stream(self):
        for size in self.sizes:
            self.taken += 1
            yield b"x" * size


def read(bodies, *sizes):
    request = Sent(*sizes)
    try:
        return len(asyncio.run(bodies.read(request))), request.taken
    except HTTPException as err:
        return err.status_code, request.taken


@pytest.mark.parametrize(
    ("sizes", "result"),
    [
        ((), (0, 0)),
        ((4, 6), (10, 2)),
        ((4, 7), (413, 2)),
        ((11, 9, 1), (413, 3)),  # the client sends it to its end and gets an error
        ((11, 10, 1), (413, 2)),  # unless it is much longer
    ],
)
def test_a_request_is_read_to_its_length(bodies, sizes, result):
    assert read(bodies, *sizes) == result and bodies._receiving == 0


@pytest.mark.parametrize(("others", "result"), [(30, (10, 1)), (31, (503, 1)), (29, (10, 1))])
def test_all_requests_together_have_a_length(bodies, others, result):
    bodies._receiving = others
    assert read(bodies, 10) == result and bodies._receiving == others


def test_what_does_not_come_in_time_is_not_waited_for(bodies, monkeypatch):
    monkeypatch.setattr(app, "_READING", 0.001)

    class Slow:
        async def stream(self):
            yield b"x"
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(bodies.read(Slow()))
    assert bodies._receiving == 0


@pytest.mark.parametrize(
    ("kind", "host", "passes"),
    [("http", "localhost", True), ("http", "127.0.0.1:80", True), ("http", "evil", False),
     ("http", "", False), ("lifespan", "evil", True)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_only_requests_for_this_host_are_passed_on(kind, host, passes):
    passed, sent = [], []

    async def inner(*given):
        passed.append(given)

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "headers": [(b"host", host.encode())]}
    asyncio.run(OwnHost(inner)(scope, None, send))
    assert bool(passed) == passes
    assert [m["status"] for m in sent if "status" in m] == ([] if passes else [400])


def test_work_ends_with_its_client():
    async def receive_then(*kinds):
        for kind in kinds:
            await asyncio.sleep(0)
            yield {"type": kind}

    def request_of(*kinds):
        messages = receive_then(*kinds)

        async def receive():
            async for message in messages:
                return message
            await asyncio.sleep(60)

        return SimpleNamespace(receive=receive)

    ended = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(seconds)

    assert asyncio.run(unless_disconnected(request_of("http.request"), work(0))) == "done"
    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(request_of("http.request", "http.disconnect"), work(50)))
    assert ended == [0, 50]


def test_json_is_told_what_is_wrong_with_it():
    assert json_of(b'{"a": 1}') == {"a": 1}
    with pytest.raises(DataError, match="not UTF-8"):
        json_of(b"\xff")
    with pytest.raises(DataError, match="cannot parse the request"):
        json_of(b"{")


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request"), (499, "invalid_request"), (500, "server")]
)
def test_errors_are_of_a_kind(status, kind):
    made = error(status, "no", "code")
    assert made.status_code == status and json.loads(made.body) == {
        "error": {"message": "no", "type": f"{kind}_error", "param": None, "code": "code"}
    }


def test_a_prompt_counts_once_and_an_answer_by_itself():
    choices = [SimpleNamespace(prompt_tokens=p, tokens=t) for p, t in ((5, 1), (5, 2), (7, 3),
                                                                      (7, 4))]  # fmt: skip
    assert app._usage(SimpleNamespace(n=2), choices) == {
        "prompt_tokens": 12, "completion_tokens": 10, "total_tokens": 22
    }  # fmt: skip
    head = app._head("cmpl", "text_completion", "tiny")
    assert head["id"].startswith("cmpl-") and len(head["id"]) == 5 + 32
    assert app._event({"a": "é"}) == 'data: {"a": "é"}\n\n'


def test_pieces_come_until_every_answer_has_ended():
    pieces = [(0, Chunk("a", 1)), (1, Chunk("b", 1, "stop")), (0, Chunk("c", 2)),
              (0, Chunk("", 2, "length")), (0, Chunk("late", 9))]  # fmt: skip

    async def all_of(given):
        queue = asyncio.Queue()
        for piece in given:
            queue.put_nowait(piece)
        answers = [SimpleNamespace(pieces=queue, is_cancelled=False) for _ in range(2)]
        found = []
        try:
            async for piece in merged(answers):
                found.append(piece)
        except ValueError as err:
            found.append(err)
        assert all(answer.is_cancelled for answer in answers)
        return found

    assert asyncio.run(all_of(pieces)) == pieces[:4]
    failed = (1, ValueError("no"))
    assert asyncio.run(all_of([pieces[0], failed])) == [pieces[0], failed[1]]


@pytest.mark.parametrize("forced", [False, True])
def test_a_server_that_stops_ends_answers_and_waits_unless_it_is_forced(monkeypatch, forced):
    monkeypatch.setattr(app, "_CLOSED", 0.001)
    monkeypatch.setattr(app, "_POLL", 0.001)
    done = []

    async def shutdown(self, sockets=None):
        try:
            await asyncio.sleep(60 if forced else 0.005)
            done.append("closed")
        except asyncio.CancelledError:
            done.append("cancelled")
            raise

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    server = StoppableServer(uvicorn.Config(None), lambda: done.append("stopped"))
    server.force_exit = forced
    asyncio.run(server.shutdown())
    assert done == ["stopped", "cancelled" if forced else "closed"]


def test_an_error_of_a_server_that_stops_is_not_lost(monkeypatch):
    async def shutdown(self, sockets=None):
        raise OSError("no")

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    with pytest.raises(OSError, match="no"):
        asyncio.run(StoppableServer(uvicorn.Config(None), print).shutdown())


@pytest.mark.parametrize("forced", [False, True])
def test_after_a_second_wish_errors_are_not_logged(monkeypatch, forced):
    log = SimpleNamespace(disabled=False)
    monkeypatch.setattr(app, "logging", SimpleNamespace(getLogger=lambda name: log))
    monkeypatch.setattr(uvicorn.Server, "handle_exit", lambda self, sig, frame: None)
    server = StoppableServer(uvicorn.Config(None), print)
    server.force_exit = forced
    server.handle_exit(2, None)
    assert log.disabled == forced


@pytest.mark.parametrize(("text", "known"), [("a", [97]), ("é", [195, 169]), ("\ufffd", None)])
def test_a_part_of_a_character_has_no_bytes(text, known):
    assert app._likely(text, -1.0) == {"token": text, "logprob": -1.0, "bytes": known}
