"""Files and rows as nobody means them, and templates that show what becomes of odd values."""

import json

from data.test_chat_turns import CHAT, ELSEWHERE, FORGETS, RETURNS, THINKS
from references.chat_masks import OTHERS
from references.conversations import CONVERSATIONS

from qlora_wgpu.limits import MAX_LINE

HEAD = "{{ '<|' + m.role + '|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    + HEAD
    + "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}" + PROMPT
)
THOUGHTS = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m.thinking %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}"
    + "{{ m.content + '</s>\n' }}{% endfor %}"
    + PROMPT.replace("\n'", "\n<think></think>'")
)
WRITES = (
    "{% for m in messages %}" + HEAD + "{{ m.x }}{{ m.content }}{{ '</s>\n' }}{% endfor %}" + PROMPT
)
PASSAGES = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ '|' }}"
    "{% generation %}{{ '</s>' }}{% endgeneration %}{% else %}{{ m.content + '|</s>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}" + PROMPT
)
LEAVES_OUT = (
    "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# What templates want of messages: contents in parts, arguments as text, and the role developer.
PARTS = (
    "{% for m in messages %}" + HEAD + "{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}" + PROMPT
)
TEXTS = (
    "{% for m in messages %}" + HEAD + "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<call>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}" + PROMPT
)
DEVELOPER = WRITES.replace("m.x", "'!' if m.role == 'developer' else ''")
# MarkupSafe escapes what is added to a text that is safe; the answer's header differs by an option.
SAFE = TEXTS.replace("c.function.arguments }}", "(c.function.arguments | tojson | safe) }}")
# Of an object it asks what the page does not know, so that text in its place would be another row.
SWAPS = TEXTS.replace(
    "c.function.arguments }}",
    "(c.function.arguments if c.function.arguments is string else 'x'.swapcase()) }}",
)
OPTION = PASSAGES.replace("{{ '|' }}", "{{ '!' if loud else '|' }}")
# Turns that stand in pieces, and one that begins behind what is no header of its own.
PIECES = (
    "{% for m in messages if m.role != 'tool' %}" + HEAD + "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}"
    "{{ '<result>' + messages[loop.index0 + 2].content + '</result>' }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}" + PROMPT.replace("\n'", "\n<think>'")
)


def line(row):
    return json.dumps(row, ensure_ascii=False) + "\n"


def chat(**answer):
    turns = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The fox", **answer},
    ]
    return line({"messages": turns})


def called(arguments, **row):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = [{"role": "tool", "content": "o"}, {"role": "assistant", "content": "The fox"}]
    return line({"messages": [{"role": "user", "content": "Who?"}, asked, *answered], **row})


def nested(depth):
    return f'{{"text": "a", "x": {"[" * depth}{"]" * depth}}}'


def pair(label, completion="The fox"):
    return line({"prompt": "Who? ", "completion": completion, "label": label})


TWICE = [
    {"role": role, "content": text}
    for role, text in (("user", "Who?"), ("assistant", "A fox"), ("user", "And?"))
]


def marked(**marks):
    """A conversation whose first answer says something of itself, and not the last."""
    turns = [*TWICE, {"role": "assistant", "content": "A dog"}]
    turns[1] = {**turns[1], **marks}
    return line({"messages": turns})


def asked(*marks):
    """A conversation in which each message says something of itself."""
    turns = [*TWICE, {"role": "assistant", "content": "A dog"}]
    return line({"messages": [m | each for m, each in zip(turns, marks, strict=True)]})


