"""Templates by name: the families' own tokens, exact masks, and which one a tokenizer gets."""

from __future__ import annotations

import random
import re

import pytest
import tokenizers
from support.recorded import RECORDED, needs_recordings
from support.spans import assistant_spans, last_turn_spans
from support.tiny_tokenizer import tiny_backend, tiny_tokenizer
from tokenizers import AddedToken, pre_tokenizers

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data import (
    ChatTemplate,
    PromptFormat,
    Tokenizer,
    find_chat_template,
    suitable_template,
)
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES, end_of_turn, is_built_in
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.errors import DataError, TokenizerError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM, USER = {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi there"}
ANSWER, MORE = {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}
CHATS = {
    "asked": [USER],
    "answered": [USER, ANSWER],
    "with system": [SYSTEM, USER, ANSWER],
    "asked again": [SYSTEM, USER, ANSWER, MORE],
    "spaces": [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": " 4 \n"}],
    "twice": [USER, ANSWER, MORE, {"role": "assistant", "content": "6"}],
    "long": [SYSTEM, USER, ANSWER, MORE, {"role": "assistant", "content": "6,\nI think."}],
}
NAMES = sorted(BUILT_IN_TEMPLATES)


def own(name: str) -> ChatTemplate:
    return ChatTemplate(BUILT_IN_TEMPLATES[name], SPECIAL)


# Only what the family's own template leaves to chance is not compared: a system message of its
# own (Qwen 2.5), an empty thought (Qwen 3), a system message that it drops (Mistral) or refuses.
@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(
    ("name", "real", "chats"),
    [
        ("llama3", "llama3", CHATS),
        ("gemma", "gemma", ["asked", "answered", "spaces"]),
        ("gemma", "gemma3", CHATS),
        ("phi", "phi3", CHATS),
        ("phi", "phi3_5", CHATS),
        ("mistral", "mistral_v03_hf", ["asked", "answered", "spaces", "twice"]),
        ("mistral", "mistral_common_v3_spm", sorted(set(CHATS) - {"spaces"})),
        ("zephyr", "tinyllama", CHATS),
        ("chatml", "qwen2_5", ["with system", "asked again", "long"]),
        ("chatml", "qwen3", ["asked", "asked again"]),
    ],
)
def test_a_family_s_own_template_writes_the_same(name, real, chats) -> None:
    source = (RECORDED / "chat_templates" / f"{real}.jinja").read_text()
    template = ChatTemplate(source, SPECIAL)
    for chat in map(CHATS.get, chats):
        for prompt in (False, True):
            assert own(name).render(chat, prompt).text == template.render(chat, prompt).text
        text, spans = assistant_spans(template, chat, None, "</s>")
        assert chosen(text, spans) == chosen(text, assistant_spans(own(name), chat)[1])


@pytest.mark.parametrize(
    ("name", "text"),
    {  # as the models' authors publish them
        "llama2": "<s>[INST] <<SYS>>\nBe terse.\n<</SYS>>\n\nHi there [/INST] 4 </s>"
        "<s>[INST] And 3 + 3? [/INST]",
        "phi4": "<|im_start|>system<|im_sep|>Be terse.<|im_end|><|im_start|>user<|im_sep|>Hi there"
        "<|im_end|><|im_start|>assistant<|im_sep|>4<|im_end|><|im_start|>user<|im_sep|>And 3 + 3?"
        "<|im_end|><|im_start|>assistant<|im_sep|>",
        "granite": "<|start_of_role|>system<|end_of_role|>Be terse.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hi there<|end_of_text|>\n<|start_of_role|>assistant"
        "<|end_of_role|>4<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>And 3 + 3?"
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "command-r": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be terse.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi there<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>4<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>And 3 + 3?"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "plain": "<s>System:\nBe terse.</s>\nUser:\nHi there</s>\nAssistant:\n4</s>\nUser:\n"
        "And 3 + 3?</s>\nAssistant:\n",
        "alpaca": "<s>Be terse.\n\n### Instruction:\nHi there\n\n### Response:\n4</s>\n\n"
        "### Instruction:\nAnd 3 + 3?\n\n### Response:\n",
    }.items(),
)
def test_what_is_written(name, text) -> None:
    assert own(name).render(CHATS["asked again"], add_generation_prompt=True).text == text


def chosen(text, spans) -> set[int]:
    """The characters in the spans.

    Without marks, the space before an answer is not found where a system message moves (Mistral).
    """
    moves = "[INST] " in text and ("Be terse." in text or "S\n\n" in text)
    return {i for a, b in spans for i in range(a, b) if not (moves and text[i].isspace())}


def random_chat(seed: int) -> list[dict[str, str]]:
    random.seed(seed)
    words = ["a", "4", "hi\n", " x", "</s>", "User:", "é", "\n\n", "a b  c"]
    roles = ["user", "assistant"] * random.randint(1, 4)
    chat = [{"role": "system", "content": "S"}] if random.random() < 0.5 else []
    said = ("".join(random.choices(words, k=random.randint(1, 5))) + "." for _ in roles)
    return chat + [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_marks_are_where_turns_are_found_without_them(name) -> None:
    unmarked = re.sub(r"{%- (end)?generation -%}", "", BUILT_IN_TEMPLATES[name])
    assert own(name).marks_assistant
    template = ChatTemplate(unmarked, SPECIAL)
    assert not template.marks_assistant
    for chat in [CHATS["answered"], CHATS["long"], *map(random_chat, range(8))]:
        for find in (assistant_spans, last_turn_spans):
            text, spans = find(own(name), chat)
            assert chosen(text, spans) == chosen(*find(template, chat, None, "</s>"))
            said = [m["content"].strip() for m in chat if m["role"] == "assistant"]
            said = said if find is assistant_spans else said[-1:]
            assert len(spans) == len(said)
            for (begin, end), words in zip(spans, said, strict=True):
                assert words in text[begin:end]


@pytest.mark.parametrize("name", NAMES)
def test_content_in_parts_is_content(name) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi "}]}, ANSWER]
    parts[0]["content"].append({"type": "text", "text": "there"})
    assert own(name).render(parts).text == own(name).render([USER, ANSWER]).text


@pytest.mark.parametrize("name", ["gemma", "mistral", "llama2", "command-r", "alpaca"])
def test_a_role_that_a_template_has_not_is_refused(name) -> None:
    role = "tool" if name == "command-r" else "system"
    with pytest.raises(DataError, match="refuses this conversation"):
        own(name).render([USER, {"role": role, "content": "x"}])


def test_the_names_of_the_settings_are_those_of_the_files() -> None:
    assert set(BUILT_IN_CHAT_TEMPLATES) == set(BUILT_IN_TEMPLATES)
    assert all(map(is_built_in, BUILT_IN_TEMPLATES.values()))
    assert not is_built_in("{{ messages }}")


@pytest.mark.parametrize("bos", [True, False])
def test_alpaca_is_the_prompt_of_alpaca_s_rows(bos) -> None:
    tok = tiny_tokenizer(bos)
    template = find_chat_template("alpaca", tok)
    row = {"instruction": "Add.", "output": "4"}
    encoded = RowEncoder(tok, None).encode(row, "instruction/output")
    chat = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "4"}]
    rendered = template.render(chat)
    assert tok.encode(rendered.text, add_special_tokens=False) == encoded.ids
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["4</s>"]
    assert is_built_in(template.source)


@pytest.mark.parametrize("bos", [True, False])
def test_plain_begins_as_the_tokenizer_begins(bos) -> None:
    tok = tiny_tokenizer(bos)
    template = find_chat_template("plain", tok)
    text = template.render([USER, ANSWER]).text
    assert text.startswith("<s>User:") == bos
    assert end_of_turn(template, tok) == tok.eos_token_id


@pytest.mark.parametrize("name", ["plain", "alpaca"])
def test_an_end_token_that_is_one_after_a_space_only(name) -> None:
    """As in TinyStories' tokenizer: the normalizer makes words of what the token is looked for."""
    vocab = {letter: i for i, letter in enumerate(["<unk>", "_", "a"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("_"), tokenizers.normalizers.Replace(" ", "_")]
    )
    backend.add_special_tokens([AddedToken("</s>", normalized=True)])
    tok = Tokenizer(backend, {"eos_token": "</s>", "unk_token": "<unk>"})
    assert tok.eos_token_id not in tok.encode("a</s>", False)
    template = find_chat_template(name, tok)
    assert tok.eos_token_id in tok.encode(template.render([USER, ANSWER]).text, False)
    assert is_built_in(template.source)


# --- the choice


def with_tokens(*tokens: str, special: bool = True, eos: str = "</s>") -> Tokenizer:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    )
    backend.add_tokens([AddedToken(t, special=special) for t in ("<s>", "</s>", *tokens)])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": eos})


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("chatml", ["<|im_start|>", "<|im_end|>"]),
        ("llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
        ("gemma", ["<start_of_turn>", "<end_of_turn>"]),
        ("mistral", ["[INST]", "[/INST]"]),
        ("phi", ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]),
        ("phi4", ["<|im_start|>", "<|im_sep|>", "<|im_end|>"]),
        ("granite", ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"]),
        ("plain", []),
        ("plain", ["<|im_start|>"]),
    ],
)
def test_the_template_that_fits_a_tokenizer(name, tokens) -> None:
    assert suitable_template(with_tokens(*tokens)) == name


