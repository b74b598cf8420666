"""What a line of a source asks, whatever shape it had."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from schemas import ids as record_ids
from services.kernel.errors import Reject

# In this order: the names data sets give the id of a row.
ID_KEYS = ("id", "custom_id", "question_id", "task_id", "uuid")
CONVERSATION_KEY = "conversation_id"


class Conversation(msgspec.Struct, frozen=True):
    """Messages ending with the turn to be answered, and tools (None: none).

    `turn` counts the assistant's turns before. `ids` is the prompt itself when the record gives it tokenised: there
    are no messages then."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    turn: int = 0
    ids: list[int] | None = None

    def content_id(self) -> str:
        """An id for a conversation that was given none: equal ones have the same."""
        if self.ids is not None:
            return record_ids.prompt_id(self.ids).hex()
        messages = msgspec.json.encode(self.messages).decode()
        tools = msgspec.json.encode(self.tools).decode() if self.tools else None
        return blake2b(f"{messages}\0{tools}".encode(), digest_size=16).hexdigest()


class Own(msgspec.Struct, frozen=True):
    """What a record asks for itself; what it leaves out its source decides."""

    sampling: dict[str, Any] = {}
    max_new_tokens: int | None = None
    samples: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """At least one conversation, in the order of their turns. `metadata` are columns kept on request."""

    asked: list[Conversation]
    id: str | None = None
    conversation_id: str | None = None
    metadata: dict[str, Any] = {}
    own: Own = Own()


def user_id(record: dict[str, Any], keys: tuple[str, ...] = ID_KEYS) -> str | None:
    """The user's own id of a record, under the first of `keys` that is there. Raises Reject for what can be none."""
    for key in keys:
        id = record.get(key)
        if id is None or id == "":
            continue
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise Reject("bad_field", f"`{key}` must be text or an integer, not {id!r}")
        return str(id)
    return None
