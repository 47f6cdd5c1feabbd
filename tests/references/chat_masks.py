"""Compares texts and masks of chats with transformers', and records them.

usage: python tests/references/chat_masks.py [--record]    with transformers and TRL installed

Every template in TRL's package that marks nothing writes every conversation of `conversations.py`.
None that transformers can render may be refused. Where TRL has a twin of the template with
`{% generation %}`, each word of the conversation that both write must be learnt by both, or by
neither. Texts differ where a conversation is in a form that the template does not know (a null,
parts of a content, arguments as text or as an object, the role developer); these are listed.

With --record, hashes of the text and of what is learnt are written for the tests, of the project's
own templates and of those in shared/data that do not write the date.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.spans import assistant_spans

from qlora_wgpu.data import ChatTemplate
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES
from qlora_wgpu.data.messages import canonical_tools, checked_messages
from qlora_wgpu.errors import QLoRAError
from references.conversations import CONVERSATIONS

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
RECORD = Path(__file__).parents[1] / "data/chat_masks.json"
OTHERS = Path(__file__).parents[3] / "shared/data/chat_templates"
WORD = re.compile(r"[a-z]+(?:word|thought|result)")


def ours(template: ChatTemplate, name: str):
    """The text and the learnt spans, or the sentence that refuses it."""
    messages, tools = CONVERSATIONS[name]
    try:
        canonical = checked_messages(messages, "messages"), canonical_tools(tools)
        return assistant_spans(template, *canonical, SPECIAL["eos_token"])
    except QLoRAError as err:
        return str(err), None


def theirs(source: str, name: str):
    """The same by transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, tools = CONVERSATIONS[name]
    marks = re.search(r"{%-?\s*generation", source) is not None
    try:
        texts, spans = render_jinja_template(
            [messages], tools=tools, chat_template=source, return_assistant_tokens_mask=marks,
            **SPECIAL,
        )  # fmt: skip
    except Exception as err:
        return str(err), None
    return texts[0], spans[0] if marks else []


def learnt(text: str, spans) -> dict[str, list[bool]]:
    """For each word of the conversation, of its occurrences which are learnt."""
    found: dict[str, list[bool]] = {}
    for match in WORD.finditer(text):
        inside = any(start <= match.start() and match.end() <= end for start, end in spans)
        found.setdefault(match[0], []).append(inside)
    return found


def digest(text: str, spans) -> list[str] | None:
    """What is recorded of a rendering; nothing of one that is refused."""
    if spans is None:
        return None
    parts = text, "\0".join(text[start:end] for start, end in spans)
    return [hashlib.sha256(part.encode()).hexdigest()[:16] for part in parts]


def compare(sources: dict[str, str]) -> int:
    """Prints what differs; returns how many renderings are refused or learnt otherwise."""
    count = wrong = 0
    for name, source in sources.items():
        if name.endswith("_training"):
            continue
        template, twin = ChatTemplate(source, SPECIAL), sources.get(f"{name}_training")
        for conversation in CONVERSATIONS:
            text, spans = theirs(source, conversation)
            if spans is None:
                continue
            count += 1
            own, found = ours(template, conversation)
            if found is None:
                print(f"refused: {name}, {conversation}: {own}")
                wrong += 1
                continue
            if own != text:
                print(f"another text: {name}, {conversation}")
            marked, marks = theirs(twin, conversation) if twin else ("", None)
            if marks is None:
                continue
            a, b = learnt(own, found), learnt(marked, marks)
            other = [word for word in a.keys() & b.keys() if any(a[word]) != any(b[word])]
            if other:
                print(f"learnt otherwise: {name}, {conversation}: {', '.join(sorted(other))}")
                wrong += 1
    print(f"{count} renderings, of which {wrong} are refused or learnt otherwise")
    return wrong


def record() -> None:
    """Writes what the tests compare with."""
    own = {f"own/{name}": source for name, source in BUILT_IN_TEMPLATES.items()}
    found = {path.stem: path.read_text() for path in sorted(OTHERS.glob("*.jinja"))}
    found = {name: source for name, source in found.items() if "strftime_now" not in source}
    recorded = {
        template: {
            name: digest(*ours(ChatTemplate(source, SPECIAL), name)) for name in CONVERSATIONS
        }
        for template, source in {**own, **found}.items()
    }
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    else:
        folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
        sys.exit(
            compare({path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}) > 0
        )
