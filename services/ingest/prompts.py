"""From lines to prompts: parse, render, encode all at once, check, resolve. What cannot be asked is refused by name."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from schemas import ids as record_ids
from schemas.dead import DeadLetter
from schemas.prompts import Prompt, SourceRef
from services.ingest.conversation import Conversation
from services.ingest.formats import parse
from services.ingest.lines import KEPT_BYTES, MAX_LINE_BYTES, Line
from services.ingest.request import Request
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.codec import Encoder
from services.kernel.errors import Fatal, Reject
from services.kernel.kafka import MAX_VALUE_BYTES

_PLAIN_NAME = re.compile(r"[\w.-]+")


class Ready(NamedTuple):
    """A prompt ready for its topic: record id, encoded value, number of prompt ids."""

    id: bytes
    value: bytes
    tokens: int


class Letter(NamedTuple):
    """A dead letter ready for its topic."""

    key: bytes
    value: bytes


class Made(msgspec.Struct):
    """What became of a batch of lines: every line is one or more prompts (one a sample), or one letter."""

    prompts: list[Ready]
    letters: list[Letter]
    refused: Counter[str]


class Rendered(NamedTuple):
    """A conversation as text, ready to be encoded. `messages` and `tools` are their JSON."""

    line: Line
    conversation: Conversation
    messages: str
    tools: str | None
    text: str


class PromptMaker:
    """Makes the prompts of one source. Threads may share it. `proven`: see preflight.py."""

    def __init__(self, request: Request, tokenizer: ChatTokenizer, *, store_messages: bool) -> None:
        self.request, self.tokenizer, self.proven = request, tokenizer, False
        self._source, self._store_messages = request.source, store_messages
        self._reads_tools = "tools" in tokenizer.template_variables()

    def make(self, file: str, lines: Sequence[Line]) -> Made:
        """Prompts and letters of `lines`. CPU for as long as it takes: not on the loop.

        Raises Fatal for ids the model does not have: the tokenizer is another model's."""
        encoder = Encoder()
        made = Made([], [], Counter())
        rendered: list[Rendered] = []
        for line in lines:
            try:
                rendered.append(self.render(line))
            except Reject as reject:
                self._refuse(made, encoder, file, line, reject)
        for item, prompt_ids in zip(rendered, self.tokenizer.encode([item.text for item in rendered]), strict=True):
            try:
                made.prompts += self._prompts(encoder, file, item, prompt_ids)
            except Reject as reject:
                self._refuse(made, encoder, file, item.line, reject)
        return made

    def render(self, line: Line) -> Rendered:
        """The text of a line's prompt. Raises Reject."""
        if line.too_long:
            raise Reject("line_too_long", f"a line of more than {MAX_LINE_BYTES} bytes")
        chat = parse(line.data, self._source.format)
        text = self.tokenizer.render(chat.messages, chat.tools, self._source.chat_template_kwargs)
        messages = msgspec.json.encode(chat.messages).decode()
        self._refuse_dropped_tools(chat, messages, text)
        self._refuse_dropped_calls(chat, text)
        tools = msgspec.json.encode(chat.tools).decode() if chat.tools else None
        return Rendered(line, chat, messages, tools, text)

    def _refuse_dropped_tools(self, chat: Conversation, messages: str, text: str) -> None:
        if not chat.tools or self._source.tools == "ignore":
            return
        if self._reads_tools:
            names = [tool["function"]["name"] for tool in chat.tools]
            if any(_PLAIN_NAME.fullmatch(name) and name in text and name not in messages for name in names):
                return  # it can only come from the tools: no need to render twice
            if not self._same_without(text, chat.messages, None):
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
        if not shown or self._same_without(text, without, chat.tools):
            raise Reject("tool_calls_ignored", "the chat template leaves tool calls of earlier turns out of the prompt")

    def _same_without(self, text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        try:
            return self.tokenizer.render(messages, tools, self._source.chat_template_kwargs) == text
        except Reject:
            return False  # the template cannot do without

    def _prompts(self, encoder: Encoder, file: str, item: Rendered, prompt_ids: list[int]) -> list[Ready]:
        request, source = self.request, self._source
        sampling, clamped = self._sampling(prompt_ids)
        prompt = Prompt(
            id=b"",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=0,
            revision=source.revision,
            source=source.name,
            source_ref=SourceRef(file, item.line.row, item.conversation.id),
            conversation_id=item.conversation.id or _content_id(item),
            messages=item.messages if self._store_messages else None,
            tools=item.tools if self._store_messages else None,
            model=request.model,
            vocab_size=request.vocab_size,
            context_length=request.context_length,
            tokenizer_fingerprint=request.tokenizer_fingerprint,
            chat_template_kwargs=source.chat_template_kwargs,
            reasoning=request.reasoning.state(item.text) if request.reasoning else None,
            clamped=clamped,
            created_at=time.time(),
        )
        ready = []
        for index in range(source.samples):
            id = record_ids.record_id(prompt_ids, request.model, sampling, index, source.revision)
            seed = record_ids.seed(id)
            value = encoder.encode(msgspec.structs.replace(prompt, id=id, seed=seed, sample_index=index))
            if len(value) > MAX_VALUE_BYTES:
                raise Reject("record_too_large", f"{len(value)} bytes as a message, {MAX_VALUE_BYTES} are allowed")
            ready.append(Ready(id, value, len(prompt_ids)))
        return ready

    def _sampling(self, prompt_ids: list[int]) -> tuple[dict[str, Any], bool]:
        """The sampling of one prompt, and whether max_new_tokens had to be clamped to the room there is."""
        request = self.request
        if not prompt_ids:
            raise Reject("empty_prompt", "the chat template renders the conversation to nothing")
        if max(prompt_ids) >= request.vocab_size:
            raise Fatal(
                f"source {self._source.name!r}: the tokenizer gives id {max(prompt_ids)}, vocab_size is "
                f"{request.vocab_size}: an engine would die of it. Is the tokenizer the model's? Does "
                "TOKENHAUL_INGEST_VOCAB_SIZE say what the model was built with?"
            )
        room = request.context_length - len(prompt_ids)
        if room < max(1, request.sampling.get("min_new_tokens", 0)):
            raise Reject("prompt_too_long", f"{len(prompt_ids)} ids of a context of {request.context_length}")
        asked = self._source.max_new_tokens
        return {**request.sampling, "max_new_tokens": min(asked, room)}, asked > room

    def _refuse(self, made: Made, encoder: Encoder, file: str, line: Line, reject: Reject) -> None:
        letter = DeadLetter(
            stage="ingest",
            reason=reject.reason,
            detail=reject.detail,
            source=self._source.name,
            source_ref=SourceRef(file, line.row),
            record=line.data[:KEPT_BYTES].decode("utf-8", "replace"),
            created_at=time.time(),
        )
        key = f"{self._source.name}:{file}:{line.row}".encode()
        made.letters.append(Letter(key, encoder.encode(letter)))
        made.refused[reject.reason] += 1


def _content_id(item: Rendered) -> str:
    """An id for a conversation without one: equal conversations have the same."""
    return blake2b(f"{item.messages}\0{item.tools}".encode(), digest_size=16).hexdigest()