def told(*marks):
    """The same as turns."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [*TWICE, {"role": "assistant", "content": "A dog"}]
    given = [
        {"from": names[m["role"]], "value": m["content"], **each}
        for m, each in zip(turns, marks, strict=True)
    ]
    return line({"conversations": given})


NOT, YES = {"train": False}, {"train": True}
MARKED = [
    *(asked({}, first, {}, last) for first in (NOT, YES) for last in (NOT, YES)),
    *(told({}, first, {}, last) + told({}, {}, {}, {}) for first in (NOT, YES) for last in (NOT,)),
    asked(YES, NOT, {"training": True}, {"weight": 0}) + asked({}, {}, {}, {}),
    told(YES, NOT, {"training": 1}, {"weight": 0}),
    asked({"weight": 1}, {}, {"weight": 0, "train": True}, {}),
    asked({}, NOT, {}, NOT) + asked({}, {}, {}, {}),
]
SYSTEMS = [
    line({"messages": [{"role": "system", "content": "Be", **mark}, *TWICE, *TWICE[1:2]]})
    for mark in (YES, NOT)
]
FILES = {
    "marked.jsonl": [
        *SYSTEMS,
        *MARKED,
        *(
            marked(**marks)
            for marks in (
                {"weight": 0.5},
                {"weight": 2},
                {"weight": "0"},
                {"weight": [0]},
                {"weight": True},
                {"train": "false"},
                {"train": 0.0},
                {"training": 1.0},
                {"training": 1.5},
                {"train_detail": [{"train": False}]},
                {"train_detail": []},
                {"train_detail": None},
                {"train": False, "train_detail": [{"train": True}]},
            )
        ),
        told({}, {"weight": 0.5}, {}, {}),
        line({"messages": [{"role": "assistant", "content": " ", "weight": 1}]}) + marked(),
        line({"prompt": [{**m, "train": True} for m in TWICE], "completion": TWICE[1:2]}),
        line({"prompt": TWICE, "completion": [{"role": "assistant", "content": "A", "train": 2}]}),
        marked(weight=0),
        marked(weight=0.0) + marked(),
        marked(weight=1),
        marked(weight=None, train=None),
        marked(train=False),
        marked(training=False),
        marked(training=True),
        line({"prompt": TWICE, "completion": [{"role": "assistant", "content": "A", "weight": 0}]}),
        line({"prompt": [{**m, "weight": 0} for m in TWICE], "completion": TWICE[1:2]}),
    ],
    "systems.jsonl": [
        chat().replace('{"messages"', '{"system": "Be brief.", "messages"'),
        chat().replace('{"messages"', '{"system": " ", "messages"'),
        chat()
        .replace('"role": "user"', '"role": "developer"')
        .replace('{"messages"', '{"system": "Be brief.", "messages"'),
        line({"system": "Be brief.", "prompt": TWICE, "completion": TWICE[1:2]}),
        line({"system": "Be brief.", "prompt": [], "completion": TWICE[:2]}),
        line({"system": "Be brief.", "messages": [{"role": "user", "content": " "}]}),
    ],
    "labels.jsonl": [
        *(pair(label) + pair(label) for label in (True, False, "False", " false\n", "no", 0, None)),
        pair(True) + pair(False, " "),
        line({"text": "a", "label": False}),
        chat().replace('{"messages"', '{"label": false, "messages"'),
    ],
    "marks.jsonl": [
        "\ufeff" + chat(),
        chat() + "\ufeff" + chat(),
        chat() + "\ufeff\n",
        "\ufeff\ufeff" + chat(),
    ],
    "ends.jsonl": [
        chat().replace("\n", "\r\n") * 2,
        chat().replace("\n", "\r") * 2,
        "\n \n\t" + chat(),
    ],
    "spaces.jsonl": [
        *(
            chat() + space + "\n" + chat()
            for space in "\x0b\x1c\x1f\x85\xa0\u2028\u3000\u180e\u200b\x00"
        ),
        *(
            line({"text": space}) + line({"text": f"{space}b{space}"})
            for space in "\x1c\x85\u2028\u3000\ufeff"
        ),
    ],
    "strict.jsonl": [
        *(
            f'{{"text": "a", "x": {value}}}'
            for value in ("NaN", "-Infinity", "1e999", "01", "1.", "-", "1" * 5000)
        ),
        '{"text": "a", "text": "b"}',
        r'{"text": "a", "\u0074ext": "b"}',
        '{"text": "a", "x": [{"k": 1, "k": 2}]}',
        r'{"text": "a", "x": "\ud83d"}',
        r'{"text": "a", "\ud83d": 1}',
        r'{"text": "\ud83d\udc4d \/\b"}',
        '{"text": "a\tb"}',
        r'{"text": "a\x"}',
        '{"text": "a",}',
        '{"text": "a"}{"text": "b"}',
        "{'text': 'a'}",
        '{"text": "a',
        r'{"text": "a\\"}',
        '{"__proto__": {"x": 1}, "text": "a"}',
        'null\n{"text": "a"}',
        '{"text" "a"}',
        nested(64),
        nested(65),
        nested(100_000),
        json.dumps({"text": "a", **{f"k{i}": 1 for i in range(4096)}}),
        line(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
                * 2049
            }
        ),
    ],
    "list.json": [
        '{"text": "a b"}',
        '{"text": "a"}{"text": "b"}',
        '{\n"text": "a"\n}\n{\n"text": "b"}\n',
        '{"text": "a"} 5',
        '[{"text": "a"}] x',
        '[{"text": "a"},]',
        '[{"text": "a"}, {"text": "b"',
        '[[{"text": "a"}]]',
        "null",
        '{"rows": [{"text": "a"}]}',
        '{"text": ["a"]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "[{}]",
        '\ufeff [{"text": "a"}, {}, {"text": ""}]',
        '\xa0[{"text": "a"}]',
        '[{"text": "a", "text": "b"}]',
    ],
    "rows.csv": [
        "prompt,completion\r\na,b\r\n",
        "prompt,completion\ra,b\r",
        '\ufeff"prompt","completion"\na,b\n',
        'prompt,completion\n"a\r\nb","c\rd\n"\n',
        "prompt,completion\n,\na,b\n",
        'prompt,completion\n"a"x,b\n',
        "prompt,completion\na\u2028x,b\x85y\x0bz\x1cv\n",
        "text,text\na,b\n",
        'text\n\n""\nab\n  \n',
        "\ntext\nab\n",
        *(
            "\n".join([",".join(f"k{i}" for i in range(n)) + ",text", "," * n + "ab"])
            for n in (4095, 4096)
        ),
        'messages\n"[{""role"":""user"",""role"":""assistant"",""content"":""a""}]"\n',
        'messages,tools\n"\u3000[{""role"":""assistant"",""content"":""b""}]","[{""name"":""f""}]"\n',
        'messages,tools\n"[{""role"":""assistant"",""content"":""b""}]","{""name"":""f""}"\n',
    ],
    "canonical.jsonl": [
        chat(tool_calls=None, name=None),
        line({"messages": TWICE[:2], "tools": ""}),
        *(line({"messages": TWICE[:2], "images": images}) for images in ([], ["a.png"])),
        *(line({"text": "ab", "weights": mask}) for mask in ([1, 0], [], [[1]], "[1, 0]", 1)),
        *(line({"text": "ab", "labels": labels}) for labels in ([27, 3], [-100, 5])),
        line({"messages": TWICE[:2], "tools": "null"}),
        line({"messages": TWICE[:2], "chat_template_kwargs": {"messages": []}}),
        line({"messages": TWICE[:2], "chat_template_kwargs": "x"}),
        line({"messages": TWICE[:2], "chat_template_kwargs": None}),
        line({"messages": None, "text": None}) + chat(),
        line({"messages": [{"role": "developer", "content": "Be"}, *TWICE[:2]]}),
        line({"messages": [TWICE[1], *TWICE[:2]]}),
        chat(content="<think>\nHm\n</think>\n\nThe fox"),
        chat(content=None, reasoning_content="Hm"),
        chat(content=5),
        chat(tool_calls={}),
        chat(tool_calls=[{"function": None}]),
        chat(function_call={}),
        chat(function_call=[]),
        line({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]})
        + line({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        line({"prompt": None, "completion": None, "x": 1}) + pair(True),
        line({"messages": [{**TWICE[0], "function": 1}, {"role": "assistant"}]}),
    ],
    "chats.jsonl": [
        line({"messages": [{"role": "system", "content": "Be"}]}) * 2,
        line({"messages": [{"role": "system", "content": "Be"}]}) + chat(),
        chat(content=""),
        chat(content=None),
        chat(role="Assistant"),
        chat(content=[{"type": "text", "text": "x"}]),
        chat(content=[{"type": "image"}]),
        line({"conversations": [{"from": "GPT", "value": "a"}], "system": "\x1f"}),
        chat(weight=0.0),
        line({"conversations": [{"from": "function_call", "value": '{"name": "f", "name": "g"}'}]}),
        line({"instruction": "a", "output": "b", "history": {}}),
        line({"prompt": "a", "completion": None}),
    ],
}
CALL = {"name": "f", "arguments": {"x": "y"}}
CALLED = [
    *(called({"x": value}) for value in ("<a> & 'b'", {"b": ["y", 7, 1.5, None]}, 2, "'", "")),
    called('{"x": "y", "n": null}'),
    called("x"),
    called(None),
    chat(function_call={"name": "f", "arguments": '{"x": "y"}'}, content=None),
    chat(function_call='{"name": "f", "arguments": null, "parameters": {"x": "y"}}'),
    chat(tool_calls=[{"id": "1", **CALL}, {"name": "f", "parameters": {"x": "z"}}]),
    chat(tool_calls=json.dumps([CALL])),
    line({"messages": [TWICE[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]}),
    line({"messages": [*TWICE[:2], {"role": "function", "name": "f", "content": "o"}]}),
]
CHATS = [
    line({"messages": messages} | ({"tools": tools} if tools else {}))
    for messages, tools in CONVERSATIONS.values()
]
LONG_CHAT = line(
    {
        "messages": [
            {"role": role, "content": f"{role} {number}", **more}
            for number in range(24)
            for role, more in (("user", {}), ("assistant", {"reasoning_content": "Hm"}))
        ]
    }
)


# By template: what it makes of thoughts, calls and values that have notations of their own.
TEMPLATES = {
    CALLS: [
        *(
            called({"x": value})
            for value in ("y", 5, 1.5, True, None, [], ["é\u2028<>'\"\\\x7f"], {"b": "y", "c": 1})
        ),
        *(
            called({"x": "y"}, tools=tools)
            for tools in ([], [{"name": "é"}], '[{"name": "f"}]', "f", ["f"], {"n": 1})
        ),
        called({}),
        called('{"x": "y"}'),
        *CALLED,
        *CHATS,
    ],
    PARTS: [chat(), chat(content=[{"type": "text", "text": part} for part in "ab"])],
    TEXTS: CALLED + CHATS,
    SAFE: CALLED,
    PIECES: CALLED + CHATS,
    DEVELOPER: [
        line({"messages": [{"role": "developer", "content": "Be"}, *TWICE[:2]]}),
        line({"messages": [{"role": "system", "content": "Be"}, *TWICE[:2]]}),
    ],
    OPTION: [
        line({"messages": TWICE[:2], "chat_template_kwargs": {"loud": loud}}) * 2 + chat()
        for loud in (True, False, None)
    ],
    THOUGHTS: [
        *(chat(), chat(thinking="Hm"), chat(reasoning="Hm"), chat(thinking="Hm") * 2, LONG_CHAT),
        *CHATS,
    ],
    WRITES: [chat(x="y"), chat(x=True), chat(x=None), chat(x=[]), chat(x=3), chat(x=0.5)],
    **{template: [line({"messages": CHAT})] for template in (RETURNS, THINKS)},
    FORGETS: [line({"messages": CHAT}), LONG_CHAT, *CHATS],
    ELSEWHERE: [chat(), chat(reasoning_content="because")],
    PASSAGES: MARKED,
    "llama2": SYSTEMS,
    WRITES.replace("m.x", "m.weight"): [marked(weight=0), marked(weight=0.5)],
    PASSAGES.replace("m.role == 'assistant'", "m.weight == 3"): [
        marked(weight=0),
        marked(weight=3),
        marked(weight=3) + marked(weight="x"),
    ],
    WRITES.replace("m.x", "m.x | tojson"): [chat(x="y"), chat()],
    LEAVES_OUT: [
        *SYSTEMS,
        chat(),
        line(
            {
                "messages": [
                    {"role": "system", "content": "Be"},
                    {"role": "assistant", "content": "I"},
                ]
            }
        ),
    ],
    "chatml": [chat(), chat(content="The quick fox " * 20), LONG_CHAT, *CALLED, *CHATS],
    "llama3": CALLED + CHATS,
    "gemma": CALLED + CHATS,
}
# A tokenizer's own templates: the second is that of conversations with tools.
OF_TOKENIZER = (WRITES.replace("m.x", "''"), CALLS.replace("<call>", "<called>"))
# What Python alone writes as it is: its own notations, and keys in any order.
OTHERWISE = [
    *((CALLS, called({"x": value})) for value in (1.0, 1e20, 1e-7, -0.0, 12345678901234567890)),
    (CALLS, called({"b": "y", "2": "z", "1": "w"})),
    (CALLS, called({"x": "y"}, tools=[{"name": "f", "most": 2.0}])),
    (SWAPS, called({"x": "y"})),
    (WRITES, chat(x=["a"])),
    (WRITES, chat(x={"a": 1})),
]
DOCUMENTS = [
    "Once again " + "The quick fox\n jumps\n" * 80_000,  # cut where a line ends, before a word
    "schöner Tag " * 130_000,  # at a space
    "schönerTag" * 150_000,  # anywhere
    "\ufeffThe fox\r\n",
    "\u3000\x1c\n",
]
CUTS = [("keep_start", 24), ("keep_end", 24), ("drop", 24), ("error", 24), ("keep_start", 1)]
LONG = line({"prompt": "The quick " * 20, "completion": "fox"})


def cases():
    """Each file's name, its text, the template, how rows are cut and their longest length."""
    plain = ("keep_start", 512)
    for name, texts in FILES.items():
        yield from ((name, text, "chatml", *plain) for text in texts)
    for template, texts in TEMPLATES.items():
        yield from (("rows.jsonl", text, template, *plain) for text in texts)
    yield from (("rows.jsonl", text, None, *plain) for text in CHATS[:12])
    for source in (path.read_text() for path in sorted(OTHERS.glob("*.jinja"))):
        if "strftime_now" not in source:  # templates of models, where they can be had
            yield from (("rows.jsonl", text, source, *plain) for text in CHATS)
    yield from (("rows.jsonl", text, template, *plain) for template, text in OTHERWISE)
    yield from (
        ("rows.jsonl", LONG + row, "chatml", *cut) for cut in CUTS for row in (LONG, "", chat())
    )
    yield from (("text.txt", text, "chatml", *plain) for text in DOCUMENTS)
    yield "bytes.txt", DOCUMENTS[1], "chatml", *plain


def of_length(begin, filling, end, size):
    """A text in parts, of so many characters or bytes, filled by what takes one or more."""
    fill, width = filling
    count, rest = divmod(size - len(begin) - len(end), width)
    return [[begin, 1], [fill, count], ["x", rest], [end, 1]]


def long_cases():
    """Rows as long as one may be, and a little longer: bytes of lines, else characters."""
    row = ('{"text": "a b", "x": "', '"}')
    for size in (MAX_LINE, MAX_LINE + 1):
        for filling in (("x", 1), ("é", 2)):
            line = of_length(row[0], filling, row[1] + "\n", size)
            yield "rows.jsonl", [*line, ['{"text": "the last"}', 1]]
        for fill in "x\U0001f44d":
            item = of_length(*row[:1], (fill, 1), row[1], size)
            yield "rows.json", [["[", 1], *item, ["]", 1]]
            yield "rows.json", [*item, ["\n", 1], *item]
            record = of_length('"a ""b""","', (fill, 1), '\r\n"\r\n', size)
            yield "rows.csv", [["text,x\r\n", 1], *record, ['"a","b"', 1]]
