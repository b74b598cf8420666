"""Every shape becomes the conversation docs/formats.md promises, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.ingest.formats import parse
from services.ingest.record import Conversation, Own, Record
from services.kernel.errors import Reject
from tests.support.ingest import PROMPTS

USER = {"role": "user", "content": "Hi"}
ROOT = Path(__file__).parents[2]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def record_of(record: Any, format: Any = "auto", **asks: Any) -> Record:
    return parse(msgspec.json.encode(record), format, **asks)


def conversation(record: Any, format: Any = "auto") -> Conversation:
    (asked,) = record_of(record, format).asked
    return asked


def refusal(record: Any, format: Any = "auto") -> Reject:
    with pytest.raises(Reject) as caught:
        parse(record if isinstance(record, bytes) else msgspec.json.encode(record), format)
    return caught.value


@pytest.mark.parametrize("file", PROMPTS, ids=lambda file: file.stem)
def test_shipped_prompts_are_read_whole(file: Path) -> None:
    for line in file.read_bytes().splitlines():
        (read,) = parse(line, "auto").asked
        assert read.messages[-1]["role"] in ("user", "tool")


def test_messages_keep_the_users_id_and_lose_only_the_trailing_answer() -> None:
    turns = [{"role": "system", "content": "Be brief"}, USER, {"role": "assistant", "content": "Ho"}]
    read = record_of({"id": 7, "messages": turns})
    assert read == Record(asked=[Conversation(turns[:2], None)], id="7", conversation_id="7")


def test_tool_calls_reach_the_template_as_objects_and_null_content_as_empty_text() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    read = conversation({"messages": [USER, called, result], "tools": [FUNCTION]})
    function = {**CALL["function"], "arguments": {"a": 1}}  # type: ignore[dict-item]
    assert read.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
    assert read.messages[2] == result
    assert read.tools == [{"type": "function", "function": FUNCTION}]


def test_arguments_given_as_an_object_stay_one() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    read = conversation({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]})
    assert read.messages[1]["tool_calls"] == [call]


def test_parts_of_text_are_joined_and_reasoning_is_kept() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    thought = {"role": "assistant", "content": "c", "reasoning_content": "hm"}
    read = conversation({"messages": [{"role": "user", "content": parts}, thought, USER]})
    assert read.messages[0]["content"] == "a b"
    assert read.messages[1] == thought


def test_null_and_empty_fields_are_absent_ones() -> None:
    turn: dict[str, Any] = {"role": "user", "content": "Hi", "tool_calls": [], "name": None}
    assert conversation({"messages": [turn], "tools": [], "prompt": None}).messages == [USER]


def test_sharegpt_in_both_its_forms() -> None:
    spoken = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}, {"from": "human", "value": "More"}]
    written = [USER, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "More"}]
    assert conversation({"conversations": spoken}).messages == written
    assert conversation({"conversations": written}).messages == written
    with_system = conversation({"system": "Be brief", "conversations": spoken})
    assert with_system.messages == [{"role": "system", "content": "Be brief"}, *written]


def test_sharegpt_tool_calls_get_ids_and_results_answer_them_in_order() -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": msgspec.json.encode([call, call]).decode()},
        {"from": "observation", "value": "one"},
        {"from": "tool", "value": "two"},
        {"from": "function_call", "value": msgspec.json.encode(call).decode()},
        {"from": "observation", "value": "three"},
    ]
    read = conversation({"conversations": turns, "tools": msgspec.json.encode([FUNCTION]).decode()})
    assert [c["id"] for m in read.messages for c in m.get("tool_calls", ())] == [f"functions.f:{n}" for n in range(3)]
    assert read.messages[1]["tool_calls"][0]["function"] == call
    results = [(m["tool_call_id"], m["content"]) for m in read.messages if m["role"] == "tool"]
    assert results == [("functions.f:0", "one"), ("functions.f:1", "two"), ("functions.f:2", "three")]
    assert read.tools == [{"type": "function", "function": FUNCTION}]


def test_alpaca_with_and_without_input_history_and_system() -> None:
    assert conversation({"instruction": "Do", "input": "", "output": "x"}).messages[0]["content"] == "Do"
    assert conversation({"instruction": "Do", "input": "this", "output": "x"}).messages[0]["content"] == "Do\nthis"
    full = conversation({"instruction": "Do", "history": [["Hi", "Ho"]], "system": "Be brief"})
    assert [(m["role"], m["content"]) for m in full.messages] == [
        ("system", "Be brief"), ("user", "Hi"), ("assistant", "Ho"), ("user", "Do"),
    ]  # fmt: skip


def test_glaive_text_becomes_turns_calls_and_tools() -> None:
    system = f"SYSTEM: You have functions. Use them -\n{msgspec.json.encode(FUNCTION).decode()}\n"
    text = (
        "USER: Hi\n\n\nASSISTANT: Let me see. <functioncall> "
        """{"name": "f", "arguments": '{"a": "it\\'s"}'} <|endoftext|>\n\n\n"""
        'FUNCTION RESPONSE: {"b": 2}\n\n\nASSISTANT: Two. <|endoftext|>\n\n\nUSER: USER: is what I say\n\n\n'
    )
    read = conversation({"system": system, "chat": text})
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": "it's"}}}
    assert read.messages == [
        {"role": "system", "content": "You have functions. Use them -"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": '{"b": 2}'},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "USER: is what I say"},
    ]
    assert read.tools == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("record", [{"prompt": "Hi"}, {"text": "Hi"}, {"input": "Hi", "output": "Ho"}])
def test_bare_prompts(record: dict[str, str]) -> None:
    assert conversation(record).messages == [USER]


def test_a_named_format_settles_what_the_shape_leaves_open() -> None:
    record = {"prompt": "Hi", "messages": [{"role": "user", "content": "Other"}], "text": "Third"}
    assert refusal(record).detail == (
        "the record could be read by messages (messages), prompt (prompt), text (prompt): set `format` of the source"
    )
    assert conversation(record, "prompt").messages == [USER]
    assert conversation(record, "messages").messages[0]["content"] == "Other"


def test_an_unreadable_answer_does_not_spoil_the_question() -> None:
    spoken = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "{broken"}]
    assert conversation({"conversations": spoken}).messages == [USER]
    glaive = "USER: Hi\n\n\nASSISTANT: <functioncall> {broken <|endoftext|>\n\n\n"
    assert conversation({"chat": glaive}).messages == [USER]
    called = {"role": "assistant", "content": None, "tool_calls": "broken"}
    assert conversation({"messages": [USER, called]}).messages == [USER]


