"""A server of a tiny model in this process, and what is asked of it over real HTTP."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import uvicorn

from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.serving.app import ChatServer
from qlora_wgpu.serving.writer import GenerationWorker
from support.processes import PATIENCE

TALK = [{"role": "user", "content": "what is this?"}]
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)


@contextmanager
def serving(model, models, *, texts=2, capacity=128):
    """The address of a server of some models, which writes so many answers at a time."""
    writer = GenerationWorker(Engine(model, texts, capacity), model)
    app = ChatServer(models, writer).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    place = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([place])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{place.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()
    writer.close()


def post(url, body, path="chat/completions", **headers):
    """Status and text of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{url}/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as err:
        with err:  # Python 3.14 warns of one that is left open
            return err.code, err.read().decode()


def ask(url, path="chat/completions", **body):
    """An answer that comes at once."""
    status, text = post(url, _request(path, body), path)
    assert status == 200, text
    return json.loads(text)


def events(url, path="chat/completions", **body):
    """The pieces of one that is streamed."""
    status, text = post(url, {**_request(path, body), "stream": True}, path)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _request(path, body):
    asked = {"messages": TALK} if path.startswith("chat") else {"prompt": "what is"}
    return {"model": "tiny", **asked, **body}
