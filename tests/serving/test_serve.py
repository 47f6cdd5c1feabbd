"""The endpoints over real HTTP, with a tiny model."""

import json
import socket
import threading
import urllib.error
import urllib.request

import pytest
from e2e.tiny import write_model
from support.openai_http import TALK, ask, events, post, serving

from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import PromptFormat, Tokenizer
from qlora_wgpu.data.chat_template import ChatTemplate, find_chat_template
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.generation.generate import Prompt, complete
from qlora_wgpu.generation.sampling import Sampling
from qlora_wgpu.serving.requests import ChatRequest
from qlora_wgpu.serving.writer import ServedModel


@pytest.fixture(scope="module")
def model(device, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("serving") / "model")
    return QLoRAModel.from_pretrained(folder, quant=QuantConfig(scheme="none"), device=device)


@pytest.fixture(scope="module")
def written(model):
    tokenizer = Tokenizer.from_folder(model.folder.path)
    return PromptFormat("chat", tokenizer, find_chat_template("chatml", tokenizer))


@pytest.fixture(scope="module")
def url(model, written):
    with serving(model, {"tiny": ServedModel("default", written)}) as address:
        yield address


def alone(model, written, sampling, count):
    """What the model says by itself."""
    prompt = Prompt(written.ids(TALK), written.stop_ids, (written.stop_text,))
    made = complete(model, written.tokenizer, [prompt], max_new_tokens=count, sampling=sampling)
    return next(iter(made))


def test_an_answer_is_what_the_model_says_by_itself(url, model, written):
    made = alone(model, written, Sampling(), 8)
    answer = ask(url, temperature=0, max_tokens=8)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": made.text}
    assert answer["choices"][0]["finish_reason"] == made.finish_reason
    prompt = len(written.ids(TALK))
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(made.ids),
        "total_tokens": prompt + len(made.ids),
    }


