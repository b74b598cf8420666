"""A conversation as it goes to the chat template: OpenAI's messages and tools, every turn checked.

What cannot be asked as it stands is refused by name; nothing is dropped but the trailing assistant turns, which are
what the model is to answer anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.ingest.record import Conversation
from services.kernel.errors import Reject

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")


def conversations(turns: Sequence[Any], tools: Any, *, each: bool = False) -> list[Conversation]:
    """Check and normalise: the conversation up to its last question, or with `each` one for each of the assistant's
    turns, with all that was said before it. Raises Reject with the reasons of docs/formats.md."""
    end = len(turns)
    while end and _is_answer(turns[end - 1]):
        end -= 1
    messages = [_message(turn, number) for number, turn in enumerate(turns[:end], 1)]
    known = tool_list(tools)
    # Of the assistant's turns in a row the first is what was asked for: an answer never follows an answer.
    answers = [n for n in range(1, end) if _is_answer(messages[n]) and not _is_answer(messages[n - 1])] if each else []
    asked = []
    for stop in (*answers, end):
        heard = messages[:stop]
        _check_order([message["role"] for message in heard])
        asked.append(Conversation(heard, known, sum(map(_is_answer, heard))))
    return asked


def _is_answer(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _check_order(roles: list[str]) -> None:
    if "user" not in roles:
        raise Reject("no_user_turn", "no turn of the user to answer")
    first = next(role for role in roles if role != "system")
    if first == "assistant":
        raise Reject("assistant_first", "the first turn after the system's is the assistant's")
    if first == "tool":
        raise Reject("orphan_tool_result", "the first turn after the system's is a tool's result")
    if roles[-1] == "system":
        raise Reject("no_user_turn", "the last turn is the system's: there is nothing to answer")


def refuse_media(holder: dict[str, Any], where: str) -> None:
    """Images and the like cannot be asked with token ids alone."""
    if found := [key for key in MEDIA if holder.get(key)]:
        raise Reject("not_text", f"{where} has {', '.join(found)}: only text can be asked")


def tool_list(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as a list of {"type": "function", "function": ...}, from a list or its JSON text. None when empty."""
    if isinstance(tools, str):
        tools = json_of(tools, "bad_tools", "`tools`") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Reject("bad_tools", f"`tools` must be a list, not {_kind(tools)}")
    return [_tool(tool) for tool in tools]


def arguments(given: Any) -> dict[str, Any]:
    """Arguments of a tool call as an object, as SGLang's chat route hands them to the template."""
    if isinstance(given, str):
        given = json_of(given, "bad_tool_call", "arguments of a tool call")
    if not isinstance(given, dict):
        raise Reject("bad_tool_call", f"arguments of a tool call must be an object, not {_kind(given)}")
    return given


def json_of(text: str | bytes, reason: str, what: str) -> Any:
    """The value of JSON text. Raises Reject(reason)."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Reject(reason, f"{what} cannot be read as JSON: {error}") from error


def _message(turn: Any, number: int) -> dict[str, Any]:
    where = f"turn {number}"
    if not isinstance(turn, dict):
        raise Reject("bad_field", f"{where} must be an object, not {_kind(turn)}")
    role = turn.get("role")
    if role not in ROLES:
        raise Reject("unknown_role", f"{where} has the role {role!r}; known are {', '.join(ROLES)}")
    refuse_media(turn, where)
    if turn.get("function_call"):
        raise Reject("bad_tool_call", f"{where} has `function_call`, the form before `tool_calls`, which is not read")
    # Null means absent, here as in transformers.
    message = {key: value for key, value in turn.items() if value is not None}
    calls = message.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise Reject("bad_tool_call", f"{where}: only the assistant calls tools, not the {role}")
        if not isinstance(calls, list):
            raise Reject("bad_tool_call", f"{where}: `tool_calls` must be a list, not {_kind(calls)}")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    if "content" in message:
        message["content"] = _text(message["content"], where)
    elif calls:
        message["content"] = ""  # SGLang's chat route does the same; templates fail on a missing key
    else:
        raise Reject("null_content", f"{where} has no content and no tool_calls")
    if not message["content"].strip() and role != "tool" and not calls and not message.get("reasoning_content"):
        raise Reject("empty_turn", f"{where}, the {role}'s, is empty")
    return message


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Reject("bad_field", f"{where}: content must be text or a list of parts, not {_kind(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        if kind != "text":
            raise Reject("not_text", f"{where} has a part of type {kind!r}: only text can be asked")
        if not isinstance(part.get("text"), str):
            raise Reject("bad_field", f"{where} has a text part without text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Reject("bad_tool_call", f"{where} has a tool call without function.name")
    given = {**function, "arguments": arguments(function.get("arguments"))}
    return {**{key: value for key, value in call.items() if value is not None}, "function": given}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise Reject("bad_tools", f"a tool must be an object, not {_kind(tool)}")
    wrapped = tool if "function" in tool else {"type": "function", "function": tool}
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Reject("bad_tools", "a tool has no function name")
    return wrapped


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
