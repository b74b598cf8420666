"""From a line of JSON to a conversation, by the shape of the record: docs/formats.md shows every shape."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from services.ingest import batch, glaive
from services.ingest.asks import Format
from services.ingest.conversation import conversations, json_of, refuse_media
from services.ingest.record import CONVERSATION_KEY, ID_KEYS, Conversation, Own, Record, user_id
from services.ingest.tool_turns import ToolTurns, call_of_text
from services.kernel.errors import Reject

Turns = tuple[list[Any], Any]
"""Turns in OpenAI's form, and tools as given."""

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}


def parse(
    line: bytes, format: Format, *, each: bool = False, metadata: Literal["all"] | Collection[str] = ()
) -> Record:
    """What a line asks. Raises Reject for anything that cannot be asked as it stands.

    `each`: one conversation for each of the assistant's turns; `metadata`: the columns that are kept."""
    record = json_of(line, "not_json", "the line")
    if not isinstance(record, dict):
        raise Reject("not_an_object", f"a record must be an object, not {type(record).__name__}")
    refuse_media(record, "the record")
    chosen = _detect(record) if format == "auto" else format
    shape = _SHAPES[chosen]
    body, own = batch.read(record) if chosen == "batch" else (record, Own())
    if chosen == "ids":
        asked = [Conversation([], None, ids=_ids(record))]
    else:
        asked = conversations(*shape.turns(body), each=each)
    read = {*shape.keys, *shape.beside, *ID_KEYS, CONVERSATION_KEY}
    kept = {key: value for key, value in record.items() if (key not in read if metadata == "all" else key in metadata)}
    id = user_id(record)
    group = user_id(record, (CONVERSATION_KEY,)) or id
    return Record(asked=asked, id=id, conversation_id=group, metadata=kept, own=own)


def _detect(record: dict[str, Any]) -> str:
    present = {key for key, value in record.items() if value is not None}
    found = [(name, key) for name, shape in _SHAPES.items() for key in shape.keys if key in present]
    if "instruction" in present:
        found = [(name, key) for name, key in found if name != "input_output"]
    if not found:
        keys = ", ".join(key for shape in _SHAPES.values() for key in shape.keys)
        raise Reject("unknown_format", f"none of the keys {keys} is there, only {', '.join(sorted(present)) or 'none'}")
    if len(found) > 1:
        names = ", ".join(f"{key} ({name})" for name, key in found)
        raise Reject("ambiguous_format", f"the record could be read by {names}: set `format` of the source")
    return found[0][0]


def _messages(record: dict[str, Any]) -> Turns:
    return _list(record, "messages"), record.get("tools")


def _sharegpt(record: dict[str, Any]) -> Turns:
    given = _list(record, "conversations")
    while given and isinstance(given[-1], dict) and given[-1].get("from") in ("gpt", "assistant", "function_call"):
        given.pop()  # here, because what is not asked need not be readable
    turns, tool_turns = _system(record), ToolTurns()
    for number, turn in enumerate(given, 1):
        if not isinstance(turn, dict) or "from" not in turn:
            turns.append(turn)
            continue
        role, value = _SHAREGPT_ROLES.get(str(turn["from"])), turn.get("value")
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise Reject("unknown_role", f"turn {number} is from {turn['from']!r}; known are {known}")
        if role == "function_call":
            turns.append(tool_turns.call(call_of_text(value, f"turn {number}")))
        elif role == "tool":
            turns.append(tool_turns.result(value))
        else:
            turns.append({"role": role, "content": value})
    return turns, record.get("tools")


def _alpaca(record: dict[str, Any]) -> Turns:
    turns = _system(record)
    for pair in _list(record, "history") if record.get("history") else []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Reject("bad_field", "`history` must hold pairs of instruction and answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction, input = _str(record, "instruction"), _str(record, "input", required=False)
    turns.append({"role": "user", "content": f"{instruction}\n{input}" if input else instruction})
    return turns, record.get("tools")


def _glaive(record: dict[str, Any]) -> Turns:
    return glaive.turns(_str(record, "system", required=False), _str(record, "chat"))


def _input_output(record: dict[str, Any]) -> Turns:
    return [*_system(record), {"role": "user", "content": _str(record, "input")}], record.get("tools")


def _prompt(record: dict[str, Any]) -> Turns:
    key = "text" if record.get("prompt") is None else "prompt"
    return [*_system(record), {"role": "user", "content": _str(record, key)}], record.get("tools")


def _turns(record: dict[str, Any]) -> Turns:
    # Only the first: the questions after it follow an answer that nobody has given yet.
    asked = _list(record, "turns")
    if not asked or not all(isinstance(text, str) for text in asked):
        raise Reject("bad_field", "`turns` must be a list of the user's questions")
    return [*_system(record), {"role": "user", "content": asked[0]}], record.get("tools")


def _ids(record: dict[str, Any]) -> list[int]:
    ids = _list(record, "input_ids")
    if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
        raise Reject("bad_field", "`input_ids` must be a flat list of token ids")
    if not ids:
        raise Reject("empty_prompt", "`input_ids` is empty")
    if "loss_mask" in record:
        raise Reject("bad_field", "`loss_mask` marks a finished sequence: give the ids of the prompt alone")
    return ids


class _Shape(NamedTuple):
    """`keys` a record is known by, what is read `beside` them, and how."""

    keys: tuple[str, ...]
    beside: tuple[str, ...]
    turns: Callable[[dict[str, Any]], Turns]


_SHAPES: dict[str, _Shape] = {
    "messages": _Shape(("messages",), ("tools",), _messages),
    "sharegpt": _Shape(("conversations",), ("system", "tools"), _sharegpt),
    "alpaca": _Shape(("instruction",), ("input", "history", "system", "tools"), _alpaca),
    "glaive": _Shape(("chat",), ("system",), _glaive),
    "input_output": _Shape(("input",), ("system", "tools"), _input_output),
    "prompt": _Shape(("prompt", "text"), ("system", "tools"), _prompt),
    "turns": _Shape(("turns",), ("system", "tools"), _turns),
    "batch": _Shape(("body",), ("method", "url"), _messages),
    "ids": _Shape(("input_ids",), (), _messages),
}


def _system(record: dict[str, Any]) -> list[Any]:
    """The system turn of formats that give it a key of its own."""
    text = _str(record, "system", required=False)
    return [{"role": "system", "content": text}] if text else []


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(record.get(key), list):
        raise Reject("bad_field", f"`{key}` must be a list")
    return list(record[key])


def _str(record: dict[str, Any], key: str, *, required: bool = True) -> str:
    value = record.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise Reject("bad_field", f"`{key}` must be text, not {'null' if value is None else type(value).__name__}")
    return value