ASSISTANT = {"role": "assistant", "content": "Ho"}


def messages(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def calling(call: Any) -> dict[str, Any]:
    return messages(USER, {"role": "assistant", "content": "", "tool_calls": call}, USER)


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        (b"{broken", "not_json", "malformed"),
        (b'{"prompt": "\xff"}', "not_json", "Invalid UTF-8"),
        (b"[" * 100_000, "not_json", "recursion"),
        ([1], "not_an_object", "a record must be an object, not list"),
        ({"question": "Hi"}, "unknown_format", "none of the keys messages, conversations, instruction, chat, input"),
        ({"prompt": "Hi", "messages": [USER]}, "ambiguous_format", "messages (messages), prompt (prompt)"),
        ({"messages": "Hi"}, "bad_field", "`messages` must be a list"),
        ({"prompt": 3}, "bad_field", "`prompt` must be text, not int"),
        ({"prompt": "Hi", "id": [1]}, "bad_field", "`id` must be text or an integer, not [1]"),
        ({"instruction": "Hi", "history": ["Hi"]}, "bad_field", "`history` must hold pairs"),
        ({"instruction": "Hi", "history": "Hi"}, "bad_field", "`history` must be a list"),
        ({"chat": "Hi there"}, "bad_field", "`chat` must begin with USER:"),
        (messages("Hi"), "bad_field", "turn 1 must be an object, not str"),
        (messages({"role": "user", "content": 3}), "bad_field", "content must be text or a list of parts, not int"),
        (messages({"role": "user", "content": [{"type": "text"}]}), "bad_field", "a text part without text"),
        (messages({"role": "developer", "content": "Hi"}), "unknown_role", "turn 1 has the role 'developer'"),
        ({"conversations": [{"from": "bing", "value": "Hi"}]}, "unknown_role", "turn 1 is from 'bing'"),
        (messages(USER, {"role": "user", "content": " \n"}), "empty_turn", "turn 2, the user's, is empty"),
        (messages({"role": "system", "content": ""}, USER), "empty_turn", "turn 1, the system's, is empty"),
        (messages(USER, {"role": "assistant", "content": ""}, USER), "empty_turn", "the assistant's"),
        (messages({"role": "user", "content": None}), "null_content", "turn 1 has no content and no tool_calls"),
        (messages(USER, {"role": "assistant"}, USER), "null_content", "turn 2 has no content"),
        (messages(ASSISTANT, USER), "assistant_first", "the first turn after the system's is the assistant's"),
        (messages(), "no_user_turn", "no turn of the user"),
        (messages(ASSISTANT), "no_user_turn", "no turn of the user"),
        (messages(USER, {"role": "system", "content": "x"}), "no_user_turn", "the last turn is the system's"),
        (messages({"role": "tool", "content": "x"}, USER), "orphan_tool_result", "a tool's result"),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "observation", "value": "x"}]},
            "orphan_tool_result",
            "follows no tool call",
        ),
        (messages({"role": "user", "content": [{"type": "image_url"}]}), "not_text", "a part of type 'image_url'"),
        (messages({**USER, "images": ["a.png"]}), "not_text", "turn 1 has images"),
        ({"prompt": "Hi", "image": "a.png"}, "not_text", "the record has image"),
        (messages(USER, tools="{broken"), "bad_tools", "`tools` cannot be read as JSON"),
        (messages(USER, tools={"name": "f"}), "bad_tools", "`tools` must be a list, not dict"),
        (messages(USER, tools=[{"type": "web"}]), "bad_tools", "a tool has no function name"),
        (messages(USER, tools=["f"]), "bad_tools", "a tool must be an object, not str"),
        ({"system": "SYSTEM: -\n{broken", "chat": "USER: Hi"}, "bad_tools", "the functions in `system`"),
        ({"system": '{"name": "\\ud800"}', "chat": "USER: Hi"}, "bad_tools", "a function in `system` cannot be read"),
        (calling("f"), "bad_tool_call", "`tool_calls` must be a list, not str"),
        (calling([{"name": "f"}]), "bad_tool_call", "turn 2 has a tool call without function.name"),
        (calling([{"function": {"name": "f", "arguments": "a=1"}}]), "bad_tool_call", "arguments of a tool call"),
        (calling([{"function": {"name": "f", "arguments": [1]}}]), "bad_tool_call", "must be an object, not list"),
        (messages({**USER, "tool_calls": [CALL]}), "bad_tool_call", "only the assistant calls tools, not the user"),
        (messages(USER, {**ASSISTANT, "function_call": {"name": "f"}}, USER), "bad_tool_call", "`function_call`"),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "f()"},
                               {"from": "observation", "value": "x"}]},
            "bad_tool_call",
            "turn 2: a tool call cannot be read as JSON",
        ),
        (
            {"chat": "USER: Hi\n\n\nASSISTANT: <functioncall> [] <|endoftext|>\n\n\nUSER: More"},
            "bad_tool_call",
            "<functioncall>: a tool call has no name",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_by_name(record: Any, reason: str, detail: str) -> None:
    reject = refusal(record)
    assert reject.reason == reason
    assert detail in reject.detail


def test_every_reason_is_explained_in_the_docs() -> None:
    code = "".join(path.read_text() for path in (ROOT / "services" / "ingest").glob("*.py"))
    raised = set(re.findall(r'Reject\(\s*"(\w+)"', code)) | set(re.findall(r'json_of\(.*?, "(\w+)"', code))
    docs = (ROOT / "docs" / "formats.md").read_text()
    explained = set(re.findall(r"^\| `(\w+)` \|", docs.partition("## Refusals")[2], re.MULTILINE))
    assert raised == explained


def test_each_turn_of_the_assistant_is_asked_with_what_was_said_before() -> None:
    turns = [
        {"role": "system", "content": "Be brief"}, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"}, ASSISTANT, ASSISTANT, USER, ASSISTANT,
    ]  # fmt: skip
    asked = record_of({"messages": turns}, each=True).asked
    assert [len(one.messages) for one in asked] == [2, 4, 7]
    assert [one.turn for one in asked] == [0, 1, 3]
    assert record_of({"messages": turns}).asked == asked[-1:]
    open_end = record_of({"messages": turns[:7]}, each=True).asked
    assert [len(one.messages) for one in open_end] == [2, 4, 7]


def test_each_prefix_is_asked_or_the_record_is_refused() -> None:
    turns = [USER, {"role": "system", "content": "x"}, ASSISTANT, USER]
    with pytest.raises(Reject, match="no_user_turn: the last turn is the system's"):
        record_of({"messages": turns}, each=True)
    assert len(record_of({"messages": turns}).asked) == 1


def test_the_first_of_a_list_of_turns_is_asked() -> None:
    record = {"question_id": 81, "category": "writing", "turns": ["Hi", "Rewrite it"], "system": "Be brief"}
    read = record_of(record)
    assert (read.id, read.conversation_id) == ("81", "81")
    assert read.asked == [Conversation([{"role": "system", "content": "Be brief"}, USER], None)]


def test_ids_are_taken_as_they_are() -> None:
    assert record_of({"id": "a", "input_ids": [5, 6]}).asked == [Conversation([], None, ids=[5, 6])]


@pytest.mark.parametrize(
    ("record", "id", "group"),
    [
        ({"id": 7, "uuid": "u"}, "7", "7"),
        ({"id": "", "uuid": "u"}, "u", "u"),
        ({"id": "row-7", "conversation_id": 3}, "row-7", "3"),
        ({"conversation_id": "c"}, None, "c"),
        ({}, None, None),
    ],
)
def test_ids_of_records_and_of_conversations(record: dict[str, Any], id: str | None, group: str | None) -> None:
    read = record_of({"prompt": "Hi", **record})
    assert (read.id, read.conversation_id) == (id, group)


def test_unknown_columns_are_metadata_on_request() -> None:
    record = {"id": 1, "prompt": "Hi", "system": "x", "topic": {"a": [1]}, "score": 0.5, "none": None}
    assert record_of(record).metadata == {}
    assert record_of(record, metadata=["score", "missing"]).metadata == {"score": 0.5}
    assert record_of(record, metadata="all").metadata == {"topic": {"a": [1]}, "score": 0.5, "none": None}


def batch_line(**body: Any) -> dict[str, Any]:
    url = "/v1/chat/completions"
    return {"custom_id": "r1", "method": "POST", "url": url, "body": {"model": "m", "messages": [USER], **body}}


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ({}, Own()),
        ({"temperature": 0.2, "top_p": None, "stop": ["END"]}, Own({"temperature": 0.2, "stop": ["END"]})),
        ({"max_tokens": 5, "n": 3, "seed": 1, "stream": True}, Own({}, 5, 3)),
        ({"max_tokens": 5, "max_completion_tokens": 6}, Own({}, 6)),
        (
            {"min_tokens": 2, "top_k": 0},
            Own({"min_new_tokens": 2, "top_k": -1}),
        ),
        ({"response_format": {"type": "text"}, "tool_choice": "auto"}, Own()),
        ({"response_format": {"type": "json_object"}}, Own({"json_schema": '{"type":"object"}'})),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}}},
            Own({"json_schema": '{"type":"string"}'}),
        ),
    ],
)
def test_a_batch_line_asks_with_its_own_sampling(body: dict[str, Any], own: Own) -> None:
    read = record_of(batch_line(**body))
    assert (read.id, read.own) == ("r1", own)
    assert read.asked == [Conversation([USER], None)]


