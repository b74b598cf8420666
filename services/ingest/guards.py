"""What would spoil a prompt without anybody noticing, looked for in every record."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.ingest.record import Conversation
from services.ingest.request import Request
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import Reject
from services.kernel.overlap import Overlap, user_texts

_PLAIN_NAME = re.compile(r"[\w.-]+")
_PREFIX = 3
_ASIDE = "\N{WHITE SQUARE}"


class ControlTokens:
    """Finds control tokens in text: special tokens of the vocabulary, and those of its added tokens that the chat
    template writes or that mark reasoning. Typed by a user they would become the control ids themselves."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # By their beginnings: some vocabularies have thousands.
        by_prefix: dict[str, list[str]] = defaultdict(list)
        for token in sorted(set(tokens)):
            by_prefix[token[:_PREFIX]].append(token)
        self._by_prefix = {prefix: tuple(tokens) for prefix, tokens in by_prefix.items()}
        self._begin = re.compile("|".join(map(re.escape, by_prefix)) or "(?!)")

    def find(self, text: str) -> str | None:
        """The first control token in `text`."""
        start = -1
        while match := self._begin.search(text, start + 1):
            start = match.start()
            for size in range(1, _PREFIX + 1):
                tokens = self._by_prefix.get(text[start : start + size], ())
                if text.startswith(tokens, start):
                    return next(token for token in tokens if text.startswith(token, start))
        return None


class Guards:
    """The guards of one source. Threads may share them."""

    def __init__(self, request: Request, tokenizer: ChatTokenizer, overlap: Overlap | None) -> None:
        source, reasoning = request.source, request.reasoning
        self._source, self._tokenizer, self._overlap = source, tokenizer, overlap
        self._kwargs = request.chat_template_kwargs
        self._reads_tools = "tools" in tokenizer.template_variables()
        tags = [] if reasoning is None else [reasoning.open.text, reasoning.close.text]
        self._control = ControlTokens(tokenizer.control_tokens(tags)) if source.control_tokens == "reject" else None

    def before(self, chat: Conversation) -> None:
        """What can be seen in the messages. Raises Reject."""
        if self._control:
            self._refuse_control_tokens(chat, self._control)
        self.overlap(user_texts(chat.messages))

    def overlap(self, texts: Sequence[str]) -> None:
        """Raises Reject for a prompt that asks a benchmark's question: it is not paid for, and not trained on."""
        if self._overlap and (found := self._overlap.find(texts)):
            raise Reject("excluded", f"overlaps with {found}")

    def after(self, chat: Conversation, messages: str, text: str) -> None:
        """What can be seen only in the rendered text. `messages` is their JSON. Raises Reject."""
        self._refuse_dropped_turns(chat, text)
        self._refuse_dropped_tools(chat, messages, text)
        self._refuse_dropped_calls(chat, text)

    def _refuse_control_tokens(self, chat: Conversation, control: ControlTokens) -> None:
        turns = [(f"turn {n}", m) for n, m in enumerate(chat.messages, 1) if m["role"] != "assistant"]
        # Not the content alone: Kimi's template, and others, write a turn's `name`.
        said = [(where, text) for where, turn in turns for text in turn.values() if isinstance(text, str)]
        if chat.tools:
            said.append(("tools", msgspec.json.encode(chat.tools).decode()))
        for where, content in said:
            if token := control.find(content):
                raise Reject(
                    "control_token",
                    f"{where} says {token!r}, which would become that control token itself (`control_tokens: allow` "
                    "in the source lets it)",
                )

    def _refuse_dropped_turns(self, chat: Conversation, text: str) -> None:
        said = [(n, m) for n, m in enumerate(chat.messages) if m["role"] != "assistant" and m["content"].strip()]
        behind = 0
        for _, message in said:
            content = message["content"].strip()
            if (found := text.find(content, behind)) < 0:
                break  # left out, or written in another form or order
            behind = found + len(content)
        else:
            return
        for number, message in said:
            # Whether the template looks at a turn at all, another content tells.
            changed = {**message, "content": _ASIDE + message["content"]}
            other = [*chat.messages[:number], changed, *chat.messages[number + 1 :]]
            if self._same_text(text, other, chat.tools):
                turn = f"turn {number + 1}, the {message['role']}'s"
                raise Reject("turn_ignored", f"the chat template leaves {turn}, out of the prompt")

    def _refuse_dropped_tools(self, chat: Conversation, messages: str, text: str) -> None:
        if not chat.tools or self._source.tools == "ignore":
            return
        if self._reads_tools:
            names = [tool["function"]["name"] for tool in chat.tools]
            if any(_PLAIN_NAME.fullmatch(name) and name in text and name not in messages for name in names):
                return  # it can only come from the tools: no need to render twice
            if not self._same_text(text, chat.messages, None):
                return
        raise Reject(
            "tools_ignored",
            "the chat template leaves the tools out of the prompt: the model would not know them "
            "(`tools: ignore` in the source asks without them)",
        )

    def _refuse_dropped_calls(self, chat: Conversation, text: str) -> None:
        calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
        if not calls:
            return
        # Kimi's template shows a call by its id (functions.NAME:N), others by its name.
        shown = all(call["function"]["name"] in text or str(call.get("id", "\0")) in text for call in calls)
        without = [{key: value for key, value in m.items() if key != "tool_calls"} for m in chat.messages]
        if not shown or self._same_text(text, without, chat.tools):
            raise Reject("tool_calls_ignored", "the chat template leaves tool calls of earlier turns out of the prompt")

    def _same_text(self, text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        try:
            return self._tokenizer.render(messages, tools, self._kwargs) == text
        except Reject:
            return False  # the template cannot do without
