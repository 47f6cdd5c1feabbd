"""``chat`` without a model: its commands, its messages, and what it reads."""

import io
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import click
import pytest

from qlora_wgpu.cli import _opening, chat, classify, exporting, web
from qlora_wgpu.cli._options import one_of, positive_integers
from qlora_wgpu.data import PromptFormat
from qlora_wgpu.errors import ConfigError, DataError, TokenizerError


class Model:
    """A model with adapters that computes nothing."""

    compute_dtype, device, max_length = "float32", "device", 99

    def __init__(self, *adapters):
        self.adapters = {name: adapter(name, path) for name, path in adapters}
        self.active_adapter, self.off = next(iter(self.adapters), None), 0

    def load_adapter(self, folder, name):
        self.adapters[name] = adapter(name, folder)

    def set_adapter(self, name):
        self.active_adapter = name

    @contextmanager
    def disable_adapter(self):
        self.off += 1
        yield


def adapter(name, path):
    return SimpleNamespace(name=name, path=path, device_bytes=3 << 19, config=SimpleNamespace(r=8))


class Prompt:
    """A prompt format that notes what it is given."""

    stop_ids, stop_text, tokenizer = {7}, "<END>", "tokenizer"

    def __init__(self):
        self.asked = []

    def encoded(self, messages, *, options, images, folder):
        self.asked.append([dict(message) for message in messages])
        return [1, 2], []


@pytest.fixture
def talk(monkeypatch):
    made, asked = [], []
    monkeypatch.setattr(chat, "generate", lambda model, ids, **how: made.append((ids, how)) or [])
    monkeypatch.setattr(chat, "stream", lambda tokenizer, tokens, stop: f"answer {len(made)}")
    monkeypatch.setattr(
        chat, "adapter_in", lambda name: "runs/b/adapter" if name == "runs/b" else None
    )
    prompt = Prompt()
    model = Model(("base", None), ("first", "first"))
    own = chat._Conversation(
        SimpleNamespace(images=None), model, lambda path: asked.append(path) or prompt,
        {"seed": 5}, "be kind", {},
    )  # fmt: skip
    own.use(prompt, has_adapter=True)
    return SimpleNamespace(own=own, model=model, prompt=prompt, made=made, asked=asked)


def test_a_conversation_goes_on_until_it_is_cleared(talk):
    talk.own.answer("hello")
    talk.own.answer("again")
    system = {"role": "system", "content": "be kind"}
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "answer 1"}]
    assert talk.prompt.asked == [
        [system, first[0]], [system, *first, {"role": "user", "content": "again"}],
    ]  # fmt: skip
    assert [how["seed"] for _, how in talk.made] == [6, 8] and talk.model.off == 0
    assert talk.made[0][1]["stop_ids"] == {7} and talk.made[0][1]["max_length"] == 99
    talk.own.reset(None)
    talk.own.answer("new")
    assert talk.prompt.asked[-1] == [{"role": "user", "content": "new"}]


def test_the_adapter_is_switched(talk):
    assert talk.own.adapter("off") == "the adapter is off"
    talk.own.answer("hello")
    assert talk.model.off == 1
    assert talk.own.adapter("on") == "the adapter is on"
    talk.own.answer("hello")
    assert talk.model.off == 1
    talk.own.use(talk.prompt, has_adapter=False)
    assert talk.own.adapter("on") == "the adapter is off"
    talk.own.answer("hello")
    assert talk.model.off == 1


def test_adapters_are_listed_and_chosen(talk):
    listed = ["base: the base without an adapter", "first: r 8, 1.5 MiB on the GPU"]
    assert talk.own.adapter("").splitlines() == [f"* {listed[0]}", f"  {listed[1]}"]
    assert talk.own.adapter("first") == f"using {listed[1]}" and talk.asked == ["first"]
    assert talk.own.adapter("").splitlines() == [f"  {listed[0]}", f"* {listed[1]}"]
    text = "runs/b (runs/b/adapter): r 8, 1.5 MiB on the GPU"
    assert talk.own.adapter("runs/b") == f"using {text}" and talk.own._is_on
    assert talk.asked[-2:] == ["runs/b/adapter", "runs/b/adapter"]
    talk.own.adapter("base")
    assert not talk.own._has_adapter and talk.model.active_adapter == "base"


def test_what_fails_is_said(talk, monkeypatch):
    def fails(path):
        raise ConfigError("no adapter there")

    talk.own._prompt_of = fails
    assert talk.own.adapter("elsewhere") == "no adapter there"
    assert "elsewhere" not in talk.model.adapters
    assert talk.own.add_image("a.png") == "images are not supported for this model"


def test_images_are_of_the_next_turn(talk, monkeypatch):
    talk.own._image_files = "files"
    image = SimpleNamespace(measured=lambda: SimpleNamespace(width=3, height=4))
    monkeypatch.setattr(chat, "image_source", lambda *given: image)
    assert talk.own.add_image("a.png") == "3 x 4 pixels, for the next turn"
    talk.own.answer("what is it?")
    talk.own.answer("and now?")
    content = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "what is it?"}]
    assert talk.prompt.asked[0][-1]["content"] == content
    assert talk.prompt.asked[1][-1]["content"] == "and now?"

    def fails(*given):
        raise DataError("no image")

    monkeypatch.setattr(chat, "image_source", fails)
    assert talk.own.add_image("a.png") == "no image" and not talk.own._next_images


