"""Clients that leave: what they asked for ends at once, and nobody waits for it."""

import json
import socket
import threading
import time

import pytest
from serving.tiny_served import tiny_served
from support.openai_http import HEAD, TALK, ask, serving

from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.serving import writer as writing


@pytest.fixture(scope="module")
def served(device, tmp_path_factory):
    model, tiny = tiny_served(device, tmp_path_factory.mktemp("leaving") / "model")
    with serving(model, {"tiny": tiny}, texts=1, capacity=2048) as address:
        yield address


@pytest.fixture
def asked_for(monkeypatch):
    """The answers that the server begins, in their order."""
    made, begin = [], writing.Generation.__init__

    def noted(self, *given):
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(writing.Generation, "__init__", noted)
    return made


@pytest.fixture
def silent(monkeypatch):
    """No answer shows anything before its end: no piece of it comes."""

    def push(self, token):
        self.count += 1
        return ""

    monkeypatch.setattr(writing.TextStream, "push", push)


def asking(url, **more):
    body = json.dumps({"model": "tiny", "messages": TALK, "seed": 1, **more}).encode()
    place = socket.create_connection(("127.0.0.1", int(url.split(":")[2].partition("/")[0])))
    place.sendall(HEAD.format(len(body)).encode() + body)
    return place


def wait_until(happens, what):
    end = time.monotonic() + 300
    while not happens():
        assert time.monotonic() < end, what
        time.sleep(0.005)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_shows_nothing_ends_when_its_client_leaves(
    served, asked_for, silent, streamed
):
    with asking(served, stream=streamed):
        wait_until(lambda: asked_for and asked_for[0]._text, "it has not begun")
        wait_until(lambda: len(asked_for[0]._text.ids) > 8, "it does not grow")
    wait_until(lambda: asked_for[0]._text.finish_reason, "it does not end")
    assert asked_for[0]._text.finish_reason == "cancelled"


@pytest.mark.parametrize("streamed", [False, True])
def test_what_waits_is_not_begun_where_its_client_has_left(
    served, asked_for, monkeypatch, streamed
):
    held, step = threading.Event(), Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: held.wait(300) and step(self))
    with asking(served):
        wait_until(lambda: asked_for and asked_for[0]._text, "the first has not begun")
        with asking(served, stream=streamed):
            wait_until(lambda: len(asked_for) == 2, "the second has not come")
        wait_until(lambda: asked_for[1].is_cancelled, "nobody knows that the second has left")
        assert asked_for[1]._text is None
        held.set()
    wait_until(lambda: asked_for[0]._text.finish_reason, "the first does not end")
    assert ask(served, max_tokens=1)["choices"] and asked_for[1]._text is None