def test_an_end_of_turn_that_is_no_special_token_is_none() -> None:
    assert suitable_template(with_tokens("<|im_start|>", "<|im_end|>", special=False)) == "plain"


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("tokenizers/smollm", "chatml"),
        ("tokenizers/qwen3", "chatml"),
        ("tokenizers/tinyllama", "plain"),
        ("models/TinyStories-656K", "plain"),
        ("models/stories260K-hf", "plain"),
    ],
)
def test_real_tokenizers(folder, name) -> None:
    assert suitable_template(Tokenizer.from_folder(RECORDED / folder)) == name


def test_the_tiny_tokenizer_knows_chatml() -> None:
    assert suitable_template(Tokenizer(tiny_backend(), {"eos_token": "</s>"})) == "chatml"


CHAT = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model."},
]


@pytest.mark.parametrize("name", sorted(BUILT_IN_TEMPLATES))
def test_an_answer_s_prompt_has_the_tokens_that_rows_have(name):
    """Where white space before a word has other tokens than at the end of a text, too."""
    backend = tiny_backend(bos=False, merges=(("Ċ", "Ċ"),))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = Tokenizer(backend, {"eos_token": "</s>", "bos_token": "<s>"})
    assert tokenizer.encode("a\n\n")[-1] != tokenizer.encode("a\n\nA")[-2]
    template = find_chat_template(name, tokenizer)
    row = RowEncoder(tokenizer, template).encode({"messages": CHAT}, "messages")
    prompt = PromptFormat("chat", tokenizer, template).ids(CHAT[:1])
    assert row.ids[: len(prompt)] == prompt and row.labels[len(prompt)] == row.ids[len(prompt)]


