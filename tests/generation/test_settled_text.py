"""Tokens' text as it comes: that of all together, by a bounded number of tokens at a time."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from qlora_wgpu.data import Tokenizer
from qlora_wgpu.generation.text import IncrementalDetokenizer, TextStream, continuation

TEXT = "the  naïve — 漢字 👩‍👩‍👧 don't. ΑΒΓ \U0001f600\U0001f601 é\n\tend ,  of it "


def byte_level():
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE({**alphabet, "th": 256, "Ġt": 257}, [("t", "h"), ("Ġ", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def sentencepiece():
    vocabulary = {f"<0x{n:02X}>": n for n in range(256)}
    letters = ["▁", *"thenaivdof", "▁t", "▁th"]
    vocabulary |= {c: 256 + i for i, c in enumerate(letters)}
    backend = Backend(models.BPE(vocabulary, [("▁", "t"), ("▁t", "h")], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return Tokenizer(backend)


def word_pieces():
    words = ["[UNK]", "the", "do", "##n", "'", "t", ".", "end", ",", "of", "it", "##d", "na", "—"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


KINDS = {"bytes": byte_level, "sentencepiece": sentencepiece, "words": word_pieces}


class Counting:
    """A tokenizer, and the most tokens that it was asked for at once, and all of them."""

    def __init__(self, tokenizer):
        self._tokenizer, self.most, self.all = tokenizer, 0, 0

    def decode(self, ids):
        self.most, self.all = max(self.most, len(ids)), self.all + len(ids)
        return self._tokenizer.decode(ids)


def pushed(tokenizer, ids, context=()):
    stream = TextStream(tokenizer, context=context)
    shown = [stream.push(token) for token in ids]
    assert stream.count == len(ids)
    return "".join(shown) + stream.rest(), stream


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["", "the ", "漢字 of it, "])
def test_tokens_come_to_the_text_of_all(kind, context):
    tokenizer = KINDS[kind]()
    before, ids = tokenizer.encode(context, False), tokenizer.encode(5 * TEXT, False)
    text, stream = pushed(tokenizer, ids, before)
    assert text == stream.text == continuation(tokenizer, before, ids)
    assert len(text) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_are_decoded_for_each_token_of_a_long_text(kind):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(30 * TEXT, False)
    counting = Counting(tokenizer)
    assert pushed(counting, ids)[0] == tokenizer.decode(ids)
    assert counting.most <= 48 and counting.all <= 50 * len(ids)


def test_only_whole_characters_are_shown():
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("a漢b", False)
    assert [stream.push(token) for token in ids] == ["a", "", "", "漢", "b"]
    stream.push(ids[1])
    assert stream.text == "a漢b\ufffd" and stream.rest() == "\ufffd" and stream.rest() == ""


def test_bytes_that_are_no_characters_are_those_of_all_together():
    tokenizer = byte_level()
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 256, 150).tolist()
        assert pushed(tokenizer, ids)[0] == tokenizer.decode(ids)


def test_a_text_of_nothing_but_halves_is_cut():
    tokenizer = byte_level()
    (half,) = {tokenizer.encode("漢", False)[0]}
    counting = Counting(tokenizer)
    assert pushed(counting, [half] * 500)[0] == "\ufffd" * 500
    assert counting.most < 100
    whole = tokenizer.encode("漢", False)
    for lead in range(28, 40):
        ids = [half] * lead + whole
        assert pushed(tokenizer, ids)[0] == tokenizer.decode(ids)


def test_what_was_shown_stays_where_later_bytes_spoil_it():
    """Byte fallback decodes a run of bytes whole or not at all: "漢" and half a character."""
    tokenizer = sentencepiece()
    whole, a = tokenizer.encode("漢", False)[1:], tokenizer.encode("a", False)[-1]
    settled = IncrementalDetokenizer(tokenizer)
    shown = [settled.push(token) for token in (a, *whole, whole[0], a)]
    assert shown == ["a", "", "", "漢", "", "\ufffda"]


def test_a_special_token_is_text_where_it_is_shown():
    tokenizer = sentencepiece()
    ids, half = tokenizer.encode("the", False), tokenizer.encode("漢", False)[1]
    stream = TextStream(tokenizer, ["</x>"], shown={999: "<x>"})
    shown = [stream.push(token) for token in (*ids, half, 999, *ids)]
    assert "".join(shown) == "the\ufffd<x>the" == stream.text


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_stop_string_ends_it_wherever_tokens_are_cut(kind):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXT, False)
    whole = tokenizer.decode(ids)
    for stop in ("漢字", "— 漢", "👧 d", "it ", "xyz", "\U0001f601"):
        stream, shown = TextStream(tokenizer, ["zzz", stop]), ""
        for token in ids:
            new = stream.push(token)
            shown += new
            assert stop not in shown
            if stream.stopped:
                break
        expected = whole.partition(stop)[0]
        assert shown + stream.rest() == stream.text == expected
        assert stream.stopped == (stop in whole)


def test_a_character_that_the_prompt_began_is_told_once_it_is_whole():
    tokenizer = byte_level()
    *before, second, third = tokenizer.encode("the 漢", False)
    assert pushed(tokenizer, [second, third], before)[0] == "漢"


def test_a_long_run_of_invalid_bytes_at_the_beginning_is_decoded():
    tokenizer = byte_level()
    tokens = tokenizer.encode("é" * 40, False)[::2] + tokenizer.encode("the end", False)
    stream = IncrementalDetokenizer(tokenizer)
    text = "".join(map(stream.push, tokens)) + stream.pending
    assert text.endswith("the end") and text.startswith("\ufffd")
