"""Glaive's function-calling data as it is published: one text with USER:, ASSISTANT:, FUNCTION RESPONSE:.

Functions stand as JSON objects in the system text; calls as <functioncall> with arguments in single quotes inside of
something like JSON; an assistant's turn ends with <|endoftext|>, which is glaive's and no token of the model asked.
"""

from __future__ import annotations

import json
import re
from typing import Any

from services.ingest.conversation import json_of
from services.ingest.tool_turns import Call, ToolTurns, call_of_text
from services.kernel.errors import Reject

_TURN = re.compile(r"(?:\A\s*|\n\n\s*)(USER|ASSISTANT|FUNCTION RESPONSE):")
_CALL = re.compile(r"""\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*'(?P<arguments>.*)'\s*\}""", re.DOTALL)
_END = "<|endoftext|>"
_DECODER = json.JSONDecoder()


def turns(system: str, chat: str) -> tuple[list[Any], list[Any]]:
    """Turns in OpenAI's form and the functions of the system text. Raises Reject."""
    text, tools = _functions(system.strip().removeprefix("SYSTEM:").strip())
    messages: list[Any] = [{"role": "system", "content": text}] if text else []
    before, *parts = _TURN.split(chat)
    if before.strip() or not parts:
        raise Reject("bad_field", "`chat` must begin with USER:, ASSISTANT: or FUNCTION RESPONSE:")
    while parts and parts[-2] == "ASSISTANT":
        del parts[-2:]  # here, because what is not asked need not be readable
    tool_turns = ToolTurns()
    for speaker, part in zip(parts[::2], parts[1::2], strict=True):
        content = part.strip()
        if speaker == "USER":
            messages.append({"role": "user", "content": content})
        elif speaker == "FUNCTION RESPONSE":
            messages.append(tool_turns.result(content))
        else:
            said, called, call = content.removesuffix(_END).strip().partition("<functioncall>")
            messages.append(
                tool_turns.call(_call(call.strip()), said.strip()) if called else {"role": "assistant", "content": said}
            )
    return messages, tools


def _functions(system: str) -> tuple[str, list[Any]]:
    """(the text before the first function, the functions): JSON objects one after another to the end of the text."""
    start = system.find("{")
    if start < 0:
        return system, []
    tools, position = [], start
    while position < len(system):
        try:
            _, end = _DECODER.raw_decode(system, position)
        except (ValueError, RecursionError) as error:
            raise Reject("bad_tools", f"the functions in `system` cannot be read as JSON: {error}") from error
        tools.append(json_of(system[position:end], "bad_tools", "a function in `system`"))
        position = end + len(system[end:]) - len(system[end:].lstrip())
    return system[:start].strip(), tools


def _call(text: str) -> list[Call]:
    match = _CALL.fullmatch(text)
    if not match:
        return call_of_text(text, "<functioncall>")
    call = {"name": match["name"], "arguments": match["arguments"]}
    try:
        return call_of_text([call], "<functioncall>")
    except Reject:
        # A quote may be escaped for the quotes around, and JSON knows no such escape.
        call["arguments"] = call["arguments"].replace("\\'", "'")
        return call_of_text([call], "<functioncall>")
