"""Requests are read without a server: what each parameter may be, to the last number."""

import pytest

from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.limits import ANSWERS, LOGPROBS, STOP_TEXTS
from qlora_wgpu.serving.requests import ChatRequest, CompletionRequest

TALK = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "other"}}


def chat(**given):
    return ChatRequest.read({"model": "tiny", "messages": TALK, **given})


def text(**given):
    return CompletionRequest.read({"model": "tiny", "prompt": "what is", **given})


def test_what_is_not_given_is_as_openai_has_it():
    for read, tokens in ((chat, None), (text, 16)):
        request = read()
        assert request.model == "tiny" and request.max_new_tokens == tokens
        assert (request.stream, request.include_usage, request.n) == (False, False, 1)
        assert request.stop == () and request.logprobs is None
        assert request.sampling.temperature == 1.0 and request.sampling.seed is None
        assert request.sampling.logit_bias == {}
    request = chat()
    assert request.tools is None and request.parallel_tool_calls is True
    assert request.messages == TALK and request.chat_template_kwargs == {}
    assert text().prompts == ["what is"]


@pytest.mark.parametrize("read", [chat, text])
def test_nothing_and_defaults_are_as_good_as_left_out(read):
    nothing = dict.fromkeys(("stream", "stop", "n", "seed", "stream_options", "max_tokens", "user"))
    assert read(presence_penalty=0, frequency_penalty=0.0, **nothing) == read()
    assert read(user="me", metadata={}, store=True) == read()
    assert text(echo=False, suffix="", best_of=1, logprobs=None) == text()
    assert chat(response_format={"type": "text"}, modalities=["text"], tools=[]) == chat()


@pytest.mark.parametrize("read", [chat, text])
def test_common_parameters_are_taken_to_their_bounds(read):
    assert read(n=ANSWERS).n == ANSWERS and read(n=1).n == 1
    assert read(stop="a").stop == ("a",) and read(stop=["a", "b"]).stop == ("a", "b")
    assert len(read(stop=["a"] * STOP_TEXTS).stop) == STOP_TEXTS
    assert read(stream=True, stream_options={"include_usage": True}).include_usage
    assert not read(stream_options={"include_obfuscation": True}).include_usage
    assert read(max_tokens=3).max_new_tokens == 3
    sampling = read(temperature=0.5, top_p=0.25, top_k=3, logit_bias={"0": 1, "17": -2}).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert sampling.logit_bias == {0: 1, 17: -2}


def test_the_newer_name_of_the_number_of_tokens_counts():
    assert chat(max_completion_tokens=3, max_tokens=5).max_new_tokens == 3


@pytest.mark.parametrize(
    ("seed", "taken"),
    [(5, 5), (0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)],
)
def test_seeds_are_signed_or_not(seed, taken):
    request = chat(seed=seed)
    assert request.sampling.seed == taken
    if taken < 2**60:
        assert [request.sampling_of(i).seed for i in range(3)] == [taken, taken + 1, taken + 2]


def test_answers_without_a_seed_are_drawn_alike():
    request = chat(n=2)
    assert request.sampling_of(1) is request.sampling


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"n": 0}, "n must be an integer from 1"),
        ({"n": ANSWERS + 1}, "n must be an integer from 1"),
        ({"n": True}, "n must be an integer from 1"),
        ({"n": 1.0}, "n must be an integer from 1"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": True}, "seed"),
        ({"stop": ["a"] * (STOP_TEXTS + 1)}, "'stop' may have at most"),
        ({"stop": ["a", 1]}, "'stop' must be a string or a list"),
        ({"stop": 1}, "'stop' must be a string or a list"),
        ({"stream": 1}, "'stream' must be true or false"),
        ({"stream_options": 1}, "stream_options must be an object"),
        ({"stream_options": {"usage": 1}}, "unknown stream option 'usage'"),
        ({"stream_options": {"include_usage": 1}}, "'include_usage' must be true or false"),
        ({"model": 1}, "'model' must be the name"),
        ({"model": None}, "'model' must be the name"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logit_bias": [1]}, "'logit_bias' must be an object"),
        ({"logit_bias": {"01": 1}}, "'01', which is not a token id"),
        ({"logit_bias": {"1" * 11: 1}}, "is not a token id"),
        ({"logit_bias": {"1x": 1}}, "is not a token id"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5 .*: use repetition_penalty or remove"),
        ({"presence_penalty": 1}, "presence_penalty = 1 is not supported"),
        ({"frequency_penalty": 1}, "frequency_penalty = 1 is not supported"),
        ({"bogus": None}, "unknown parameter 'bogus'"),
    ],
)
@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.cover("all")
def test_what_no_request_may_have_is_told(read, given, told):
    with pytest.raises(QLoRAError, match=told):
        read(**given)


@pytest.mark.parametrize("read", [ChatRequest.read, CompletionRequest.read])
@pytest.mark.parametrize("body", [None, [], "a"])
def test_a_request_is_an_object(read, body):
    with pytest.raises(QLoRAError, match="must be a JSON object"):
        read(body)


# ---- chats ---------------------------------------------------------------------------------------


def test_a_chat_may_ask_for_probabilities():
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=LOGPROBS).logprobs == LOGPROBS
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_a_chat_may_have_images():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "what is it?"}, image]
    assert len(chat(messages=[{"role": "user", "content": parts}]).messages) == 1


