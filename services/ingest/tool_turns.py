"""Tool calls of formats that write them as text and give them no ids."""

from __future__ import annotations

from collections import deque
from typing import Any

from services.ingest.conversation import arguments, json_of
from services.kernel.errors import Reject

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


class ToolTurns:
    """Gives calls ids, in Kimi's form `functions.NAME:N` counted over the conversation, and results the call's id."""

    def __init__(self) -> None:
        self._count = 0
        self._open: deque[str] = deque()

    def call(self, calls: list[Call], content: str = "") -> dict[str, Any]:
        """An assistant turn that calls tools."""
        self._open.clear()
        turn = []
        for name, given in calls:
            id = f"functions.{name}:{self._count}"
            self._count += 1
            self._open.append(id)
            turn.append({"id": id, "type": "function", "function": {"name": name, "arguments": given}})
        return {"role": "assistant", "content": content, "tool_calls": turn}

    def result(self, content: Any) -> dict[str, Any]:
        """A tool turn: the result of the first call that has none yet."""
        if not self._open:
            raise Reject("orphan_tool_result", "a tool's result follows no tool call")
        return {"role": "tool", "tool_call_id": self._open.popleft(), "content": content}


def call_of_text(text: Any, where: str) -> list[Call]:
    """The calls in `{"name": ..., "arguments": ...}` or a list of such."""
    given = json_of(text, "bad_tool_call", f"{where}: a tool call") if isinstance(text, str) else text
    calls = given if isinstance(given, list) else [given]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise Reject("bad_tool_call", f"{where}: a tool call has no name")
    return [(call["name"], arguments(call.get("arguments"))) for call in calls]