def test_a_stream_has_the_same_text_in_pieces(url):
    whole = ask(url, temperature=0.9, seed=3, max_tokens=8)
    pieces = events(
        url, temperature=0.9, seed=3, max_tokens=8, stream_options={"include_usage": True}
    )
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(p["choices"][0]["delta"].get("content", "") for p in pieces if p["choices"])
    assert said == whole["choices"][0]["message"]["content"]
    assert pieces[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert pieces[-1]["usage"] == whole["usage"] and pieces[-1]["choices"] == []


@pytest.mark.slow
def test_answers_of_several_clients_do_not_depend_on_one_another(url, model, written):
    expected = [alone(model, written, Sampling(1.0, seed=seed), 6).text for seed in range(3)]
    found = {}

    def client(number):
        answer = ask(url, seed=number % 3, max_tokens=6)
        found[number] = answer["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(6)] == [expected[n % 3] for n in range(6)]


def test_a_stop_string_ends_it_and_is_no_part_of_it(url):
    whole = ask(url, seed=0, max_tokens=12)["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:2]
    assert len(stop) == 2
    cut = ask(url, seed=0, max_tokens=12, stop=[stop])["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_a_client_that_goes_leaves_its_place(url):
    port = int(url.split(":")[2].partition("/")[0])
    body = json.dumps({"model": "tiny", "messages": TALK, "stream": True}).encode()
    for _ in range(4):  # twice as many as there are places
        with socket.create_connection(("127.0.0.1", port)) as client:
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            client.recv(100)
    assert ask(url, temperature=0, max_tokens=2)["choices"]


def test_models_are_listed(url):
    with urllib.request.urlopen(f"{url}/models") as answer:
        assert [card["id"] for card in json.load(answer)["data"]] == ["tiny"]
    with urllib.request.urlopen(f"{url}/models/tiny") as answer:
        assert json.load(answer)["id"] == "tiny"
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(f"{url}/models/other")
    caught.value.close()


@pytest.mark.quick("values", streamed=[False])
@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"model": "other"}, 404, "unknown model 'other'"),
        ({"model": None}, 400, "'model' must be"),
        ({"messages": []}, 400, "'messages' must be"),
        ({"messages": [{"role": "user"}]}, 400, "'content' is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "message 1 has a part of type 'image_url', which is not supported (supported: text)",
        ),
        ({"n": 0}, 400, "n must be an integer from 1 to 64, got 0"),
        ({"n": -1}, 400, "n must be an integer from 1 to 64, got -1"),
        ({"n": 1.5}, 400, "n must be an integer from 1 to 64, got 1.5"),
        ({"n": True}, 400, "n must be an integer from 1 to 64, got True"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "the model's chat template does not support tools",
        ),
        ({"tools": {}, "tool_choice": "required"}, 400, "'tools' must be a list"),
        ({"tool_choice": "required"}, 400, "tool_choice = 'required' is not supported"),
        ({"presence_penalty": 0.5}, 400, "is not supported: use repetition_penalty or remove it"),
        ({"logit_bias": [5]}, 400, "'logit_bias' must be an object"),
        ({"logit_bias": {"the": 1}}, 400, "'logit_bias' contains 'the', which is not a token id"),
        ({"logit_bias": {"05": 1}}, 400, "'logit_bias' contains '05'"),
        ({"logit_bias": {"5": 101}}, 400, "token 5 must be a number from -100 to 100, got 101"),
        ({"logit_bias": {"5": True}}, 400, "token 5 must be a number from -100 to 100"),
        (
            {"logit_bias": {"100257": 1}},
            400,
            "contains token 100257, but the model's last token is",
        ),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "at most 1,024 tokens, got 1,025"),
        ({"top_logprobs": 3}, 400, "top_logprobs requires logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "at most 20"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"temperature": -1}, 400, "temperature must be"),
        ({"top_p": 2}, 400, "top_p must be"),
        ({"max_tokens": "many"}, 400, "max_tokens must be"),
        ({"stop": 3}, 400, "'stop' must be"),
        ({"stream": "yes"}, 400, "'stream' must be"),
        ({"temprature": 1}, 400, "unknown parameter 'temprature'"),
        ({"messages": [{"role": "user", "content": "what is this? " * 40}]}, 400, "the prompt has"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_wrong_is_told(url, change, status, told, streamed):
    found, text = post(url, {"model": "tiny", "messages": TALK, "stream": streamed} | change)
    assert found == status
    assert told in json.loads(text)["error"]["message"]


def test_no_json_is_told(url):
    assert post(url, b"{")[0] == 400
    assert post(url, b"[]")[0] == 400
    assert post(url, b"{}", **{"Content-Type": "text/plain"})[0] == 415


def test_another_hosts_name_is_refused(url):
    status, answer = post(url, {}, Host="evil.example")
    assert status == 400 and "evil.example" in json.loads(answer)["error"]["message"]


def test_defaults_that_clients_send_are_taken():
    request = ChatRequest.read(
        {"model": "m", "messages": TALK, "n": 1, "tools": [], "logprobs": False, "user": "me",
         "presence_penalty": 0.0, "response_format": {"type": "text"}, "stop": "x"}
    )  # fmt: skip
    assert request.sampling == Sampling(1.0, seed=None) and request.stop == ("x",)


def test_the_role_developer_is_the_system_under_its_newer_name():
    said = [{"role": "developer", "content": "be brief"}, *TALK]
    request = ChatRequest.read({"model": "m", "messages": said})
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    written = template.render(request.messages).text
    assert written == template.render([{"role": "system", "content": "be brief"}, *TALK]).text


def test_a_request_must_be_an_object():
    with pytest.raises(DataError, match="JSON object"):
        ChatRequest.read([])
    with pytest.raises(ConfigError, match="unknown parameter"):
        ChatRequest.read({"model": "m", "messages": TALK, "unknown": 1})


def test_what_nobody_foresaw_is_told_and_others_go_on(url, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr("qlora_wgpu.generation.sequence.Request.take", lambda *_: 1 / 0)
        status, text = post(url, {"model": "tiny", "messages": TALK, "seed": 0})
        assert status == 500
        assert json.loads(text)["error"]["message"].endswith(
            "(ZeroDivisionError: division by zero)"
        )
    with monkeypatch.context() as broken:
        broken.setattr("qlora_wgpu.generation.text.TextStream.push", lambda *_: 1 / 0)
        assert post(url, {"model": "tiny", "messages": TALK, "seed": 0})[0] == 500
    assert ask(url, max_tokens=2)["choices"]
