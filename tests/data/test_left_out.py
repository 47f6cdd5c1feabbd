"""What a template leaves out is counted and named; a trained turn that is not there is refused."""

from __future__ import annotations

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.data import PreprocessConfig
from qlora_wgpu.data.dataset import encode_rows
from qlora_wgpu.errors import DataError

WRITES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = WRITES.replace("in messages %}", "in messages if m.role != 'system' %}")
ASKED = {"role": "user", "content": "Rome?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a town."}}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def warnings(rows, template=WRITES, **how):
    dataset = encode_rows(rows, tiny_tokenizer(), PreprocessConfig(256, template, **how))
    return [each for each in dataset.warnings if "omits" in each]


def row(*messages, **more):
    return {"messages": [ASKED, *messages], **more}


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        ([answer("<think>\nNorth of it.\n</think>\n\nSunny.")], None, "thoughts"),
        ([answer("Sunny.", reasoning_content="North of it.")], None, "thoughts"),
        ([answer("Let me look.", tool_calls=[CALL])], None, "tool calls"),
        ([answer("Sunny.")], [TOOL], "the tools"),
    ],
)
def test_what_is_left_out_is_named_with_the_first_row(messages, tools, what):
    whole = row(answer("Good."))
    told = warnings(
        [whole, row(*messages, tools=tools), row(*messages, tools=tools)],
    )
    assert told == [f"rows: the chat template omits {what} from 2 rows (rows[1], …)"]
    assert not warnings([whole])


def test_a_system_message_whose_words_are_elsewhere():
    system = {"role": "system", "content": "Rome?"}
    told = warnings([{"messages": [system, ASKED, answer("Good.")]}], NO_SYSTEM)
    assert told == ["rows: the chat template omits the system message from 1 row (rows[0])"]


def test_a_trained_turn_of_which_nothing_is_written_is_refused():
    lost = row(answer("", tool_calls=[CALL]))
    with pytest.raises(DataError, match=r"rows\[0\]: message 2 is trained on, but the chat"):
        warnings([lost])
    assert warnings([lost], train_on="all") == [
        "rows: the chat template omits tool calls from 1 row (rows[0])"
    ]
    spared = row(answer("", tool_calls=[CALL], train=False), answer("Good."))
    assert warnings([spared])


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_of_answers_that_are_compared_too(objective):
    pair = {"prompt": [ASKED], "chosen": [answer("Sunny.", reasoning_content="North.")],
            "rejected": [answer("Snow.")]}  # fmt: skip
    assert warnings([pair], objective=objective) == [
        "rows: the chat template omits thoughts from 1 row (rows[0])"
    ]
