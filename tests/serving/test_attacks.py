"""Requests of a wrong form, and clients that come together and go: errors are of OpenAI's form."""

import gc
import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
from serving.tiny_served import tiny_served
from support.openai_http import HEAD, TALK, ask, post, serving
from support.processes import PATIENCE, until

from qlora_wgpu.data import PromptFormat
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.serving import app


@pytest.fixture(scope="module")
def url(device, tmp_path_factory):
    model, tiny = tiny_served(device, tmp_path_factory.mktemp("attacks") / "model")
    with serving(model, {"tiny": tiny}) as address:
        yield address


def told(status_and_text, status=400):
    found, text = status_and_text
    error = json.loads(text)["error"]
    assert found == status and set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 500 and "Traceback" not in error["message"]
    return error["message"]


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"model": "\xff"}', "not UTF-8"),
        (b'{"model": "tiny", "temperature": NaN}', "NaN is not valid JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"model": "a", "model": "b"}', "occurs twice"),
        (b'{"model": "\\ud800"}', "half a character"),
    ],
)
def test_bodies_that_are_no_requests(url, body, message):
    assert message in told(post(url, body))


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_body_that_is_too_long_has_a_status_of_its_own(url, path):
    body = b'{"model": "' + b"x" * (17 << 20) + b'"}'
    said = told(post(url, body, path), 413)
    assert said == "the request is longer than 16,777,216 bytes"


def test_more_long_bodies_at_a_time_than_are_held_may_come_again(url, monkeypatch):
    monkeypatch.setattr(app, "_ALL_BYTES", 10)
    assert "retry later" in told(post(url, {"model": "tiny", "messages": TALK}), 503)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b'{"model": "tiny", '])
def test_a_body_that_never_arrives_is_not_waited_for(url, monkeypatch, sent):
    monkeypatch.setattr(app, "_READING", 0.05)
    port = int(url.split(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as place:
        place.sendall(HEAD.format(1000).encode() + sent)
        with place.makefile("rb") as answer:
            status = int(answer.readline().split()[1])
            length = 0
            while line := answer.readline().strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            said = told((status, answer.read(length)), 408)
    assert said == "the request was not received within 0.05 seconds"
    assert ask(url, max_tokens=1)["choices"]


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    "change",
    [
        {name: value}
        for name in ("messages", "n", "seed", "stop", "temperature", "top_p", "max_tokens", "tools",
                     "stream", "stream_options", "logprobs", "parallel_tool_calls", "tool_choice")
        for value in ({"a": [1]}, [[7]], 10**300 + 0.5, -(10**40), "x" * 10_000)
        if (name, value) != ("stop", "x" * 10_000)
    ],
)  # fmt: skip
def test_values_of_wrong_kinds(url, change):
    told(post(url, {"model": "tiny", "messages": TALK, **change}))


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("path", "method", "status"), [("nothing", "POST", 404), ("chat/completions", "GET", 405)]
)
def test_what_is_not_there(url, path, method, status):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", method=method))
    with caught.value as answer:
        assert "available: GET /v1/models" in told((answer.code, answer.read()), status)


def test_a_name_of_a_model_is_cut_short(url):
    body = {"model": "x" * 100_000, "messages": TALK}
    assert "unknown model" in told(post(url, body), 404)


def test_nothing_is_read_behind_a_prompt_that_has_no_room(url, monkeypatch):
    looked_at, encoded = [], PromptFormat.encoded
    monkeypatch.setattr(
        PromptFormat, "encoded", lambda *args, **kw: looked_at.append(1) or encoded(*args, **kw)
    )
    prompts = ["short", "what is this? " * 40, "short"]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 1}
    assert "the prompt has" in told(post(url, body, "completions"))
    assert len(looked_at) == 2
    told_of = told(post(url, {**body, "prompt": "x" * (2 << 20)}, "completions"))
    assert told_of == "the prompt has 2,097,152 bytes of text, more than 1,572,864: shorten it"


def test_a_template_that_fails_is_told(url, monkeypatch):
    monkeypatch.setattr("qlora_wgpu.data.PromptFormat.encoded", lambda *_, **__: 1 / 0)
    assert "ZeroDivisionError" in told(post(url, {"model": "tiny", "messages": TALK}), 500)


@pytest.mark.slow
def test_many_clients_of_whom_half_go_leave_nothing_behind(url):
    port = int(url.split(":")[2].partition("/")[0])
    whole, before = [], {id(text): text for text in texts_there()}

    def client(number):
        body = json.dumps({"model": "tiny", "messages": TALK, "stream": True, "seed": number,
                           "max_tokens": 5}).encode()  # fmt: skip
        with socket.create_connection(("127.0.0.1", port)) as place:
            place.sendall(HEAD.format(len(body)).encode() + body)
            if number % 2:
                place.recv(100)
                return
            read = b""
            while b"[DONE]" not in read:
                part = place.recv(65536)
                assert part
                read += part
            whole.append(number)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(whole) == list(range(0, 30, 2))
    assert ask(url, max_tokens=1)["choices"]
    until(lambda: sum(id(text) not in before for text in texts_there()) <= 2)


def texts_there():
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Request)]
