"""From lines to prompts: parse, render, encode all at once, check, resolve. What cannot be asked is refused by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from schemas import ids as record_ids
from schemas.dead import DeadLetter
from schemas.prompts import Prompt, SourceRef
from services.ingest.formats import parse
from services.ingest.guards import Guards
from services.ingest.lines import KEPT_BYTES, MAX_LINE_BYTES, Line
from services.ingest.record import Conversation, Record
from services.ingest.request import Request
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.codec import Encoder
from services.kernel.errors import Reject
from services.kernel.kafka import MAX_VALUE_BYTES
from services.kernel.overlap import Overlap

# Level 6 would make prompts 2 % smaller, and take 42 µs of each instead of 17 (encoding takes 650).
LEVEL = 3


class Ready(NamedTuple):
    """A prompt ready for its topic: record id, encoded value, number of prompt ids, the row it was made of."""

    id: bytes
    value: bytes
    tokens: int
    row: int


class Letter(NamedTuple):
    """A dead letter ready for its topic; of which row it tells, and what."""

    key: bytes
    value: bytes
    row: int
    reason: str
    detail: str


class Made(msgspec.Struct):
    """What became of a batch of lines: every turn asked is a prompt for each sample, or a letter; a line that cannot be
    read is one letter."""

    prompts: list[Ready]
    letters: list[Letter]
    refused: Counter[str]


class Rendered(NamedTuple):
    """A conversation as text, ready to be encoded. `messages` and `tools` are their JSON, None when it has none."""

    line: Line
    record: Record
    conversation: Conversation
    group: str
    messages: str | None
    tools: str | None
    text: str


class Refused(NamedTuple):
    """A line, or one of its turns, that cannot be asked."""

    line: Line
    turn: int | None
    reject: Reject


class PromptMaker:
    """Makes the prompts of one source. Threads may share it. `proven` and `example`: see preflight.py."""

    def __init__(
        self, request: Request, tokenizer: ChatTokenizer, *, store_messages: bool, overlap: Overlap | None = None
    ) -> None:
        self.request, self.tokenizer, self.proven = request, tokenizer, False
        self.example: Rendered | None = None  # what `tokenhaul check` shows
        self._source, self._store_messages = request.source, store_messages
        self._guards = Guards(request, tokenizer, overlap)

    def make(self, file: str, lines: Sequence[Line]) -> Made:
        """Prompts and letters of `lines`. CPU for as long as it takes: not on the loop.

        Raises Fatal for ids the model does not have: the tokenizer is another model's."""
        encoder = Encoder(LEVEL)
        made = Made([], [], Counter())
        rendered: list[Rendered] = []
        size = 0
        for item in self.render(lines):
            if isinstance(item, Refused):
                self._refuse(made, encoder, file, item)
                continue
            rendered.append(item)
            size += len(item.text)
            if size >= self.tokenizer.at_once:
                self._add(made, encoder, file, rendered)
                rendered, size = [], 0
        self._add(made, encoder, file, rendered)
        return made

    def _add(self, made: Made, encoder: Encoder, file: str, rendered: Sequence[Rendered]) -> None:
        """Encode texts, and put their prompts to those that are made."""
        for item, prompt_ids in zip(rendered, self._encode(rendered), strict=True):
            try:
                made.prompts += self._prompts(encoder, file, item, prompt_ids)
            except Reject as reject:
                self._refuse(made, encoder, file, Refused(item.line, item.conversation.turn, reject))

    def render(self, lines: Iterable[Line]) -> Iterator[Rendered | Refused]:
        """The prompts of `lines` as text, and what cannot be asked, in their order."""
        for line in lines:
            try:
                record = self._read(line)
            except Reject as reject:
                yield Refused(line, None, reject)
                continue
            group = record.conversation_id or record.asked[-1].content_id()
            for conversation in record.asked:
                try:
                    yield self._render(line, record, conversation, group)
                except Reject as reject:
                    yield Refused(line, conversation.turn, reject)

    def _read(self, line: Line) -> Record:
        if line.too_long:
            raise Reject("line_too_long", f"a line of more than {MAX_LINE_BYTES} bytes")
        source = self._source
        return parse(line.data, source.format, each=source.turns == "each", metadata=source.metadata)

    def _render(self, line: Line, record: Record, chat: Conversation, group: str) -> Rendered:
        if chat.ids is not None:
            if max(chat.ids) >= self.request.vocab_size:
                told = f"id {max(chat.ids)}, vocab_size is {self.request.vocab_size}"
                raise Reject("ids_beyond_vocabulary", told)
            text = self.tokenizer.decode(chat.ids)
            self._guards.overlap([text])
            return Rendered(line, record, chat, group, None, None, text)
        self._guards.before(chat)
        messages = msgspec.json.encode(chat.messages).decode()
        text = self.tokenizer.render(chat.messages, chat.tools, self.request.chat_template_kwargs)
        if not text:
            raise Reject("empty_prompt", "the chat template renders the conversation to nothing")
        self._guards.after(chat, messages, text)
        tools = msgspec.json.encode(chat.tools).decode() if chat.tools else None
        return Rendered(line, record, chat, group, messages, tools, text)

    def _encode(self, rendered: Sequence[Rendered]) -> Iterator[list[int]]:
        encoded = iter(self.tokenizer.encode([item.text for item in rendered if item.conversation.ids is None]))
        return (next(encoded) if item.conversation.ids is None else item.conversation.ids for item in rendered)

    def _prompts(self, encoder: Encoder, file: str, item: Rendered, prompt_ids: list[int]) -> list[Ready]:
        request, source, own = self.request, self._source, item.record.own
        request.check_ids(prompt_ids)
        sampling, clamped = request.sampling(prompt_ids, own)
        prompt = Prompt(
            id=b"",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=0,
            revision=source.revision,
            source=source.name,
            source_ref=SourceRef(file, item.line.row, item.record.id),
            conversation_id=item.group,
            turn=item.conversation.turn,
            messages=item.messages if self._store_messages else None,
            tools=item.tools if self._store_messages else None,
            model=request.model,
            vocab_size=request.vocab_size,
            context_length=request.context_length,
            tokenizer_fingerprint=request.tokenizer_fingerprint,
            chat_template_kwargs={} if item.messages is None else request.chat_template_kwargs,
            reasoning=request.reasoning.state(item.text) if request.reasoning else None,
            clamped=clamped,
            metadata=item.record.metadata,
            created_at=time.time(),
        )
        ready = []
        for index in range(own.samples or source.samples):
            id = record_ids.record_id(prompt_ids, request.model, sampling, index, source.revision)
            seed = record_ids.seed(id)
            try:
                value = encoder.encode(msgspec.structs.replace(prompt, id=id, seed=seed, sample_index=index))
            except OverflowError as error:
                raise Reject("bad_field", "metadata holds an integer of more than 64 bits") from error
            if len(value) > MAX_VALUE_BYTES:
                raise Reject("record_too_large", f"{len(value)} bytes as a message, {MAX_VALUE_BYTES} are allowed")
            ready.append(Ready(id, value, len(prompt_ids), item.line.row))
        return ready

    def _refuse(self, made: Made, encoder: Encoder, file: str, refused: Refused) -> None:
        line, reject = refused.line, refused.reject
        turn = refused.turn if self._source.turns == "each" else None
        letter = DeadLetter(
            stage="ingest",
            reason=reject.reason,
            detail=reject.detail if turn is None else f"turn {turn}: {reject.detail}",
            source=self._source.name,
            source_ref=SourceRef(file, line.row),
            record=line.data[:KEPT_BYTES].decode("utf-8", "replace"),
            created_at=time.time(),
        )
        key = f"{self._source.name}:{file}:{line.row}" + ("" if turn is None else f":{turn}")
        made.letters.append(Letter(key.encode(), encoder.encode(letter), line.row, reject.reason, reject.detail))
        made.refused[reject.reason] += 1
