"""Files become the tokens and labels in the page that they become in Python."""

import json
import random

import pytest
from support.tiny_tokenizer import SPECIAL, tiny_backend
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from qlora_wgpu import data
from qlora_wgpu.data import PromptFormat, find_chat_template, load_dataset
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES, end_of_turn
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import QLoRAError

CASES = 300
TEMPLATES = ["chatml", "llama3", "gemma", "zephyr", "phi", "alpaca"]
SAID = [{}, {}, {}, {"weight": 0}, {"weight": 1}, {"train": False}, {"train": True}]
TRAIN_ON = ["auto", "assistant", "last_turn", "completion", "all"]
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "12",
    "345",
    "schöner",
    "Tag",
    "naïve",
    "def",
    "f(x):",
    "return",
]
ODD = (
    *(
        "é",
        "e\u0301",
        "\ufb01",
        "\u2167",
        "日本語",
        "한국어",
        "\U0001f44d",
        "\U0001f469\u200d\U0001f467",
    ),
    *(
        "\u200b",
        "\xa0",
        "\u2028",
        "\x85",
        "\ufeff",
        "\x00",
        "\x1c",
        "½",
        "\u0130",
        "\t",
        "\n",
        "\r\n",
    ),
    *("\n\n", "<|im_end|>", "</s>", "<unk>", "\u2581", "\u0120"),
)
CORPUS = ["The quick brown fox jumps over the lazy dog: 12, 345.", "Ein schöner Tag!"] * 20


def toy(pre_tokenizer, normalizer=None, fuse_unk=False):
    """A small vocabulary without a token for each byte, so that much is unknown."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse_unk))
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def backends():
    """Tokenizers of all kinds that models have, and of some that they have not."""
    stripping = toy(None)
    stripping.add_special_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)])
    ended = tiny_backend()
    ended.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return {
        "ended": ended,
        "bytes": tiny_backend(merges=(("t", "h"), ("Ġ", "th"))),
        "spaces": toy(pre_tokenizers.Metaspace(prepend_scheme="first")),
        "joined": toy(pre_tokenizers.Metaspace(prepend_scheme="always"), fuse_unk=True),
        "bare": toy(None),
        "composed": toy(pre_tokenizers.Digits(individual_digits=True), normalizers.NFC()),
        "small": toy(
            pre_tokenizers.Whitespace(),
            normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()]),
        ),
        "prepended": toy(
            None,
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        ),
        "stripping": stripping,
    }


def text(random):
    parts = random.choices([*WORDS, random.choice(ODD)], k=random.randint(1, 9))
    return random.choice([" ", " ", "", "\n"]).join(parts) if random.random() < 0.93 else " "


def row(random, kind):
    if kind == "messages":
        turns = [{"role": "user", "content": text(random)} for _ in range(random.choice([1, 2, 3]))]
        answers = [{"role": "assistant", "content": text(random)} for _ in turns]
        pairs = [message for pair in zip(turns, answers, strict=True) for message in pair]
        if random.random() < 0.4:
            pairs = [message | random.choice(SAID) for message in pairs]
        if random.random() < 0.2:
            cut = random.randint(1, len(pairs))
            return {"prompt": pairs[:cut], "completion": pairs[cut:]}
        return {"messages": pairs}
    if kind == "conversations":
        return {
            "conversations": [
                {"from": "human", "value": text(random)},
                {"from": "gpt", "value": text(random), **random.choice(SAID)},
            ]
        }  # fmt: skip
    keys = {"pair": ("prompt", "completion"), "alpaca": ("instruction", "output", "input")}
    return {key: text(random) for key in keys.get(kind, ("text",))}


def file_of(random):
    """A file's name, and its text."""
    kind = random.choice(["messages"] * 4 + ["conversations", "pair", "alpaca", "text", "document"])
    if kind == "document":
        return "document.txt", "".join(text(random) + "\n" for _ in range(random.randint(0, 20)))
    rows = [row(random, kind) for _ in range(random.choice([1, 2, 4]))]
    rows = [rows[0], *(each for each in rows[1:] if each.keys() == rows[0].keys())]
    if kind in ("pair", "alpaca", "text") and random.random() < 0.4:
        quoted = [
            ",".join('"' + value.replace('"', '""') + '"' for value in each.values())
            for each in rows
        ]
        return "rows.csv", "\r\n".join([",".join(rows[0]), *quoted])
    if random.random() < 0.1:
        rows = [dict.fromkeys(rows[0]), *rows]  # of no value
    return "rows.jsonl", "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)


