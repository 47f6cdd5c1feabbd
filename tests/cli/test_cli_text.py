"""Text as it is streamed: whole characters, and nothing of what ends a turn."""

import pytest
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.cli._opening import stream
from qlora_wgpu.data import ChatTemplate, PromptFormat
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES, closing_text, end_of_turn

CHATML = ChatTemplate(BUILT_IN_TEMPLATES["chatml"])
PLAIN = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }} <END> \n{% endfor %}")


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello", "", "hello"),
        ("héllo ☃", "", "héllo ☃"),
        ("hello<END>more", "<END>", "hello"),
        ("a<E b<EN c", "<END>", "a<E b<EN c"),
        ("a<EN", "<END>", "a<EN"),
        ("<END>", "<END>", ""),
    ],
)
def test_streaming(capsys, text, stop, shown):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, ids, stop) == shown
    assert capsys.readouterr().out == shown + "\n"


def test_where_a_turn_ends():
    tokenizer = tiny_tokenizer()
    assert closing_text(CHATML) == "<|im_end|>" and closing_text(PLAIN) == "<END>"
    assert end_of_turn(CHATML, tokenizer) == tokenizer.token_id("<|im_end|>")
    assert end_of_turn(PLAIN, tokenizer) is None
    chatml, plain = (PromptFormat("chat", tokenizer, t) for t in (CHATML, PLAIN))
    text = PromptFormat.text(tokenizer)
    assert chatml.stop_text == "" and plain.stop_text == "<END>" and text.stop_text == ""
    assert chatml.stop_ids == {tokenizer.eos_token_id, tokenizer.token_id("<|im_end|>")}
    assert plain.stop_ids == text.stop_ids == {tokenizer.eos_token_id}
