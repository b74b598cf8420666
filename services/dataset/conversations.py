"""Text for trainers that take nothing else (TorchSpec, Model-Optimizer, AngelSlim, ...). What it loses is said: tokens.

The answer is decoded, its stop token cut off and its reasoning separated at the close tag the row remembers; tool calls
stay as the model wrote them. Rendered and encoded again by a trainer, a row may come back as other ids, and a template
may drop the reasoning altogether: every row is marked `lossy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from schemas.sequences import NEVER_CLOSED
from services.dataset.tokens import Tokens
from services.dataset.vocab import Frequencies
from services.kernel.errors import SettingsError


class Conversations:
    """`train-00000-of-00001.jsonl`: the messages as they were asked and the answer as one more, under `key`."""

    columns = (
        "id", "input_ids", "prompt_length", "reasoning_end", "finish_reason", "matched_stop", "messages", "tools",
        "source", "conversation_id",
    )  # fmt: skip

    def __init__(self, tokens: Tokens, *, key: str, open_tag: str, close_tag: str) -> None:
        self._tokens, self._key, self._open_tag, self._close_tag = tokens, key, open_tag, close_tag

    def files(self, split: str, number: int, of: int) -> list[str]:
        """See export.Format."""
        return [f"{split}-{number:05d}-of-{of:05d}.jsonl"]

    def write(self, paths: Sequence[Path], table: pa.Table, max_length: int) -> None:
        """See export.Format. No row is longer than `max_length`: half a text is none."""
        encode = msgspec.json.Encoder().encode
        with paths[0].open("wb") as file:
            for batch in table.to_batches(max_chunksize=256):
                for row in batch.to_pylist():
                    file.write(encode(self._line(row)))
                    file.write(b"\n")

    def finish(self, out: Path, files: dict[str, list[str]], frequencies: Frequencies) -> None:
        """See export.Format: nothing goes with them."""

    def _line(self, row: dict[str, Any]) -> dict[str, Any]:
        line = {
            "id": row["id"],
            self._key: [*msgspec.json.decode(row["messages"]), self.answer(row)],
            "source": row["source"],
            "conversation_id": row["conversation_id"],
            "finish_reason": row["finish_reason"],
            "lossy": True,
        }
        if row["tools"] is not None:
            line["tools"] = msgspec.json.decode(row["tools"])
        return line

    def answer(self, row: dict[str, Any]) -> dict[str, str]:
        """The message of the assistant. Raises SettingsError when the reasoning does not end with the close tag."""
        ids, first, end = row["input_ids"], row["prompt_length"], row["reasoning_end"]
        matched = None if row["matched_stop"] is None else msgspec.json.decode(row["matched_stop"])
        last = len(ids) - (row["finish_reason"] == "stop" and isinstance(matched, int))
        if end is None:
            return {"role": "assistant", "content": self._tokens.decode(ids[first:last])}
        if end == NEVER_CLOSED:
            reasoning, content = self._tokens.decode(ids[first:last]), ""
        else:
            reasoning, content = self._tokens.decode(ids[first : end + 1]), self._tokens.decode(ids[end + 1 : last])
            if self._close_tag not in reasoning:
                raise SettingsError(
                    f"row {row['id']}: the reasoning ends with {reasoning[-20:]!r}, not with --close-tag "
                    f"{self._close_tag!r}"
                )
            reasoning, _, rest = reasoning.rpartition(self._close_tag)
            content = rest + content  # white space may share the last token with the tag
        reasoning = reasoning.strip().removeprefix(self._open_tag).strip("\n")
        return {"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": reasoning}