def in_python(path, tokenizer, how):
    try:
        found = load_dataset(path, tokenizer, how.max_seq_length, how=how, cache=False)
    except QLoRAError:
        return None
    counts = found.counts
    return {
        "examples": [[e.input_ids.tolist(), e.labels.tolist()] for e in found],
        "counts": {
            name: getattr(counts, name)
            for name in ("rows", "empty", "truncated", "dropped", "without_labels")
        },
        "notes": {
            "endless": any("no end-of-turn token is trained on" in each for each in found.warnings),
            "dropped": any("the chat template omits" in each for each in found.warnings),
            "unread": any("is ignored: only text is read" in each for each in found.warnings),
            "spared": any("only assistant turns with weight 0" in each for each in found.warnings),
            "bad": any("labelled false and trained on" in each for each in found.warnings),
        },
    }


def question(random):
    """The kind of a prompt, and a conversation that ends with a question."""
    roles = ["user", "assistant"] * random.choice([0, 0, 1, 2]) + ["user"]
    roles = ["system", *roles] if random.random() < 0.2 else roles
    messages = [{"role": role, "content": text(random)} for role in roles]
    return random.choice(["chat", "alpaca", "text"]), messages


def prompt_in_python(kind, messages, tokenizer, template):
    prompt = {
        "chat": PromptFormat("chat", tokenizer, template),
        "alpaca": PromptFormat.alpaca(tokenizer),
        "text": PromptFormat.text(tokenizer),
    }[kind]
    try:
        return prompt.ids(messages)
    except QLoRAError:
        return None


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_tokens_and_labels(browser, ask, tmp_path):
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    known = {name: data.Tokenizer(each, special) for name, each in backends().items()}
    given = {
        name: {
            "file": json.loads(each.to_str()), "special_tokens": special,
            "eos_ids": sorted(known[name].eos_token_ids),
        }
        for name, each in backends().items()
    }  # fmt: skip
    chance, cases, wanted, prompts = random.Random(1), [], [], []
    for _ in range(CASES):
        name, content = file_of(chance)
        columns = {}
        if name == "rows.jsonl" and chance.random() < 0.2:  # goes before what the keys make
            columns = {"text": "story"}
            rows = [
                {"story": text(chance), **json.loads(each)} for each in content.split("\n")[:-1]
            ]
            content = "".join(json.dumps(each) + "\n" for each in rows)
        tokenizer = chance.choice(sorted(known))
        template = find_chat_template(chance.choice(TEMPLATES), known[tokenizer])
        train_on = chance.choice(TRAIN_ON)
        how = PreprocessConfig(
            chance.choice([16, 48, 512]), template.source, train_on=train_on,
            truncation=chance.choice(["keep_start", "keep_end", "drop"]), columns=columns,
        )  # fmt: skip
        (tmp_path / name).write_bytes(content.encode())
        wanted.append(in_python(tmp_path / name, known[tokenizer], how))
        asked = question(chance)
        prompts.append(prompt_in_python(*asked, known[tokenizer], template))
        cases.append({
            "asked": asked,
            "tokenizer": tokenizer, "template": template.source, "special_tokens": special,
            "name": name, "text": content, "turn_end": end_of_turn(template, known[tokenizer]),
            "how": {
                "format": "auto", "columns": columns, "train_on": train_on,
                "truncation": how.truncation, "max_length": how.max_seq_length,
            },
        })  # fmt: skip
    task = {"tokenizers": given, "cases": cases, "alpaca": BUILT_IN_TEMPLATES["alpaca"]}
    answer = ask(browser, "data.html", task)[0]
    found = answer["found"]
    assert sum(each is not None for each in wanted) > CASES // 2
    for case, got, want in zip(cases, found, wanted, strict=True):
        if want is None:
            assert "told" in got, case
        else:
            assert got == want, case
    assert sum(each is not None for each in prompts) > CASES // 2
    for case, got, want in zip(cases, answer["prompts"], prompts, strict=True):
        assert got == want, case["asked"]
