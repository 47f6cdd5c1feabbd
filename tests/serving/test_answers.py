"""Several answers, their tokens' probabilities, tools, and texts that are gone on with."""

import json

import numpy as np
import pytest
from e2e.tiny import write_model
from support.openai_http import TALK, ask, events, post, serving

from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import PromptFormat, Tokenizer
from qlora_wgpu.data.chat_template import ChatTemplate
from qlora_wgpu.generation.text import TokenLogprobs
from qlora_wgpu.serving.writer import ServedModel

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if brief %}say little{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TEXT = "completions"


@pytest.fixture(scope="module")
def model(device, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("serving") / "model")
    plain = QuantConfig(scheme="none")
    return QLoRAModel.from_pretrained(folder, None, plain, "float32", device)


@pytest.fixture(scope="module")
def written(model):
    return PromptFormat(
        "chat", Tokenizer.from_folder(model.folder.path), ChatTemplate(TEMPLATE, {})
    )


@pytest.fixture(scope="module")
def url(model, written):
    with serving(model, {"tiny": ServedModel("default", written)}) as address:
        yield address


def texts_of(answer):
    return [c["message"]["content"] for c in answer["choices"]]


@pytest.mark.slow
def test_several_answers_are_those_of_their_seeds(url):
    alone = [texts_of(ask(url, seed=4 + i, max_tokens=6))[0] for i in range(3)]
    assert len(set(alone)) > 1
    whole = ask(url, seed=4, n=3, max_tokens=6)
    assert texts_of(whole) == alone
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    one = ask(url, seed=4, max_tokens=6)["usage"]
    assert whole["usage"]["prompt_tokens"] == one["prompt_tokens"]  # once
    pieces = events(url, seed=4, n=3, max_tokens=6, stream_options={"include_usage": True})
    said = ["", "", ""]
    for choice in (c for piece in pieces for c in piece["choices"]):
        said[choice["index"]] += choice["delta"].get("content", "")
    assert said == alone and pieces[-1]["usage"] == whole["usage"]
    ends = [c["index"] for p in pieces for c in p["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


def test_seeds_have_a_sign(url):
    below, above, other = (
        texts_of(ask(url, seed=seed, max_tokens=8)) for seed in (-5, 2**64 - 5, 5)
    )
    assert below == above != other


@pytest.mark.slow
def test_biases_are_added_to_logits(url, model, written):
    """Each token is the likeliest of the model's logits with the biases; others' texts stay."""
    prompt = written.ids(TALK)
    plain = model.generate(prompt, max_new_tokens=6, stop_ids=())
    biases = {plain[0]: -100, plain[1]: -2.5, 7: 3, 8: 1.25}
    made = model.generate(prompt, max_new_tokens=6, stop_ids=(), logit_bias=biases)
    row = model.logits(np.array([prompt + made]))[0, len(prompt) - 1 : -1]
    row[:, list(biases)] += list(biases.values())
    assert row.argmax(axis=1).tolist() == made != plain
    assert model.generate(prompt, max_new_tokens=6, stop_ids=()) == plain
    asked = {"temperature": 0, "max_tokens": 6}
    given = {str(token): bias for token, bias in biases.items()}
    assert texts_of(ask(url, logit_bias=given, **asked))[0] in written.tokenizer.decode(made)
    alone = ask(url, logit_bias={"7": 100}, logprobs=True, seed=1, max_tokens=3)["choices"][0]
    assert len({each["token"] for each in alone["logprobs"]["content"]}) == 1
    assert ask(url, **asked)["choices"][0] == ask(url, logit_bias={}, **asked)["choices"][0]


def test_logprobs_are_those_of_the_models_logits(url, model, written):
    """Of what was sampled, at any temperature: of the logits as they are."""
    asked = {"seed": 3, "temperature": 1.7, "repetition_penalty": 1.3, "max_tokens": 7}
    plain = ask(url, **asked)
    answer = ask(url, logprobs=True, top_logprobs=4, **asked)["choices"][0]
    assert answer["message"] == plain["choices"][0]["message"]
    assert plain["choices"][0]["logprobs"] is None
    told = answer["logprobs"]["content"]
    assert "".join(each["token"] for each in told) == answer["message"]["content"]
    prompt = written.ids(TALK)
    made = list(
        model.generate(
            prompt, max_new_tokens=7, temperature=1.7, seed=3, repetition_penalty=1.3, stop_ids=()
        )
    )
    assert len(made) >= len(told)
    logits = model.logits(np.array([prompt + made]))[0].astype(np.float64)
    for number, (each, token) in enumerate(zip(told, made, strict=False)):
        row = logits[len(prompt) - 1 + number]
        exact = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert abs(each["logprob"] - exact[token]) <= 1e-4  # float32 logits, cached keys
        top = [other["logprob"] for other in each["top_logprobs"]]
        assert top == sorted(top, reverse=True) and len(top) == 4
        assert np.abs(np.array(top) - np.sort(exact)[::-1][:4]).max() <= 1e-4
        assert each["bytes"] == list(each["token"].encode())


def test_streamed_logprobs_come_with_their_tokens(url):
    asked = {"seed": 3, "max_tokens": 7, "logprobs": True, "top_logprobs": 2}
    whole = ask(url, **asked)["choices"][0]
    pieces = [c for piece in events(url, **asked) for c in piece["choices"]]
    told = [each for c in pieces if c["logprobs"] for each in c["logprobs"]["content"]]
    assert told == whole["logprobs"]["content"]
    for choice in pieces:
        said = "".join(each["token"] for each in (choice["logprobs"] or {}).get("content", []))
        assert said == choice["delta"].get("content", "")


def test_told_and_untold_answers_beside_one_another(url):
    """Who asks for no probabilities has the same text beside one who does."""
    alone = texts_of(ask(url, seed=8, max_tokens=6))
    assert texts_of(ask(url, seed=8, max_tokens=6, logprobs=True)) == alone


def test_probabilities_of_equals_and_of_all():
    told = TokenLogprobs.of(np.array([1.0, 3.0, 3.0, -1.0], np.float32), 3, 9)
    assert [token for token, _ in told.top] == [1, 2, 0, 3]
    assert sum(np.exp(p) for _, p in told.top) == pytest.approx(1)
    assert told.logprob == told.top[3][1]
    assert TokenLogprobs.of(np.array([1.0, 3.0], np.float32), 0, 0).top == ()


def test_tools_are_written_by_the_template(url, written):
    plain = ask(url, max_tokens=1)["usage"]["prompt_tokens"]
    with_tools = ask(url, max_tokens=1, tools=[TOOL])["usage"]["prompt_tokens"]
    assert with_tools == len(written.ids(TALK, [TOOL])) > plain
    none = ask(url, max_tokens=1, tools=[TOOL], tool_choice="none")["usage"]["prompt_tokens"]
    assert none == plain


def test_the_template_gets_what_rows_give_it(url, written):
    brief = {"chat_template_kwargs": {"brief": True}}
    asked = ask(url, max_tokens=1, **brief)["usage"]["prompt_tokens"]
    assert asked == len(written.ids(TALK, None, {"brief": True})) > len(written.ids(TALK))


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("brief", "must be an object"),
        ({"messages": []}, "'chat_template_kwargs' must not have 'messages'"),
    ],
)
def test_what_is_no_option_of_a_template_is_refused(url, options, message):
    status, answer = post(url, {"model": "tiny", "messages": TALK, "chat_template_kwargs": options})
    assert status == 400 and message in json.loads(answer)["error"]["message"]


def test_calls_have_their_arguments_as_templates_want_them(url, written):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "xyz"}'}}
    talk = [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    asked = ask(url, max_tokens=1, messages=talk)["usage"]["prompt_tokens"]
    parsed = {**call, "function": {"name": "f", "arguments": {"a": "xyz"}}}
    exact = [talk[0], {**talk[1], "tool_calls": [parsed]}, talk[2]]
    assert asked == len(written.ids(exact)) > len(written.ids(TALK)) + 3
    broken = {**call, "function": {"name": "f", "arguments": "{no JSON"}}
    assert ask(url, max_tokens=1, messages=[*TALK, {**talk[1], "tool_calls": [broken]}])


@pytest.mark.slow
def test_a_text_is_gone_on_with(url, model, written):
    answer = ask(url, TEXT, temperature=0, max_tokens=6)
    assert answer["object"] == "text_completion"
    expected = model.generate("what is", max_new_tokens=6)
    assert answer["choices"][0]["text"] == expected
    ids = PromptFormat.text(written.tokenizer).ids([{"content": "what is"}])
    assert ask(url, TEXT, temperature=0, max_tokens=6, prompt=ids)["choices"] == answer["choices"]
    pieces = events(url, TEXT, temperature=0, max_tokens=6)
    assert "".join(c["text"] for piece in pieces for c in piece["choices"]) == expected
    assert len(ask(url, TEXT, temperature=0)["choices"][0]["text"]) <= 16  # tokens, of a letter


def test_several_texts_and_answers_to_each(url, model):
    prompts = ["what is", "hello"]
    answer = ask(url, TEXT, prompt=prompts, n=2, temperature=0, max_tokens=4)
    texts = [choice["text"] for choice in answer["choices"]]
    expected = [model.generate(prompt, max_new_tokens=4) for prompt in prompts]
    assert texts == [expected[0]] * 2 + [expected[1]] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    both = [ask(url, TEXT, prompt=p, max_tokens=1)["usage"]["prompt_tokens"] for p in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(both)


def test_logprobs_of_texts(url):
    choice = ask(url, TEXT, temperature=0, max_tokens=5, logprobs=3)["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [0, *np.cumsum([len(t) for t in told["tokens"]])[:-1].tolist()]
    for token, own, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert len(top) <= 3 and top[token] == own == max(top.values())


@pytest.mark.quick("values", streamed=[False])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt": None}, "'prompt' must be"),
        ({"prompt": []}, "'prompt' must be"),
        ({"prompt": [["a"]]}, "'prompt' must be"),
        ({"prompt": [1, "a"]}, "'prompt' must be"),
        ({"prompt": [[1, "a"]]}, "'prompt' must be"),
        ({"prompt": [1, 2, 1000]}, "1000"),
        ({"prompt": [1, 2, -1]}, "not a token id"),
        ({"prompt": [1, 2, 1 << 80]}, "not a token id"),
        ({"prompt": ["a"] * 30, "n": 3}, "more than 64 answers"),
        ({"echo": True}, "echo"),
        ({"best_of": 4}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs must be a non-negative integer"),
        ({"messages": TALK}, "unknown parameter 'messages'"),
        ({"prompt": "a" * 300}, "the prompt has"),
        ({"prompt": ["a" * 300] * 3}, "the prompt has"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_wrong_is_told(url, change, told, streamed):
    body = {"model": "tiny", "prompt": "what is", "stream": streamed} | change
    status, text = post(url, body, TEXT)
    assert status == 400
    assert told in json.loads(text)["error"]["message"]
    assert ask(url, TEXT, max_tokens=1)["choices"]  # others go on


def test_a_prompt_may_have_any_token(url):
    """Also the first one of the vocabulary."""
    assert ask(url, TEXT, prompt=[0, 1, 0], max_tokens=1)["usage"]["prompt_tokens"] == 3