@pytest.mark.parametrize("kind", ["chat", "alpaca"])
def test_a_prompt_becomes_tokens_once(monkeypatch, kind):
    tokenizer, texts = tiny_tokenizer(), []
    _ = tokenizer.added_around  # which is asked once, by texts of its own
    template = find_chat_template("chatml", tokenizer)
    written = PromptFormat("chat", tokenizer, template)
    if kind == "alpaca":
        written = PromptFormat.alpaca(tokenizer)
    encode = Tokenizer.encode_with_offsets
    monkeypatch.setattr(
        Tokenizer, "encode_with_offsets", lambda *args: texts.append(args[1]) or encode(*args)
    )
    ids = written.ids(CHAT[:1])
    assert len(texts) == 1 and texts[0].startswith(tokenizer.decode(ids, kind == "alpaca"))


@pytest.mark.parametrize("end", ["once ", "once", "\n\n", "\n", ""])
def test_an_answer_s_first_token_may_hold_the_end_of_a_prompt(end):
    """Whose tokens are then those that it has alone."""
    backend = tiny_backend(merges=(("Ċ", "Ċ"), ("Ġ", "A"), ("e", "A"), ("Ċ", "A")))
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"})
    template = find_chat_template("in {{ messages[0].content }}", tokenizer)
    prompt = PromptFormat("chat", tokenizer, template).ids([{"role": "user", "content": end}])
    assert prompt == tokenizer.encode(f"in {end}", False)


@pytest.mark.parametrize("kind", ["chat", "alpaca", "text"])
def test_a_prompt_of_megabytes_is_refused_before_it_becomes_tokens(monkeypatch, kind):
    tokenizer = tiny_tokenizer()
    written = PromptFormat("chat", tokenizer, find_chat_template("chatml", tokenizer))
    if kind != "chat":
        written = getattr(PromptFormat, kind)(tokenizer)
    monkeypatch.setattr(Tokenizer, "encode_with_offsets", None)
    monkeypatch.setattr("qlora_wgpu.data.ChatTemplate.render", None)  # stopped where it is larger
    said = [{"role": "user", "content": "é" * (3 << 18) + "!"}]
    with pytest.raises(DataError, match=r"^the prompt has 1,57.,... bytes .* more than 1,572,864"):
        written.ids(said)


def test_a_name_that_no_template_has():
    known = "use a .jinja file, the template itself, or one of chatml, llama2"
    with pytest.raises(TokenizerError, match=f"the chat template chatlm does not exist: {known}"):
        find_chat_template("chatlm", tiny_tokenizer())
