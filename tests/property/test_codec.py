"""The codec gives back what it got and meets foreign bytes with a message, never with a crash or a bomb."""

from __future__ import annotations

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from schemas.prompts import Prompt, SourceRef
from schemas.sequences import Outcome, Sequence
from services.kernel.codec import Decoder, Encoder
from services.kernel.errors import Reject

token_ids = st.lists(st.integers(0, 163_839), min_size=1, max_size=200)


def prompt(prompt_ids: list[int]) -> Prompt:
    return Prompt(
        id=b"0123456789abcdef",
        prompt_ids=prompt_ids,
        sampling={"temperature": 0.0, "max_new_tokens": 16, "stop_token_ids": [2]},
        seed=7,
        source="s",
        source_ref=SourceRef("f.jsonl", 1),
        conversation_id="c",
        model="m",
        vocab_size=163_840,
        context_length=8192,
        tokenizer_fingerprint="f",
        created_at=1.0,
    )


@given(prompt_ids=token_ids, output_ids=token_ids)
def test_ids_travel_untouched(prompt_ids: list[int], output_ids: list[int]) -> None:
    sent = Sequence(
        prompt=prompt(prompt_ids), output_ids=output_ids, finish_reason="stop", rids=["r"], attempts=1,
        effective_max_new_tokens=16, segments=[len(output_ids)], latency_seconds=0.1, generated_at=2.0,
    )  # fmt: skip
    decoder: Decoder[Outcome] = Decoder(Outcome)  # type: ignore[arg-type]
    assert decoder.decode(Encoder().encode(sent)) == sent


@given(data=st.binary(max_size=300))
def test_foreign_bytes_are_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(Reject, match="undecodable"):
        Decoder(Prompt).decode(data)


@given(cut=st.integers(1, 100), flip=st.integers(0, 10_000))
def test_damage_is_noticed(cut: int, flip: int) -> None:
    data = Encoder().encode(prompt(list(range(100))))
    damaged = bytearray(data)
    damaged[5 + flip % (len(data) - 5)] ^= 0x10  # byte 4 has a bit that means nothing
    for bad in (data[:-cut], data + b"x", bytes(damaged)):
        with pytest.raises(Reject):
            Decoder(Prompt).decode(bad)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    with pytest.raises(Reject, match="50000000 bytes when unpacked, 1000000 are allowed"):
        Decoder(Prompt, max_bytes=1_000_000).decode(bomb)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))
    with pytest.raises(Reject, match="does not state its size"):
        Decoder(Prompt, max_bytes=1_000_000).decode(unsized)


def test_another_message_is_refused_by_its_tag() -> None:
    data = zstandard.compress(msgspec.msgpack.encode({"type": "prompt.v9"}))
    with pytest.raises(Reject, match=r"prompt\.v9"):
        Decoder(Prompt).decode(data)
