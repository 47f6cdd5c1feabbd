"""Calls of functions over real HTTP, by a model that says what a test has it say."""

import json

import pytest
from e2e.tiny import CHARACTERS, SPECIAL, write_model
from support.openai_http import TALK, ask, events, post, serving
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import PromptFormat, Tokenizer
from qlora_wgpu.data.chat_template import ChatTemplate
from qlora_wgpu.generation.sequence import Request
from qlora_wgpu.serving.writer import ServedModel

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls %}OPEN{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% if SHORT and c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "hermes": "{{ tools | tojson if tools }}" + TURNS.replace("OPEN", "<tool_call>"),
    "mistral": "{{ tools | tojson if tools }}"
    + TURNS.replace("OPEN", "[TOOL_CALLS]").replace("SHORT", "true"),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]
BODY = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{BODY}</tool_call>"
TAKE = Request.take


def write_tokenizer(folder):
    special = [*SPECIAL, "[TOOL_CALLS]"]
    letters = dict.fromkeys(CHARACTERS + '<>{}[]"_/=')
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    backend = Backend(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(device, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("calls") / "model")
    write_tokenizer(folder)
    return QLoRAModel.from_pretrained(folder, quant=QuantConfig(scheme="none"), device=device)


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.from_folder(model.folder.path)


@pytest.fixture(scope="module")
def url(model, tokenizer):
    models = {
        name: ServedModel("default", PromptFormat("chat", tokenizer, ChatTemplate(source, {})))
        for name, source in TEMPLATES.items()
    }
    with serving(model, models, texts=4, capacity=1024) as address:
        yield address


@pytest.fixture
def says(monkeypatch, tokenizer):
    """Has the model say a text."""

    def scripted(text):
        ids = [*tokenizer.encode(text, False), tokenizer.eos_token_id]
        monkeypatch.setattr(
            Request,
            "take",
            lambda own, token, logits=None: TAKE(own, ids[min(len(own.ids), len(ids) - 1)], logits),
        )

    return scripted


def message_of(url, **body):
    choice = ask(url, **{"model": "hermes", "tools": TOOLS, **body})["choices"][0]
    return choice["message"], choice["finish_reason"]


@pytest.mark.slow
def test_a_call_is_told_and_not_said(url, says):
    says(f"let me see\n{CALL}{CALL}")
    message, reason = message_of(url)
    assert reason == "tool_calls" and message["content"] == "let me see"
    first, second = message["tool_calls"]
    assert first["type"] == "function" and first["id"] != second["id"]
    assert first["function"] == second["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.slow
def test_a_streamed_call_has_its_name_first_and_then_its_arguments(url, says):
    says(f"so\n{CALL}{CALL}")
    pieces = [c for p in events(url, model="hermes", tools=TOOLS) for c in p["choices"]]
    deltas = [piece["delta"] for piece in pieces]
    assert "".join(d.get("content") or "" for d in deltas) == "so"
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert calls[0]["id"] and calls[0]["function"] == {"name": "add", "arguments": ""}
    assert calls[1]["function"] == {"arguments": '{"a": 1}'} and "id" not in calls[1]
    assert pieces[-1]["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_without_text_content_is_null(url, says):
    says(CALL)
    assert message_of(url)[0]["content"] is None


@pytest.mark.slow
def test_one_call_alone_ends_the_answer(url, says):
    says(CALL * 9)
    body = {"tools": TOOLS, "parallel_tool_calls": False}
    answer = ask(url, model="hermes", **body)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens"] < 3 * len(CALL)  # the rest was not written


@pytest.mark.parametrize(
    "change",
    [{"tools": None}, {"tool_choice": "none"}, {"tools": TOOLS[1:]}],
)
def test_what_nobody_offered_stays_text(url, says, change):
    says(CALL)
    message, reason = message_of(url, **change)
    assert message == {"role": "assistant", "content": CALL} and reason == "stop"


def test_a_call_that_is_cut_off_stays_text(url, says):
    says(CALL)
    message, reason = message_of(url, max_tokens=len(CALL) - 20)
    assert message["content"] == CALL[:-20] and reason == "length"


@pytest.mark.slow
def test_markers_that_are_special_tokens(url, says, tokenizer):
    assert tokenizer.decode([tokenizer.token_id("[TOOL_CALLS]")]) == ""
    says(f"[TOOL_CALLS] [{BODY}]")
    message, reason = message_of(url, model="mistral")
    assert reason == "tool_calls" and len(message["tool_calls"][0]["id"]) == 9
    says("[TOOL_CALLS] no call")
    assert message_of(url, model="mistral")[0]["content"] == "[TOOL_CALLS] no call"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_next_turn_goes_back_through_the_template(url, says, tokenizer, name):
    says(CALL if name == "hermes" else f"[TOOL_CALLS] [{BODY}]")
    message, _ = message_of(url, model=name)
    call = message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    says("it is 3")
    talk = [*TALK, message, result]
    answer = ask(url, model=name, tools=TOOLS, messages=talk)
    assert answer["choices"][0]["message"]["content"] == "it is 3"
    written = PromptFormat("chat", tokenizer, ChatTemplate(TEMPLATES[name], {}))
    parsed = {**call, "function": {"name": "add", "arguments": {"a": 1}}}
    exact = [*TALK, {**message, "tool_calls": [parsed]}, result]
    assert answer["usage"]["prompt_tokens"] == len(written.ids(exact, TOOLS))


@pytest.mark.slow
def test_several_answers_have_calls_of_their_own(url, says):
    says(CALL)
    choices = ask(url, model="hermes", tools=TOOLS, n=3, logprobs=True)["choices"]
    assert len({c["message"]["tool_calls"][0]["id"] for c in choices}) == 3
    assert all(len(c["logprobs"]["content"]) == len(CALL) for c in choices)


@pytest.mark.quick("values")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tools": [7]}, "tool 1 must be an object"),
        ({"tools": [TOOLS[0], {"type": "function", "function": {}}]}, "tool 2 must be an object"),
        ({"tools": [{**TOOLS[0], "type": "custom"}]}, "tool 1 must be an object"),
        ({"tools": "add"}, "'tools' must be a list"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "is not supported"),
        ({"parallel_tool_calls": 1}, "'parallel_tool_calls' must be true or false"),
    ],
)
def test_what_is_wrong_is_told(url, change, told):
    status, text = post(url, {"model": "hermes", "messages": TALK, "tools": TOOLS, **change})
    assert status == 400 and told in json.loads(text)["error"]["message"]