def test_a_chat_may_have_tools():
    assert chat(tools=[TOOL, OTHER]).tools == [TOOL, OTHER]
    assert chat(tools=[TOOL], tool_choice="auto").tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").tools is None
    assert chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls is False
    assert chat(chat_template_kwargs={"brief": True}).chat_template_kwargs == {"brief": True}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"top_logprobs": 1}, "top_logprobs requires logprobs: true"),
        ({"logprobs": 1}, "'logprobs' must be true or false"),
        ({"logprobs": True, "top_logprobs": LOGPROBS + 1}, f"at most {LOGPROBS}"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"tools": {"a": 1}}, "'tools' must be a list"),
        ({"tools": [TOOL, 1]}, "tool 2 must be an object"),
        ({"tools": [{"type": "function", "function": 1}]}, "tool 1 must be an object"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tool 1 must be an object"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tool 1 must be an object"),
        ({"tools": [{"type": "f", "function": {"name": "a"}}]}, "tool 1 must be an object"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice = 'required'"),
        ({"response_format": {"type": "json_object"}}, "response_format = .* supported: remove it"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"parallel_tool_calls": 1}, "'parallel_tool_calls' must be"),
        ({"messages": None}, "messages"),
        ({"prompt": "a"}, "unknown parameter 'prompt'"),
    ],
)
def test_what_no_chat_may_have_is_told(given, told):
    with pytest.raises(QLoRAError, match=told):
        chat(**given)


# ---- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([0, 2**31 - 1], [[0, 2**31 - 1]]),
        ([[1, 2], "a"], [[1, 2], "a"]),
    ],
)
def test_a_text_has_one_prompt_or_several(prompt, prompts):
    assert text(prompt=prompt).prompts == prompts
    assert text(prompt=prompt, logprobs=LOGPROBS).logprobs == LOGPROBS
    assert text(prompt=prompt, logprobs=0).logprobs == 0


def test_prompts_have_as_many_answers_together_as_one():
    assert text(prompt=["a"] * (ANSWERS // 2), n=2).n == 2
    with pytest.raises(QLoRAError, match=f"with n = 2 are more than {ANSWERS} answers"):
        text(prompt=["a"] * (ANSWERS // 2 + 1), n=2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"prompt": []}, "'prompt' must be"),
        ({"prompt": [[]]}, "'prompt' must be"),
        ({"prompt": {"a": 1}}, "'prompt' must be"),
        ({"prompt": ["a", 1]}, "'prompt' must be"),
        ({"prompt": [True]}, "'prompt' must be"),
        ({"prompt": [-1]}, "not a token id"),
        ({"prompt": [2**31]}, "not a token id"),
        ({"prompt": [1, -1]}, "not a token id"),
        ({"prompt": ["a", [-1]]}, "not a token id"),
        ({"logprobs": LOGPROBS + 1}, f"logprobs must be at most {LOGPROBS}"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo = True is not supported: remove it"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": TALK}, "unknown parameter 'messages'"),
    ],
)
def test_what_no_text_may_have_is_told(given, told):
    with pytest.raises(QLoRAError, match=told):
        text(**given)
