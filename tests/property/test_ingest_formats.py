"""Whatever a line holds, it becomes a conversation that can be asked, or is refused: nothing else is raised."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.ingest.asks import Format
from services.ingest.formats import parse
from services.kernel.errors import Reject

KEYS = [
    "messages", "conversations", "instruction", "input", "output", "history", "system", "chat", "prompt", "text", "id",
    "tools", "role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "type", "images",
]  # fmt: skip
WORDS = [
    "user", "assistant", "system", "tool", "human", "gpt", "observation", "function_call", "Hi", "", "{}", "[]",
    '{"a":1}',
    "USER: Hi\n\n\nASSISTANT: <functioncall> {} <|endoftext|>\n\n\nFUNCTION RESPONSE: 1\n\n\nUSER: More", "{broken",
]  # fmt: skip
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.floats(allow_nan=False), st.sampled_from(WORDS), st.text()
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text()), inner, max_size=5)
    ),
    max_leaves=25,
)
turns = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(WORDS), "from": st.sampled_from(WORDS), "content": values, "value": values,
                  "tool_calls": values}
)  # fmt: skip
BODY = {"n": values, "max_tokens": values, "temperature": values, "stop": values, "response_format": values}
records = st.one_of(
    values,
    st.fixed_dictionaries({"messages": st.lists(turns, max_size=5)}, optional={"tools": values, "id": values}),
    st.fixed_dictionaries({"conversations": st.lists(turns, max_size=5)}, optional={"tools": values}),
    st.fixed_dictionaries({"chat": st.sampled_from(WORDS)}, optional={"system": values}),
    st.fixed_dictionaries({"body": st.fixed_dictionaries({"messages": st.lists(turns, max_size=5)}, optional=BODY)}),
    st.fixed_dictionaries({"input_ids": st.lists(values, max_size=5)}),
    st.fixed_dictionaries({"turns": st.lists(values, max_size=5)}, optional={"system": values}),
    st.fixed_dictionaries({"instruction": values}, optional={"history": values, "input": values}),
)
each = st.booleans()
formats = st.sampled_from(get_args(Format))


@given(record=records, format=formats, each=each)
def test_any_record_is_asked_or_refused(record: Any, format: Any, each: bool) -> None:
    try:
        line = msgspec.json.encode(record)
    except UnicodeEncodeError:
        return
    try:
        read = parse(line, format, each=each, metadata="all")
    except Reject:
        return
    assert read.asked
    for asked in read.asked:
        assert asked.ids or asked.messages[-1]["role"] in ("user", "tool")
        assert all(isinstance(message["content"], str) for message in asked.messages)


@given(line=st.binary(max_size=60))
def test_any_bytes_are_asked_or_refused(line: bytes) -> None:
    with contextlib.suppress(Reject):
        parse(line, "auto")
