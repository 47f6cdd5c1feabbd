"""Conversations of every shape that rows have, each part with a word of its own."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: Any, identity: str | None = None) -> Message:
    own = {} if identity is None else {"id": identity}
    return {**own, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: Any, name: str = "lookup", identity: str | None = None) -> Message:
    own = {} if identity is None else {"tool_call_id": identity}
    return {"role": "tool", "name": name, **own, "content": text}


def tool(name: str, **properties: str) -> Message:
    kinds = {key: {"type": kind, "description": f"about{key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds, "required": list(kinds)}
    described = {"name": name, "description": f"describes{name}", "parameters": parameters}
    return {"type": "function", "function": described}


LOOKUP, ADD = tool("lookup", place="string"), tool("add", first="integer", second="number")
NOW = {"type": "function", "function": {"name": "now", "description": "describesnow",
       "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
SYSTEM = {"role": "system", "content": "systemword"}
ASKED = user("askedword")
ROME, OSLO = {"place": "romeword"}, {"place": "osloword"}

# fmt: off
# name: messages, and tools where there are any
CONVERSATIONS: dict[str, tuple[list[Message], list[Message] | None]] = {
    "single": ([ASKED, answer("answerword")], None),
    "several turns": ([ASKED, answer("firstword"), user("moreword"), answer("secondword"),
                       user("againword"), answer("thirdword")], None),
    "system": ([SYSTEM, ASKED, answer("answerword")], None),
    "developer": ([{"role": "developer", "content": "systemword"}, ASKED, answer("answerword")],
                  None),
    "empty answer": ([ASKED, answer(""), user("moreword"), answer("secondword")], None),
    "same answers": ([ASKED, answer("sameword"), ASKED, answer("sameword")], None),
    "lines and spaces": ([user(" asked\nword "), answer("\n answer\n\nword \n"), user("moreword"),
                          answer("secondword")], None),
    "parts": ([user([{"type": "text", "text": "askedword"}]),
               answer([{"type": "text", "text": "answerword"}])], None),
    "several parts": ([user([{"type": "text", "text": "askedword"},
                             {"type": "text", "text": "alsoword"}]),
                       answer([{"type": "text", "text": "answerword"},
                               {"type": "text", "text": "furtherword"}])], None),
    "tools alone": ([SYSTEM, ASKED, answer("answerword")], [LOOKUP, ADD]),
    "call": ([ASKED, answer("", tool_calls=[call("lookup", ROME)]), result("resultword"),
              answer("answerword")], [LOOKUP]),
    "call with text": ([ASKED, answer("wordsbefore", tool_calls=[call("lookup", ROME)]),
                        result("resultword"), answer("answerword")], [LOOKUP]),
    "call with null content": ([ASKED, answer(None, tool_calls=[call("lookup", ROME)]),
                                result("resultword"), answer("answerword")], [LOOKUP]),
    "call with text arguments": ([ASKED, answer("", tool_calls=[
        call("lookup", '{"place": "romeword"}')]), result("resultword"), answer("answerword")],
        [LOOKUP]),
    "call without arguments": ([ASKED, answer("", tool_calls=[call("now", {})]),
                                result("resultword", "now"), answer("answerword")], [NOW]),
    "call with numbers": ([ASKED, answer("", tool_calls=[call("add", {"first": 2, "second": 3.5})]),
                           result("5.5", "add"), answer("answerword")], [ADD]),
    "call with nested values": ([ASKED, answer("", tool_calls=[call("lookup", {
        "place": {"kind": ["a", 7, True], "none": None}, "exact": False})]),
        result("resultword"), answer("answerword")], [LOOKUP]),
    "several calls": ([ASKED, answer("", tool_calls=[
        call("lookup", ROME, "abcdefgh1"), call("lookup", OSLO, "abcdefgh2")]),
        result("firstresult", identity="abcdefgh1"), result("secondresult", identity="abcdefgh2"),
        answer("answerword")], [LOOKUP]),
    "calls one after the other": ([ASKED, answer("", tool_calls=[call("lookup", ROME)]),
        result("firstresult"), answer("", tool_calls=[call("lookup", OSLO)]),
        result("secondresult"), answer("answerword"), user("moreword"), answer("lastword")],
        [LOOKUP]),
    "call at the end": ([SYSTEM, ASKED, answer("", tool_calls=[call("lookup", ROME)])], [LOOKUP]),
    "thoughts": ([ASKED, answer("firstword", reasoning_content="firstthought"), user("moreword"),
                  answer("secondword", reasoning_content="secondthought")], None),
    "thoughts in line": ([ASKED, answer("<think>\nfirstthought\n</think>\n\nfirstword"),
                          user("moreword"),
                          answer("<think>\nsecondthought\n</think>\n\nsecondword")], None),
    "thoughts and a call": ([ASKED, answer("", reasoning_content="firstthought",
        tool_calls=[call("lookup", ROME)]), result("resultword"),
        answer("answerword", reasoning_content="secondthought")], [LOOKUP]),
    "greeting": ([answer("greetingword"), ASKED, answer("answerword")], None),
    "asked last": ([ASKED, answer("answerword"), user("moreword")], None),
    "one after the other": ([ASKED, user("alsoword"), answer("answerword"), answer("furtherword")],
                            None),
}
# fmt: on
