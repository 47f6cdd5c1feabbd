"""The server of a reward model or classifier."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import uvicorn
from e2e.tiny import write_model
from support.openai_http import post

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.serving.scores import ScoreServer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@contextmanager
def serving(model):
    app = ScoreServer("tiny", model, model.prompts, 2, 16).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    place = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([place])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{place.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def opened(device, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    return QLoRAModel.from_pretrained(
        folder, lora, QuantConfig(scheme="none"), "float32", device, num_labels=3
    )


def test_scores_over_http(opened):
    with serving(opened) as url:
        status, text = post(url, {"model": "tiny", "input": ["ab", "cdef", "gh"]}, "score")
        made = json.loads(text)
        assert status == 200 and [each["index"] for each in made["data"]] == [0, 1, 2]
        expected = opened.score(["ab", "cdef", "gh"])
        for each, row in zip(made["data"], expected, strict=True):
            assert np.allclose(list(each["scores"].values()), row, rtol=1e-5, atol=1e-6)
            assert each["label"] == f"LABEL_{int(row.argmax())}"
            assert sum(each["probabilities"].values()) == pytest.approx(1)
        status, text = post(url, {"input": CHAT}, "score")
        assert status == 200 and len(json.loads(text)["data"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": []}, 400, "'input' must be a string, messages, or a list of them"),
        ({"input": "a", "text_2": "b"}, 400, "unknown field 'text_2'"),
        ({"input": "a", "model": "other"}, 404, "unknown model 'other'"),
        ({"input": "a" * 40}, 400, "more than the server's --context 16"),
        ({"input": [3.5]}, 400, "an input must be a string"),
        (b"{", 400, "cannot parse the request"),
    ],
)
def test_requests_that_are_refused(opened, body, status, message):
    with serving(opened) as url:
        got, text = post(url, body, "score")
    assert got == status and message in json.loads(text)["error"]["message"]


def test_other_endpoints_are_refused(opened):
    with serving(opened) as url:
        status, text = post(url, {"messages": CHAT}, "chat/completions")
    assert status == 404 and "POST /v1/score" in text