class Stdin(io.StringIO):
    """An input that may be a terminal, and may fail."""

    def __init__(self, text="", *, terminal=False, error=None):
        super().__init__(text)
        self.terminal, self.error = terminal, error

    def isatty(self):
        return self.terminal

    def readline(self):
        if self.error is not None:
            raise self.error
        return super().readline()


@pytest.mark.parametrize(("stdin", "line"), [
    (Stdin("a b \n"), "a b"), (Stdin("\n"), ""), (Stdin(""), None), (Stdin("a"), "a"),
    (Stdin(terminal=True), "typed"), (Stdin(error=KeyboardInterrupt()), None),
    (Stdin(error=EOFError()), None),
])  # fmt: skip
def test_a_line_of_input(monkeypatch, stdin, line):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert chat._read(SimpleNamespace(input=lambda prompt: " typed ")) == line


def test_input_of_another_encoding(monkeypatch):
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")
    monkeypatch.setattr(sys, "stdin", Stdin(error=error))
    with pytest.raises(DataError, match="the input is not valid utf-8"):
        chat._read(None)


# ---- other commands ------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "given"), [
    ({"text": "a"}, "a"), ({"messages": ["m"], "text": "a"}, ["m"]),
    ({"messages": [], "text": "a"}, "a"), ({"text": ""}, None), ({}, None),
])  # fmt: skip
def test_what_is_classified_of_a_row(row, given):
    if given is not None:
        assert classify._input("row 1", row) == given
        return
    with pytest.raises(DataError, match="row 1: a row must have 'text' or 'messages'"):
        classify._input("row 1", row)


@pytest.mark.parametrize(("text", "found"), [
    ("", ()), ("8", (8,)), ("1,8, 8,4", (1, 8, 4)), ("2", (2,)), ("100", (100,)),
])  # fmt: skip
def test_lists_of_numbers(text, found):
    assert positive_integers("--lengths", text, 100) == found
    assert web._lengths("--lengths", text) == found


@pytest.mark.parametrize("text", ["1", "1,1"])
def test_a_row_of_one_token_is_no_length(text):
    with pytest.raises(ConfigError, match="--lengths must include 2 or more"):
        web._lengths("--lengths", text)


@pytest.mark.parametrize(("text", "says"), [
    ("0", "must be a positive integer, got"), ("a", "must be a positive integer"),
    ("-1", "must be a positive integer"), ("101", "must be at most 100, got 101"),
    ("1,,2", "must be a positive integer"),
])  # fmt: skip
def test_what_is_no_list_of_numbers(text, says):
    with pytest.raises(ConfigError, match=f"--lengths {says}"):
        positive_integers("--lengths", text, 100)


def test_one_of_several_names():
    kind, option = one_of("a", "b"), click.Option(["--kind"])
    assert kind.name == "a|b" and kind.convert("b", option, None) == "b"
    with pytest.raises(ConfigError, match="--kind must be a or b, got 'c'"):
        kind.convert("c", option, None)


@pytest.mark.parametrize(("files", "content"), [
    ((), "a"), (("x.png",), [{"type": "image", "path": "x.png"}, {"type": "text", "text": "a"}]),
])  # fmt: skip
def test_the_content_of_a_message(files, content):
    assert _opening.with_images("a", files) == content


def test_chats_need_a_template(monkeypatch):
    monkeypatch.setattr(_opening, "suitable_template", lambda tokenizer: "chatml")
    for kind, template in (("text", None), ("chat", "a template")):
        prompt = PromptFormat(kind, None, template)
        assert _opening.require_template(prompt) is prompt
    with pytest.raises(TokenizerError, match=r"no chat template: .*\(chatml fits its tokenizer\)"):
        _opening.require_template(PromptFormat("chat", None, None))


def test_the_format_that_is_asked_for(monkeypatch):
    own = PromptFormat("alpaca", "tokenizer", None)
    monkeypatch.setattr(_opening, "prompt_for", lambda source, adapter: own)
    monkeypatch.setattr(
        _opening, "find_chat_template", lambda name, tokenizer: f"{name} of {tokenizer}"
    )
    assert _opening.prompt_format(None, "a", None) is own
    made = _opening.prompt_format(None, "a", "chatml")
    assert (made.kind, made.tokenizer, made.template) == (
        "chat",
        "tokenizer",
        "chatml of tokenizer",
    )


@pytest.mark.parametrize(("in_run", "writable"), [(True, True), (True, False), (False, True)])
def test_a_path_in_a_run_s_folder(monkeypatch, in_run, writable):
    monkeypatch.setattr(exporting, "find_run", lambda adapter: "run" if in_run else None)
    monkeypatch.setattr(exporting, "run_around", lambda adapter: adapter.parent)
    monkeypatch.setattr(exporting.os, "access", lambda path, how: writable)
    if in_run and writable:
        assert exporting.path_in_run("runs/a/adapter", "merged", "--out") == "runs/a/merged"
        return
    says = (
        "runs/a cannot be written: set another path with --out" if in_run else "--out is required"
    )
    with pytest.raises(ConfigError, match=says):
        exporting.path_in_run("runs/a/adapter", "merged", "--out")