def test_tools_of_a_batch_line_are_asked_unless_it_chooses_none() -> None:
    assert record_of(batch_line(tools=[FUNCTION])).asked[0].tools == [{"type": "function", "function": FUNCTION}]
    assert record_of(batch_line(tools=[FUNCTION], tool_choice="none")).asked[0].tools is None


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        (batch_line(max_tokens=0), "bad_sampling", "body: Expected `int` >= 1 - at `$.max_tokens`"),
        (batch_line(temperature="hot"), "bad_sampling", "`$.temperature`"),
        (batch_line(best_of=2), "bad_sampling", "body.best_of is no sampling parameter SGLang knows"),
        (batch_line(tool_choice="required"), "bad_sampling", "body.tool_choice 'required' cannot be asked"),
        (batch_line(response_format={"type": "xml"}), "bad_sampling", "body.response_format of type 'xml'"),
        (batch_line(messages=[]), "no_user_turn", "no turn of the user"),
        ({**batch_line(), "url": "/v1/embeddings"}, "bad_field", "only requests to /chat/completions are read"),
        ({"body": "Hi"}, "bad_field", "`body` must be an object"),
        ({"turns": []}, "bad_field", "`turns` must be a list of the user's questions"),
        ({"turns": [{"content": "Hi"}]}, "bad_field", "`turns` must be a list of the user's questions"),
        ({"input_ids": [[1]]}, "bad_field", "`input_ids` must be a flat list of token ids"),
        ({"input_ids": [-1]}, "bad_field", "`input_ids` must be a flat list of token ids"),
        ({"input_ids": []}, "empty_prompt", "`input_ids` is empty"),
        ({"input_ids": [1], "loss_mask": [0]}, "bad_field", "`loss_mask` marks a finished sequence"),
        ({"input_ids": [1], "prompt": "Hi"}, "ambiguous_format", "prompt (prompt), input_ids (ids)"),
        ({"prompt": "Hi", "conversation_id": [1]}, "bad_field", "`conversation_id` must be text or an integer"),
    ],
)
def test_what_newer_shapes_cannot_ask_is_refused_by_name(record: Any, reason: str, detail: str) -> None:
    reject = refusal(record)
    assert reject.reason == reason
    assert detail in reject.detail
