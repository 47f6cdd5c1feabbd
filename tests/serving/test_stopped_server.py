"""A server that is stopped while it writes: clients are told, and nobody waits for answers."""

import asyncio
import logging
import signal
import socket
import threading

import pytest
import uvicorn
from serving.tiny_served import tiny_served
from support.openai_http import TALK
from support.processes import PATIENCE, until

from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.serving.app import StoppableServer
from qlora_wgpu.serving.requests import ChatRequest
from qlora_wgpu.serving.writer import GenerationWorker


@pytest.fixture
def writer_and_served(device, tmp_path):
    model, tiny = tiny_served(device, tmp_path / "model")
    writer = GenerationWorker(Engine(model, 1, 512), model)
    yield writer, tiny
    writer.close()


def request(count):
    # By chance the first answer might end at once; with this seed it is long and begins with text.
    return ChatRequest.read({"model": "tiny", "messages": TALK, "n": count, "seed": 1})


def hold(engine, turns):
    """Lets the engine take so many turns, and more once the event that is returned is set."""
    step, go_on, taken = engine.step, threading.Event(), []

    def held():
        if len(taken) == turns:
            assert go_on.wait(PATIENCE)
        else:
            taken.append(None)
        return step()

    engine.step = held
    return go_on


def test_answers_that_grow_and_wait_end_with_a_sentence(writer_and_served):
    writer, served = writer_and_served
    go_on = hold(writer._engine, 20)  # however late this thread has its turn, no answer is whole

    async def stopped():
        answers = await writer.submit(served, request(3))  # of which one grows at a time
        _, first = await answers[0].pieces.get()
        writer.stop()
        go_on.set()
        stopped = set()
        while len(stopped) < 3:
            number, piece = await answers[0].pieces.get()
            if isinstance(piece, QLoRAError):
                assert str(piece) == "the server has been stopped"
                stopped.add(number)
            else:
                assert piece.finish_reason is None
        with pytest.raises(QLoRAError, match="the server has been stopped"):
            await writer.submit(served, request(1))
        return first

    assert asyncio.run(asyncio.wait_for(stopped(), PATIENCE)).tokens


def test_whoever_has_gone_with_the_event_loop_is_told_nothing(writer_and_served, capsys):
    writer, served = writer_and_served

    async def gone():
        return await writer.submit(served, request(1))

    (answer,) = asyncio.run(gone())
    answer.fail(QLoRAError("too late"))  # an error here would end the writer's thread
    writer.close()
    assert not writer._thread.is_alive() and "Traceback" not in capsys.readouterr().err


def test_a_second_ctrl_c_shows_no_traceback(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", False)  # and put back
    reached, stopped = threading.Event(), []

    async def hangs(scope, receive, send):
        reached.set()
        await asyncio.sleep(PATIENCE)

    config = uvicorn.Config(hangs, log_level="warning", lifespan="off")
    server = StoppableServer(config, lambda: stopped.append(True))
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([place],))
        thread.start()
        until(lambda: server.started)
        with socket.create_connection(place.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert reached.wait(PATIENCE)
            server.handle_exit(signal.SIGINT, None)
            server.handle_exit(signal.SIGINT, None)
            thread.join(PATIENCE)
    assert stopped and not thread.is_alive() and not capfd.readouterr().err
